"""Argument checks of ``trtllm_batch_decode_with_kv_cache_mla``."""

from __future__ import annotations

import math
from typing import Any

import torch

from mlacast.compat.flashinfer._decode_checks import refuse
from mlacast.errors import UnsupportedError, check_tensor, check_type, dtype_name, fail
from mlacast.ops.query import MAX_HEADS

OP = "trtllm_batch_decode_with_kv_cache_mla"
PACKED_BYTES = 656
BACKENDS = ("auto", "trtllm-gen", "sparse", "xqa", "cute-dsl")
# (kv_lora_rank, qk_rope_head_dim) and the width of a query head.
WIDTHS = {(512, 64): 576, (512, 0): 512}


def check_options(
    is_sparse: bool,
    backend: str,
    skip_softmax: float | None,
    uses_shared_paged_kv_idx: bool,
    counter_buffer: torch.Tensor | None,
) -> None:
    """Check switches that would change the result, and the counter buffer."""
    if skip_softmax:
        name = "skip_softmax_threshold_scale_factor"
        if is_sparse:
            fail(OP, name, "be None with sparse_mla_top_k > 0", skip_softmax)
        refuse(OP, name, "be None or 0: the softmax is exact")
    if uses_shared_paged_kv_idx is not True:
        refuse(OP, "uses_shared_paged_kv_idx", "be True: keys and values are the same rows")
    if counter_buffer is not None and backend not in ("auto", "trtllm-gen"):
        name = "multi_ctas_kv_counter_buffer"
        fail(OP, name, f"be None for backend {backend!r}", "a value")


def check_dims(
    kv_lora_rank: int, qk_rope_head_dim: int, is_sparse: bool, top_k_lens: torch.Tensor | None
) -> int:
    """Check the head dimensions and what goes with those without RoPE; return their sum."""
    width = WIDTHS.get((kv_lora_rank, qk_rope_head_dim))
    if width is None:
        supported = " or ".join(str(dims) for dims in WIDTHS)
        requirement = f"be {supported}"
        actual = (kv_lora_rank, qk_rope_head_dim)
        fail(OP, "(kv_lora_rank, qk_rope_head_dim)", requirement, actual)
    if qk_rope_head_dim == 0:
        if not is_sparse:
            fail(OP, "sparse_mla_top_k", "be positive for qk_rope_head_dim=0", 0)
        if top_k_lens is None:
            fail(OP, "sparse_mla_top_k_lens", "be given for qk_rope_head_dim=0", None)
    elif top_k_lens is not None:
        fail(OP, "sparse_mla_top_k_lens", "be None for qk_rope_head_dim=64", "a value")
    return width


def check_decode_query(query: torch.Tensor, is_ragged: bool, sizes: dict[str, Any]) -> None:
    """Check [B, Q, H, D], or [total_q, H, D] of a ragged call."""
    dtypes = (torch.bfloat16, torch.float8_e4m3fn)
    remedy = "three dimensions go with cum_seq_lens_q, four without"
    dims = "total_q H D" if is_ragged else "B Q H D"
    check_tensor(OP, "query", query, dims, sizes, remedy=remedy)
    check_tensor(OP, "query", query, dims, sizes, dtype=dtypes, last_dim_contiguous=True)
    if not 1 <= sizes["H"] <= MAX_HEADS:
        fail(OP, "query", f"have 1 to {MAX_HEADS} heads", sizes["H"])


def _reason_against(
    backend: str, query: torch.Tensor, kv_cache: torch.Tensor, is_sparse: bool
) -> str:
    """Say what a kernel of FlashInfer lacks for these inputs, "" if it takes them."""
    if backend == "sparse":
        if not is_sparse:
            return "needs sparse_mla_top_k > 0"
        if query.dtype != torch.bfloat16:
            return f"needs a bfloat16 query, got {dtype_name(query.dtype)}"
        if kv_cache.dtype != torch.uint8 or kv_cache.shape[-1] != PACKED_BYTES:
            found = f"{dtype_name(kv_cache.dtype)} and {kv_cache.shape[-1]}"
            return f"needs a uint8 kv_cache with last dimension {PACKED_BYTES}, got {found}"
        return ""
    if is_sparse and backend != "trtllm-gen":
        return "has no sparse mode"
    if kv_cache.dtype != query.dtype:
        found = f"{dtype_name(query.dtype)} and {dtype_name(kv_cache.dtype)}"
        return f"needs query and kv_cache of one dtype, got {found}"
    return ""


def choose_kernel(
    backend: str, query: torch.Tensor, kv_cache: torch.Tensor, is_sparse: bool
) -> str:
    """Name the kernel of FlashInfer whose contract the call follows."""
    candidates = BACKENDS[1:] if backend == "auto" else (backend,)
    reasons = []
    for name in candidates:
        reason = _reason_against(name, query, kv_cache, is_sparse)
        if not reason:
            return name
        reasons.append(f"{name} {reason}")
    fail(OP, "backend", "take these inputs", f"{backend!r} ({'; '.join(reasons)})")


def check_cache(kv_cache: torch.Tensor, width: int) -> torch.Tensor:
    """Check [pages, page_size, width] or [pages, 1, page_size, width]; return it without the 1."""
    dims = (f"pages page_size {width}", f"pages 1 page_size {width}")
    check_tensor(OP, "kv_cache", kv_cache, dims, {})
    return kv_cache.squeeze(1) if kv_cache.dim() == 4 else kv_cache


def check_xqa(q_len: int | None, has_sinks: bool, return_lse: bool) -> None:
    """Hold a call that names xqa against its limits."""
    if q_len != 1:
        fail(OP, "query", "have one token per request for 'xqa'", q_len)
    if has_sinks:
        fail(OP, "sinks", "be None for 'xqa'", "a value")
    if return_lse:
        raise UnsupportedError(
            f"{OP}: return_lse must be False for 'xqa', got True; backend='auto' returns it",
            op=OP,
            missing=("return_lse",),
        )


def check_table(
    block_tables: torch.Tensor, is_sparse: bool, lead: torch.Size, sizes: dict[str, Any]
) -> None:
    """Check lists of token ids, or tables of page ids."""
    if not is_sparse:
        dims, remedy = "B max_pages", "without sparse_mla_top_k they are ids of pages"
    else:
        dims = "B Q K" if len(lead) == 2 else "total_q K"
        remedy = "with sparse_mla_top_k they are ids of tokens, a list for each query token"
    check_tensor(
        OP,
        "block_tables",
        block_tables,
        dims,
        sizes,
        dtype=torch.int32,
        last_dim_contiguous=True,
        remedy=remedy,
    )


def check_lengths(
    seq_lens: torch.Tensor | None,
    is_packed: bool,
    lead: torch.Size,
    sizes: dict[str, Any],
    device: torch.device,
) -> torch.Tensor | None:
    """Check lengths per request, or per token for the 656-byte cache, returned flat."""
    if seq_lens is None:
        if not is_packed:
            fail(OP, "seq_lens", "be given", None)
        return None
    if not is_packed:
        check_tensor(OP, "seq_lens", seq_lens, "B", sizes, dtype=torch.int32, device=device)
        return seq_lens
    tokens = math.prod(lead)
    shapes = [list(lead), [tokens]]
    check_type(OP, "seq_lens", seq_lens, torch.Tensor, "a torch.Tensor or None")
    if list(seq_lens.shape) not in shapes:
        requirement = f"have shape {shapes[0]} or {shapes[1]} with the 656-byte cache"
        fail(OP, "seq_lens", requirement, list(seq_lens.shape), "they count columns of each token")
    flat = seq_lens.reshape(tokens)
    check_tensor(OP, "seq_lens", flat, "tokens", {}, dtype=torch.int32, device=device)
    return flat

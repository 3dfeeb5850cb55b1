"""``sparse_mla_fp8_decode``: per-tensor FP8 query and cache, keys named by token."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.compat.mate._checks import (
    D_QK,
    check_device,
    check_dtype,
    check_query_shape,
    check_seq_lens,
    check_top_k,
    check_top_k_blocks,
)
from mlacast.compat.mate.metadata import DecodeConfig, DecodeMetadata
from mlacast.descriptors.kv_format import KvFormat
from mlacast.errors import UnsupportedError, check_finite, check_tensor, check_type, fail
from mlacast.ops import value_checks
from mlacast.ops.known_calls import more_than_launches
from mlacast.ops.overlap import check_no_overlap
from mlacast.ops.query import MAX_HEADS
from mlacast.ops.repeatable import repeatable
from mlacast.ops.sparse_mla_decode import sparse_mla_decode

OP = "sparse_mla_fp8_decode"
D_V, D_ROPE = 512, 64


@repeatable("mate.sparse_mla_fp8_decode")
def sparse_mla_fp8_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor | None,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    sinks: None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: None = None,
    max_q_len: None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    metadata: DecodeMetadata | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend e4m3 queries to the e4m3 tokens that ``block_tables`` names.

    Column j of request b counts if ``j < clamp(seq_lens[b], 0, K)`` and its id names a row of the
    cache, wherever invalid ids stand; repeats count each time. With S = bmm1_scale * q.k over all
    576 dimensions and V the first 512: out = bmm2_scale * softmax(S) V, rounded once to bfloat16.

    Args:
        query: [B, Q, H, 576] float8_e4m3fn, contiguous: 512 latent dimensions, then 64 of RoPE. H
            up to 64, or a multiple of 64.
        kv_cache: [pages, page_size, 576] or [pages, 1, page_size, 576] float8_e4m3fn, contiguous;
            any page size.
        workspace_buffer: Not used.
        qk_nope_head_dim: Not used: the score scale is the caller's.
        kv_lora_rank: 512.
        qk_rope_head_dim: 64.
        block_tables: [B, Q, K] int32, contiguous: ids of tokens (``page * page_size + offset``),
            not of pages.
        seq_lens: [B] or [B, 1] int32, contiguous: leading columns that count, for all query tokens
            of a request.
        max_seq_len: Not used.
        sparse_mla_top_k: K, a positive multiple of 64.
        out: [B, Q, H, 512] bfloat16, contiguous, to write, or None.
        bmm1_scale: Number on the host: scales of query and key times the score scale.
        bmm2_scale: Number on the host: scale of the values times that of the output.
        sinks: None: not built here.
        skip_softmax_threshold_scale_factor: None or 0: nothing is skipped.
        enable_pdl: A hint for launches, without effect.
        backend: MATE's name of a kernel, without effect; ``MLACAST_BACKEND`` chooses here.
        is_var_seq: Without effect: lengths may always differ.
        uses_shared_paged_kv_idx: True: keys and values are the same rows.
        lse: [B * Q, H] or [B, Q, H] float32, contiguous, to write, or None. Written whenever it is
            given.
        return_lse: Whether to return lse too.
        cute_dsl_impl: Without effect.
        kv_scale_format: Without effect: a per-tensor FP8 cache holds no scales.
        cum_seq_lens_q: None: all requests have Q tokens.
        max_q_len: None, likewise.
        multi_ctas_kv_counter_buffer: Not used.
        metadata: From ``get_batch_decode_metadata_mla`` for these shapes, or None; the result does
            not depend on it.

    Returns:
        out, or (out, lse): the given objects, or new tensors [B, Q, H, 512] bfloat16 and
        [B * Q, H] float32. lse is natural, contains bmm1_scale and not bmm2_scale. A row without a
        valid column gives zeros and lse +inf.

    Raises:
        TypeError: An argument is of another Python type, or the dtype or contiguity of a tensor is
            wrong.
        ValueError: A shape, device or number breaks the contract, or metadata belong to another
            call; nothing has been written.
        UnsupportedError: An argument asks for what is not built, or no backend covers the call.
    """
    check_top_k(OP, sparse_mla_top_k)
    if (kv_lora_rank, qk_rope_head_dim) != (D_V, D_ROPE):
        requirement = f"be {D_V} and {D_ROPE}"
        actual = f"{kv_lora_rank} and {qk_rope_head_dim}"
        fail(OP, "kv_lora_rank and qk_rope_head_dim", requirement, actual)
    _check_host_scale("bmm1_scale", bmm1_scale)
    _check_host_scale("bmm2_scale", bmm2_scale)
    _refuse(
        sinks=sinks is not None,
        skip_softmax_threshold_scale_factor=bool(skip_softmax_threshold_scale_factor),
        uses_shared_paged_kv_idx=uses_shared_paged_kv_idx is not True,
        cum_seq_lens_q=cum_seq_lens_q is not None,
        max_q_len=max_q_len is not None,
    )
    sizes: dict[str, Any] = {"K": sparse_mla_top_k}
    _check_inputs(query, kv_cache, block_tables, sizes)
    check_top_k_blocks(OP, sparse_mla_top_k)
    device = query.device
    if out is not None:
        check_tensor(OP, "out", out, f"B Q H {D_V}", sizes)
        check_dtype(OP, "out", out, torch.bfloat16)
        check_device(OP, "out", out, device)
    tokens = sizes["B"] * sizes["Q"]
    if lse is not None:
        _check_lse(lse, tokens, sizes, device)
    check_seq_lens(OP, seq_lens, sizes, device)
    check_type(OP, "return_lse", return_lse, bool, "a bool")
    config = DecodeConfig(sizes["B"], sizes["Q"], sizes["H"], sparse_mla_top_k)
    lengths = seq_lens.view(config.batch)
    if metadata is not None:
        wanted = "what get_batch_decode_metadata_mla returns, or None"
        check_type(OP, "metadata", metadata, DecodeMetadata, wanted)
        metadata.check(OP, config, device)
    if value_checks.validation_requested(OP, device):
        if metadata is not None:
            metadata.check_seq_lens(OP, lengths)
        # Lengths beyond the list are legal here, and a mistake to the core op.
        lengths = lengths.clamp(0, config.topk)
    if lse is not None and not torch.compiler.is_compiling():
        read = {"query": query, "kv_cache": kv_cache, "block_tables": block_tables, "out": out}
        check_no_overlap(OP, [("lse", lse)], [*read.items(), ("seq_lens", seq_lens)])
    if out is None:
        out = torch.empty((*query.shape[:3], D_V), dtype=torch.bfloat16, device=device)
    natural = _attend(
        query.view(tokens, config.heads, D_QK),
        kv_cache.view(kv_cache.shape[0], kv_cache.shape[-2], D_QK),
        block_tables.view(tokens, config.topk),
        lengths[:, None].expand(-1, config.q_len).reshape(tokens),
        out.view(tokens, config.heads, D_V),
        (float(bmm1_scale), float(bmm2_scale)),
    )
    if lse is None and not return_lse:
        return out
    if lse is None:
        lse = torch.empty_like(natural)
    more_than_launches()
    # The core op marks rows without keys by -inf.
    inf = float("inf")
    torch.nan_to_num(
        natural, nan=float("nan"), posinf=inf, neginf=inf, out=lse.view(tokens, config.heads)
    )
    return (out, lse) if return_lse else out


def _attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scales: tuple[float, float],
) -> torch.Tensor:
    """Fill ``out`` and return the lse [tokens, H] of the core op, 128 heads at a time."""
    parts = []
    for first in range(0, query.shape[1], MAX_HEADS):
        heads = slice(first, first + MAX_HEADS)
        _, lse = sparse_mla_decode(
            query[:, heads],
            cache,
            indices,
            kv_format=KvFormat.FP8,
            sm_scale=scales[0],
            v_scale=scales[1],
            topk_length=lengths,
            out=out[:, heads],
        )
        parts.append(lse)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _check_host_scale(argument: str, scale: object) -> None:
    """Raise unless a scale is a finite number on the host."""
    if isinstance(scale, torch.Tensor):
        raise UnsupportedError(
            f"{OP}: {argument} must be a number on the host, got a Tensor; "
            "mlacast.sparse_mla_decode takes tensors as sm_scale and v_scale",
            op=OP,
            missing=(argument,),
        )
    check_type(OP, argument, scale, (int, float), "a number")
    assert isinstance(scale, (int, float)), "check_type has refused others"
    check_finite(OP, argument, scale)


def _refuse(**asked_for: bool) -> None:
    """Raise for arguments that would change the result and are not built."""
    wanted = {
        "sinks": "be None; mlacast.sparse_mla_decode takes attn_sink=",
        "skip_softmax_threshold_scale_factor": "be None or 0: the softmax is exact",
        "uses_shared_paged_kv_idx": "be True: keys and values are the same rows",
        "cum_seq_lens_q": "be None: every request has Q query tokens",
        "max_q_len": "be None: every request has Q query tokens",
    }
    for argument, is_set in asked_for.items():
        if is_set:
            raise UnsupportedError(
                f"{OP}: {argument} must {wanted[argument]}, got another value",
                op=OP,
                missing=(argument,),
            )


def _check_inputs(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    sizes: dict[str, Any],
) -> None:
    """Check the three inputs in MATE's order; binds B, Q and H."""
    inputs = {"query": query, "kv_cache": kv_cache, "block_tables": block_tables}
    for name, tensor in inputs.items():
        check_type(OP, name, tensor, torch.Tensor, "a torch.Tensor")
    for name, tensor in inputs.items():
        check_device(OP, name, tensor, query.device)
    check_query_shape(OP, query, sizes)
    check_dtype(OP, "query", query, torch.float8_e4m3fn)
    dims = (f"pages page_size {D_QK}", f"pages 1 page_size {D_QK}")
    check_tensor(OP, "kv_cache", kv_cache, dims, {})
    if kv_cache.shape[-2] < 1:
        shape = f"shape {list(kv_cache.shape)}"
        fail(OP, "kv_cache", "have at least one token per page", shape)
    check_dtype(OP, "kv_cache", kv_cache, torch.float8_e4m3fn)
    check_tensor(OP, "block_tables", block_tables, "B Q K", sizes)
    check_dtype(OP, "block_tables", block_tables, torch.int32)


def _check_lse(lse: torch.Tensor, tokens: int, sizes: dict[str, Any], device: torch.device) -> None:
    """Check the lse buffer: one combined check, then the shape."""
    check_type(OP, "lse", lse, torch.Tensor, "a torch.Tensor or None")
    if lse.dtype != torch.float32 or lse.device != device or not lse.is_contiguous():
        raise TypeError(
            f"{OP}: lse must be a contiguous float32 tensor on {device}, got {lse.dtype} on "
            f"{lse.device} with strides {list(lse.stride())}"
        )
    heads = sizes["H"]
    flat, by_request = [tokens, heads], [sizes["B"], sizes["Q"], heads]
    if list(lse.shape) not in (flat, by_request):
        fail(OP, "lse", f"have shape {flat} or {by_request}", list(lse.shape))

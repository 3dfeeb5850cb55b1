"""``trtllm_batch_decode_with_kv_cache_mla``: sparse and dense MLA decode over a paged cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mlacast.compat.flashinfer._decode_checks import (
    Scale,
    check_backend_name,
    check_buffer,
    check_dcp,
    check_scales,
    check_sinks,
)
from mlacast.compat.flashinfer._mla_decode_checks import (
    BACKENDS,
    OP,
    PACKED_BYTES,
    check_cache,
    check_decode_query,
    check_dims,
    check_lengths,
    check_options,
    check_table,
    check_xqa,
    choose_kernel,
)
from mlacast.compat.flashinfer._ragged import RaggedTokens, check_cum_seq_lens, ragged_tokens
from mlacast.descriptors.kv_format import KvFormat
from mlacast.errors import UnsupportedError, check_choice, check_tensor, check_type, fail
from mlacast.ops.dense_mla_decode import dense_mla_decode
from mlacast.ops.known_calls import more_than_launches
from mlacast.ops.repeatable import repeatable
from mlacast.ops.sparse_mla_decode import sparse_mla_decode

D_V = 512


@repeatable("flashinfer.trtllm_batch_decode_with_kv_cache_mla")
def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor | None,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend the query tokens of each request to cached tokens.

    With ``sparse_mla_top_k`` = K > 0 every query token attends to the token ids of its own list,
    causality being the caller's; with 0 to all tokens of its request, the last query token to the
    last cached one (bottom-right causal). Ids outside the cache do not count, wherever they stand.

    Args:
        query: [B, Q, H, D] bfloat16 or float8_e4m3fn, H 1..128; or, with ``cum_seq_lens_q``,
            [total_q, H, D].
        kv_cache: [pages, page_size, D] or [pages, 1, page_size, D] of the query's dtype, any page
            size. Sparse with a bfloat16 query also uint8 with 656 bytes per token (V3.2).
        workspace_buffer: Not used.
        qk_nope_head_dim: Not used: the score scale is the caller's.
        kv_lora_rank: 512.
        qk_rope_head_dim: 64 (D = 576), or 0 (D = 512, sparse only).
        block_tables: Sparse: [B, Q, K] or [total_q, K] int32 ids of tokens. Dense:
            [B, max_pages] int32 ids of pages.
        seq_lens: [B] int32, cached tokens of each request; in sparse mode a request of length 0 is
            empty and other lengths do not mask columns. With the 656-byte cache: columns that
            count, [B, Q] or [B * Q] int32 ([total_q] if ragged), or None for all.
        max_seq_len: Not used.
        sparse_mla_top_k: K, or 0 for dense.
        out: bfloat16 in the query's shape with 512 as last dimension, contiguous, or None.
        bmm1_scale: Scales of query and key times the score scale; a number, or a float32 tensor of
            one element, read on the device (not with the 656-byte cache).
        bmm2_scale: Scale of the values times that of the output, likewise; 1 with the 656-byte
            cache.
        sinks: [H] float32, or a list of one such tensor: a logit per head that joins the
            denominator, and lse.
        skip_softmax_threshold_scale_factor: None or 0: nothing is skipped.
        enable_pdl: A hint for launches, without effect.
        backend: "auto", or a kernel of FlashInfer, whose limits then hold; ``MLACAST_BACKEND``
            chooses what runs here.
        is_var_seq: Without effect: lengths may always differ.
        uses_shared_paged_kv_idx: True: keys and values are the same rows.
        lse: [B * Q, H] or [B, Q, H] float32 ([total_q, H] if ragged), contiguous, or None. Written
            with ``return_lse`` only.
        return_lse: Whether to return lse too.
        cute_dsl_impl: Without effect.
        kv_scale_format: "auto", "pow2_fp32" or "arbitrary_fp32", without effect: the scales of the
            656-byte cache are used as they stand.
        cum_seq_lens_q: [B + 1] int32, starts of the requests in a ragged query. Tokens past the
            last request are empty rows.
        max_q_len: Most query tokens of a request. Without it ``cum_seq_lens_q`` is read and checked
            on the host, which synchronises.
        multi_ctas_kv_counter_buffer: Not used; goes with "auto" and "trtllm-gen" only.
        sparse_mla_top_k_lens: [B * Q] int32, columns that count, for ``qk_rope_head_dim`` = 0 only.
        enable_dcp: False: decode context parallelism is not built.
        cp_world: 1.
        cp_rank: 0.
        causal_seqlens_kv_global: None.
        use_fp16_softmax: Without effect: the softmax is float32.

    Returns:
        out, or (out, lse): the given objects, or new tensors; a new lse is [B * Q, H]. lse is in
        base 2, contains bmm1_scale and the sinks. An empty row gives zeros, and lse -inf, or the
        sink.

    Raises:
        TypeError: An argument is of another Python type, or a scale tensor is not float32.
        ValueError: A shape, dtype, stride, device or number breaks the contract, or no kernel of
            FlashInfer takes the call; nothing has been written.
        UnsupportedError: An argument asks for what is not built, or no backend covers the call.
    """
    check_backend_name(OP, backend, BACKENDS)
    for name, tensor in (("query", query), ("kv_cache", kv_cache), ("block_tables", block_tables)):
        check_type(OP, name, tensor, torch.Tensor, "a torch.Tensor")
        if tensor.device != query.device:
            fail(OP, name, f"be on {query.device} like query", tensor.device)
    check_type(OP, "sparse_mla_top_k", sparse_mla_top_k, int, "an int")
    if sparse_mla_top_k < 0:
        fail(OP, "sparse_mla_top_k", "not be negative", sparse_mla_top_k)
    check_type(OP, "return_lse", return_lse, bool, "a bool")
    check_choice(OP, "kv_scale_format", kv_scale_format, ("auto", "pow2_fp32", "arbitrary_fp32"))
    is_sparse, is_ragged = sparse_mla_top_k > 0, cum_seq_lens_q is not None
    check_dcp(
        OP,
        enable_dcp=enable_dcp,
        cp_world=cp_world,
        cp_rank=cp_rank,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
        return_lse=return_lse,
        has_sinks=sinks is not None,
        is_ragged=is_ragged,
    )
    check_options(
        is_sparse,
        backend,
        skip_softmax_threshold_scale_factor,
        uses_shared_paged_kv_idx,
        multi_ctas_kv_counter_buffer,
    )
    width = check_dims(kv_lora_rank, qk_rope_head_dim, is_sparse, sparse_mla_top_k_lens)
    sizes: dict[str, Any] = {"D": width, "K": sparse_mla_top_k}
    check_decode_query(query, is_ragged, sizes)
    is_packed = choose_kernel(backend, query, kv_cache, is_sparse) == "sparse"
    cache = check_cache(kv_cache, PACKED_BYTES if is_packed else width)
    host_only = "the kernel takes numbers only" if is_packed or backend == "cute-dsl" else ""
    check_scales(OP, host_only, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale)
    if is_packed and bmm2_scale != 1.0:
        fail(OP, "bmm2_scale", "be 1 with the 656-byte cache", bmm2_scale)
    heads, device = sizes["H"], query.device
    sink = check_sinks(OP, sinks, heads, device)
    if backend == "xqa":
        check_xqa(sizes.get("Q"), sink is not None, return_lse)
    if backend == "trtllm-gen" and is_ragged and return_lse:
        raise UnsupportedError(
            f"{OP}: return_lse must be False for a ragged query of 'trtllm-gen', got True; "
            "backend='auto' returns it",
            op=OP,
            missing=("return_lse",),
        )
    lead, tokens = query.shape[:-2], math.prod(query.shape[:-2])
    check_table(block_tables, is_sparse, lead, sizes)
    lengths = check_lengths(seq_lens, is_packed, lead, sizes, device)
    if sparse_mla_top_k_lens is not None:
        name, dims = "sparse_mla_top_k_lens", {"T": tokens}
        check_tensor(OP, name, sparse_mla_top_k_lens, "T", dims, dtype=torch.int32, device=device)
    if not is_ragged and max_q_len is not None:
        fail(OP, "max_q_len", "be None without cum_seq_lens_q", max_q_len)
    if out is not None:
        check_buffer(OP, "out", out, [*lead, heads, D_V], torch.bfloat16, device)
    if lse is not None:
        flat = [tokens, heads]
        check_buffer(OP, "lse", lse, flat, torch.float32, device, [*lead, heads])
    ragged = None
    if cum_seq_lens_q is not None:
        batch = None if is_packed else sizes["B"]
        check_cum_seq_lens(OP, cum_seq_lens_q, max_q_len, tokens, batch, device)
        ragged = ragged_tokens(cum_seq_lens_q, tokens)
    if out is None:
        out = torch.empty((*lead, heads, D_V), dtype=torch.bfloat16, device=device)
    options: dict[str, Any] = {
        "kv_format": _kv_format(kv_cache, is_packed),
        "sm_scale": bmm1_scale,
        "v_scale": bmm2_scale,
        "attn_sink": sink,
    }
    if is_sparse:
        counted = lengths if is_packed else sparse_mla_top_k_lens
        if counted is None and not is_packed:
            assert lengths is not None, "only a 656-byte cache does without"
            counted = _all_columns(lengths, sparse_mla_top_k, lead, ragged)
        _, natural = sparse_mla_decode(
            query.reshape(tokens, heads, width),
            cache,
            block_tables.reshape(tokens, sparse_mla_top_k),
            topk_length=counted,
            out=out.view(tokens, heads, D_V),
            **options,
        )
    else:
        assert lengths is not None, "a dense call has lengths"
        if ragged is not None:
            # Each token is a request of its own, shorter by the tokens that come after it.
            query, out_view = query.unsqueeze(1), out.unsqueeze(1)
            block_tables = block_tables[ragged.request]
            lengths = ragged.causal_lengths(lengths)
        else:
            out_view = out
        _, natural = dense_mla_decode(
            query, cache, block_tables, lengths, causal=True, out=out_view, **options
        )
    if not return_lse:
        return out
    if lse is None:
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    more_than_launches()
    _store_lse(natural.reshape(tokens, heads), sink, lse.view(tokens, heads))
    return out, lse


def _store_lse(natural: torch.Tensor, sink: torch.Tensor | None, lse: torch.Tensor) -> None:
    """Turn natural logs without the sink into logs of base 2 with it."""
    if sink is not None:
        natural = torch.logaddexp(natural, sink)
    torch.mul(natural, math.log2(math.e), out=lse)


def _all_columns(
    seq_lens: torch.Tensor, top_k: int, lead: torch.Size, ragged: RaggedTokens | None
) -> torch.Tensor:
    """Columns that count for each token: all of them, none for a request of length 0."""
    is_live = seq_lens.clamp(0, 1)
    if ragged is not None:
        return ragged.per_token(is_live) * top_k
    return (is_live[:, None].expand(lead[0], lead[1]) * top_k).reshape(-1)


def _kv_format(kv_cache: torch.Tensor, is_packed: bool) -> KvFormat:
    if is_packed:
        return KvFormat.V32
    return KvFormat.FP8 if kv_cache.dtype == torch.float8_e4m3fn else KvFormat.BF16

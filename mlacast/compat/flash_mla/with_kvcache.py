"""``flash_mla_with_kvcache``: decode over paged caches, by ``indices`` or by ``block_table``."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.compat.flash_mla._checks import (
    D_V,
    check_bf16_out,
    check_d_v,
    check_flags,
    check_integers,
    check_numbers,
    check_optional_tensors,
    check_query,
    check_scale,
    check_sink,
    check_tensors,
)
from mlacast.compat.flash_mla._empty_rows import mark_empty_rows_
from mlacast.compat.flash_mla._paged_decode import (
    OP,
    can_flatten,
    dense_decode,
    sparse_decode,
)
from mlacast.compat.flash_mla.metadata import FlashMLASchedMeta
from mlacast.compat.flash_mla.placement import v41_placement
from mlacast.errors import check_type, fail
from mlacast.ops.known_calls import PUBLIC, recorded


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each query token to the slots in ``indices``, or to all tokens of its request.

    Sparse mode (``indices`` given): an entry counts if its column is below the length of its
    request and ``0 <= index < num_pages * page_size``; repeats count each time and slots that
    nothing selects may hold NaN. Main and extra list share one softmax. Dense mode (``indices``
    None): every cached token counts, with ``causal`` token i of s_q sees positions below
    ``cache_seqlens - (s_q - 1 - i)``.

    Args:
        q: [b, s_q, h_q, d_qk] bfloat16, h_q 1..128, d_qk 512 or 576, last dimension contiguous.
        k_cache: Sparse: [num_pages, page_size, 1, bytes] uint8, int8 or float8_e4m3fn; the format
            follows from the bytes per token: 656 (V3.2) with d_qk = 576; 584 (V4) or 528 (V4.1, see
            ``set_v41_placement``) with d_qk = 512. Dense: [num_pages, page_size, 1, d_qk] bfloat16.
            Any page size; packed inside a page.
        block_table: [b, pages] int32, dense mode; not read in sparse mode.
        cache_seqlens: [b] int32, dense mode; not read in sparse mode.
        head_dim_v: 512.
        tile_scheduler_metadata: From ``get_mla_metadata``; filled by its first call and tied to the
            shapes of it.
        num_splits: None.
        softmax_scale: Multiplies q.k before the softmax; None means ``d_qk ** -0.5``, which is not
            the scale of an absorbed model.
        causal: Dense mode only.
        is_fp8_kvcache: True in sparse mode, False in dense mode.
        indices: [b, s_q, topk] int32 slots (``page * page_size + offset``), or None for dense mode.
        attn_sink: [h_q] float32 or None: joins the denominator only (-inf no effect, +inf zeros);
            lse does not see it.
        extra_k_cache: Second pool of sparse mode: the format of ``k_cache``, or 288 bytes (V4.1
            FP4) beside 528.
        extra_indices_in_kvcache: [b, s_q, extra_topk] int32; given exactly when ``extra_k_cache``
            is.
        topk_length: [b] int32 or None: columns that count for all query tokens of a request.
        extra_topk_length: [b] int32 or None.
        out: [b, s_q, h_q, 512] bfloat16 to write, last dimension contiguous, or None.

    Returns:
        out: ``out`` itself if given, else a new tensor of that shape.
        lse: [b, h_q, s_q] float32, natural log, contiguous.
        A row with nothing to attend gives zeros and lse +inf.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device, format or switch breaks the contract, or the
            metadata belong to other shapes; nothing has been written.
        UnsupportedError: No backend covers the call.
    """
    values = (
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale,
        causal,
        is_fp8_kvcache,
        indices,
        attn_sink,
        extra_k_cache,
        extra_indices_in_kvcache,
        topk_length,
        extra_topk_length,
        out,
    )
    # The format of a cache depends on this setting as on an argument.
    placement = v41_placement()
    repeated: tuple[torch.Tensor, torch.Tensor] | None
    repeated = PUBLIC.repeat(OP, (*values, placement))
    if repeated is not None:
        return repeated
    known = PUBLIC.check_once(OP, _check, values, placement)
    with recorded() as calls:
        returned = _decode(*values)
    if out is None or can_flatten(out):
        # Else the result was copied, which is no part of a call that is kept.
        after = [(mark_empty_rows_, returned[1])]
        PUBLIC.keep(OP, (*values, placement), known, calls, returned, after)
    return returned


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None,
    softmax_scale: float | None,
    causal: bool,
    is_fp8_kvcache: bool,
    indices: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices_in_kvcache: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the mode that the checked arguments of ``flash_mla_with_kvcache`` ask for."""
    metadata = tile_scheduler_metadata
    sizes: dict[str, Any] = dict(zip(("b", "s_q", "h_q", "d_qk"), q.shape, strict=True))
    if softmax_scale is None:
        softmax_scale = sizes["d_qk"] ** -0.5
    if indices is None:
        for name, value in (
            ("extra_k_cache", extra_k_cache),
            ("extra_indices_in_kvcache", extra_indices_in_kvcache),
            ("topk_length", topk_length),
            ("extra_topk_length", extra_topk_length),
        ):
            if value is not None:
                fail(OP, name, "be None without indices", "a tensor")
        if is_fp8_kvcache:
            remedy = "mlacast.dense_mla_decode reads FP8 caches with kv_format="
            fail(OP, "is_fp8_kvcache", "be False without indices", True, remedy)
        return dense_decode(
            q,
            k_cache,
            block_table,
            cache_seqlens,
            metadata=metadata,
            softmax_scale=softmax_scale,
            causal=causal,
            attn_sink=attn_sink,
            out=out,
            sizes=sizes,
        )
    if causal:
        fail(OP, "causal", "be False with indices", True, "the indices say what a token sees")
    if not is_fp8_kvcache:
        remedy = "mlacast.sparse_mla_decode reads bfloat16 caches with kv_format=KvFormat.BF16"
        fail(OP, "is_fp8_kvcache", "be True with indices", False, remedy)
    return sparse_decode(
        q,
        k_cache,
        indices,
        metadata=metadata,
        softmax_scale=softmax_scale,
        attn_sink=attn_sink,
        topk_length=topk_length,
        extra_k_cache=extra_k_cache,
        extra_indices=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length,
        out=out,
        sizes=sizes,
    )


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None,
    softmax_scale: float | None,
    causal: bool,
    is_fp8_kvcache: bool,
    indices: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices_in_kvcache: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Check what both modes share; each checks its own arguments besides."""
    check_tensors(OP, q=q, k_cache=k_cache)
    check_optional_tensors(
        OP,
        block_table=block_table,
        cache_seqlens=cache_seqlens,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
        out=out,
    )
    check_integers(OP, head_dim_v=head_dim_v)
    check_flags(OP, causal=causal, is_fp8_kvcache=is_fp8_kvcache)
    wanted = "a FlashMLASchedMeta, the first value of get_mla_metadata()"
    check_type(OP, "tile_scheduler_metadata", tile_scheduler_metadata, FlashMLASchedMeta, wanted)
    if num_splits is not None:
        fail(OP, "num_splits", "be None", type(num_splits).__name__)
    check_d_v(OP, "head_dim_v", head_dim_v)
    sizes: dict[str, Any] = {}
    check_query(OP, q, "b s_q h_q d_qk", sizes)
    if softmax_scale is None:
        softmax_scale = sizes["d_qk"] ** -0.5
    check_numbers(OP, softmax_scale=softmax_scale)
    check_scale(OP, "softmax_scale", softmax_scale)
    check_sink(OP, attn_sink, sizes, q.device)
    check_bf16_out(OP, out, f"b s_q h_q {D_V}", sizes, q.device)

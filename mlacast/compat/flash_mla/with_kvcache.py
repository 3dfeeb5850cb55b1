"""``flash_mla_with_kvcache``: decode over paged caches, by ``indices`` or by ``block_table``."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.compat.flash_mla._checks import (
    D_V,
    check_bf16_out,
    check_d_v,
    check_extra_arguments,
    check_flags,
    check_indices,
    check_integers,
    check_lengths,
    check_numbers,
    check_optional_tensors,
    check_query,
    check_scale,
    check_sink,
    check_tensors,
)
from mlacast.compat.flash_mla._empty_rows import mark_empty_rows_
from mlacast.compat.flash_mla.metadata import FlashMLASchedMeta
from mlacast.compat.flash_mla.placement import (
    infer_extra_kv_format,
    infer_kv_format,
    v41_placement,
)
from mlacast.descriptors.kv_format import KvFormat
from mlacast.errors import check_tensor, check_type, fail
from mlacast.ops.dense_mla_decode import dense_mla_decode
from mlacast.ops.schedule import SparseDecodeSchedule, plan_sparse_decode
from mlacast.ops.sparse_mla_decode import sparse_mla_decode

OP = "flash_mla_with_kvcache"


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
    metadata = tile_scheduler_metadata
    wanted = "a FlashMLASchedMeta from get_mla_metadata"
    check_type(OP, "tile_scheduler_metadata", metadata, FlashMLASchedMeta, wanted)
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
        return _dense(
            q,
            k_cache,
            block_table,
            cache_seqlens,
            metadata,
            softmax_scale,
            causal,
            attn_sink,
            out,
            sizes,
        )
    if causal:
        fail(OP, "causal", "be False with indices", True, "the indices say what a token sees")
    if not is_fp8_kvcache:
        remedy = "mlacast.sparse_mla_decode reads bfloat16 caches with kv_format=KvFormat.BF16"
        fail(OP, "is_fp8_kvcache", "be True with indices", False, remedy)
    return _sparse(
        q,
        k_cache,
        indices,
        metadata,
        softmax_scale,
        attn_sink,
        extra_k_cache,
        extra_indices_in_kvcache,
        topk_length,
        extra_topk_length,
        out,
        sizes,
    )


def _per_token(per_request: torch.Tensor | None, s_q: int) -> torch.Tensor | None:
    """Lengths [b] as the core ops take them: [b * s_q]."""
    if per_request is None or s_q == 1:
        return per_request
    return per_request[:, None].expand(-1, s_q).reshape(-1)


def _by_head(lse: torch.Tensor) -> torch.Tensor:
    """[b, s_q, h_q] with -inf for empty rows -> [b, h_q, s_q] with +inf."""
    return mark_empty_rows_(lse).transpose(1, 2).contiguous()


def _can_flatten(out: torch.Tensor) -> bool:
    """Whether the token dimensions [b, s_q] of ``out`` are one strided dimension."""
    b, s_q = out.shape[:2]
    return b <= 1 or s_q <= 1 or out.stride(0) == s_q * out.stride(1)


def _dense(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    metadata: FlashMLASchedMeta,
    softmax_scale: float,
    causal: bool,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor | None,
    sizes: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    device = q.device
    check_tensor(
        OP,
        "k_cache",
        k_cache,
        "num_pages page_size 1 d_qk",
        sizes,
        dtype=torch.bfloat16,
        device=device,
        remedy="a cache without indices is bfloat16",
    )
    KvFormat.BF16.check_cache(OP, "k_cache", k_cache)
    if block_table is None:
        fail(OP, "block_table", "be given without indices", None)
    if cache_seqlens is None:
        fail(OP, "cache_seqlens", "be given without indices", None)
    check_indices(OP, "block_table", block_table, "b pages", sizes, device)
    check_lengths(OP, "cache_seqlens", cache_seqlens, "b", sizes, device)
    config = _config(q, k_cache, causal=causal, is_fp8_kvcache=False)
    metadata.check(OP, config)
    target = out if out is not None and _can_flatten(out) else None
    result, lse = dense_mla_decode(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        kv_format=KvFormat.BF16,
        sm_scale=softmax_scale,
        causal=causal,
        attn_sink=attn_sink,
        out=target,
    )
    metadata.fill(config, config, 1, device)
    return _deliver(result, out), _by_head(lse)


def _sparse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    metadata: FlashMLASchedMeta,
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
    sizes: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    device = q.device
    placement = v41_placement()
    kv_format = infer_kv_format(OP, "k_cache", k_cache, sizes["d_qk"], placement, device)
    check_indices(OP, "indices", indices, "b s_q topk", sizes, device)
    check_lengths(OP, "topk_length", topk_length, "b", sizes, device)
    check_extra_arguments(OP, extra_k_cache, extra_indices, extra_topk_length)
    extra_format = None
    if extra_k_cache is not None and extra_indices is not None:
        extra_format = infer_extra_kv_format(
            OP, "extra_k_cache", extra_k_cache, kv_format, placement, device
        )
        name = "extra_indices_in_kvcache"
        check_indices(OP, name, extra_indices, "b s_q extra_topk", sizes, device)
        check_lengths(OP, "extra_topk_length", extra_topk_length, "b", sizes, device)
    config = _config(
        q, k_cache, is_fp8_kvcache=True, indices=indices, extra=(extra_k_cache, extra_indices)
    )
    metadata.check(OP, config)
    b, s_q, h_q = q.shape[0], q.shape[1], q.shape[2]
    schedule = _schedule(metadata, config, kv_format, extra_format)
    target = out.view(b * s_q, h_q, D_V) if out is not None and _can_flatten(out) else None
    result, lse = sparse_mla_decode(
        q.flatten(0, 1),
        k_cache,
        indices.flatten(0, 1),
        kv_format=kv_format,
        sm_scale=softmax_scale,
        topk_length=_per_token(topk_length, s_q),
        extra_k_cache=extra_k_cache,
        extra_indices=None if extra_indices is None else extra_indices.flatten(0, 1),
        extra_topk_length=_per_token(extra_topk_length, s_q),
        extra_kv_format=extra_format,
        attn_sink=attn_sink,
        schedule=schedule,
        out=target,
    )
    metadata.fill(config, schedule, schedule.num_splits, device)
    assert isinstance(result, torch.Tensor), "a bfloat16 call returns a tensor"
    return _deliver(result.view(b, s_q, h_q, D_V), out), _by_head(lse.view(b, s_q, h_q))


def _deliver(result: object, out: torch.Tensor | None) -> torch.Tensor:
    """Hand on the caller's tensor, copying into it where the core op could not write it."""
    assert isinstance(result, torch.Tensor), "a bfloat16 call returns a tensor"
    if out is None:
        return result
    if not _can_flatten(out):
        out.copy_(result)
    return out


def _config(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    causal: bool = False,
    is_fp8_kvcache: bool,
    indices: torch.Tensor | None = None,
    extra: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> FlashMLASchedMeta.Config:
    extra_k_cache, extra_indices = extra
    return FlashMLASchedMeta.Config(
        b=q.shape[0],
        s_q=q.shape[1],
        h_q=q.shape[2],
        page_block_size=k_cache.shape[1],
        h_k=k_cache.shape[2],
        causal=causal,
        is_fp8_kvcache=is_fp8_kvcache,
        topk=None if indices is None else indices.shape[2],
        extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
        extra_topk=None if extra_indices is None else extra_indices.shape[2],
    )


def _schedule(
    metadata: FlashMLASchedMeta,
    config: FlashMLASchedMeta.Config,
    kv_format: KvFormat,
    extra_format: KvFormat | None,
) -> SparseDecodeSchedule:
    """The schedule of the first call, or a new one for caches of other formats."""
    planned = metadata.tile_scheduler_metadata
    if (
        isinstance(planned, SparseDecodeSchedule)
        and planned.kv_format == kv_format
        and planned.extra_kv_format == extra_format
    ):
        return planned
    return plan_sparse_decode(
        config.b * config.s_q,
        config.h_q,
        config.topk or 0,
        kv_format=kv_format,
        extra_topk=config.extra_topk or 0,
        extra_kv_format=extra_format,
    )

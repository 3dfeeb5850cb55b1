"""The two modes of ``flash_mla_with_kvcache``: slots named by indices, or every token of a request.

Both check their own arguments, hold the call against the metadata, flatten requests into tokens for
the core op, and turn its results back into FlashMLA's shapes.
"""

from __future__ import annotations

from typing import Any

import torch

from mlacast.compat.flash_mla._checks import (
    D_V,
    check_extra_arguments,
    check_indices,
    check_lengths,
)
from mlacast.compat.flash_mla._empty_rows import mark_empty_rows_
from mlacast.compat.flash_mla.metadata import FlashMLASchedMeta
from mlacast.compat.flash_mla.placement import (
    infer_extra_kv_format,
    infer_kv_format,
    v41_placement,
)
from mlacast.descriptors.kv_format import KvFormat
from mlacast.errors import check_tensor, fail
from mlacast.ops.dense_mla_decode import dense_mla_decode
from mlacast.ops.schedule import SparseDecodeSchedule, plan_sparse_decode
from mlacast.ops.sparse_mla_decode import sparse_mla_decode

OP = "flash_mla_with_kvcache"


def _per_token(per_request: torch.Tensor | None, s_q: int) -> torch.Tensor | None:
    """Lengths [b] as the core ops take them: [b * s_q]."""
    if per_request is None or s_q == 1:
        return per_request
    return per_request[:, None].expand(-1, s_q).reshape(-1)


def _by_head(lse: torch.Tensor) -> torch.Tensor:
    """[b, s_q, h_q] with -inf for empty rows -> [b, h_q, s_q] with +inf."""
    return mark_empty_rows_(lse).transpose(1, 2).contiguous()


def can_flatten(out: torch.Tensor) -> bool:
    """Whether the token dimensions [b, s_q] of ``out`` are one strided dimension."""
    b, s_q = out.shape[:2]
    return b <= 1 or s_q <= 1 or out.stride(0) == s_q * out.stride(1)


def dense_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    *,
    metadata: FlashMLASchedMeta,
    softmax_scale: float,
    causal: bool,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor | None,
    sizes: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend all cached tokens; arguments as in ``flash_mla_with_kvcache``.

    ``q``, ``attn_sink``, ``softmax_scale`` and ``out`` are checked already; ``sizes`` has b, s_q,
    h_q and d_qk.
    """
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
    target = out if out is not None and can_flatten(out) else None
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


def sparse_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    metadata: FlashMLASchedMeta,
    softmax_scale: float,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
    sizes: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend the named slots; arguments as in ``flash_mla_with_kvcache``.

    ``q``, ``attn_sink``, ``softmax_scale`` and ``out`` are checked already; ``sizes`` has b, s_q,
    h_q and d_qk.
    """
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
    target = out.view(b * s_q, h_q, D_V) if out is not None and can_flatten(out) else None
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
    if not can_flatten(out):
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

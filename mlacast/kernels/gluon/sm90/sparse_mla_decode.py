"""Hopper ``sparse_mla_decode``: four warpgroups with one role each, paged caches, split-KV.

This is the launch; the kernels are ``sparse_mla_decode_kernel`` for bfloat16 queries and
``sparse_mla_decode_fp8_kernel`` for e4m3 ones, their roles stand beside them.
"""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.kernels.common.attention_arguments import (
    list_arguments,
    rope_arguments,
    split_scales,
)
from mlacast.kernels.common.combine_splits import split_scratch
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.record_places import page_division
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.attention import (
    QueryConfig,
    end_config,
    hopper_pool_config,
    query_config,
)
from mlacast.kernels.config.sparse_attention import (
    num_multiprocessors,
    plan_hopper_decode,
    ring_config,
    work_config,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_fp8_kernel import sparse_mla_decode_fp8_kernel
from mlacast.kernels.gluon.sm90.sparse_mla_decode_kernel import OPTIONS, sparse_mla_decode_kernel
from mlacast.kernels.gluon.sm90.sparse_mla_decode_merge import merge_splits


def _pool_arguments(
    launches: Launches,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
) -> tuple[Any, ...]:
    """One pool as kernel arguments, cache to length stride; pages count in units of 16 bytes."""
    assert cache.stride(0) * cache.element_size() % 16 == 0, "records are copied 16 bytes at a time"
    return (
        launches.inside(cache, cache.view(torch.int32)),
        cache.stride(0) // 16,
        cache.shape[1],
        *page_division(cache.shape[1]),
        cache.shape[0] * cache.shape[1],
        *list_arguments(indices, lengths),
    )


def launch_sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    kv_format: KvFormat,
    sm_scale: float | torch.Tensor,
    topk_length: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    extra_kv_format: KvFormat | None,
    attn_sink: torch.Tensor | None,
    q_norm_eps: float | None,
    rope: Rope | None,
    q_order: str,
    num_splits: int | None,
    batch_invariant: bool,
    workspace: torch.Tensor | None,
    out: QuantizedTensor,
    lse: torch.Tensor,
    v_scale: float | torch.Tensor = 1.0,
) -> Launches:
    """Fill ``out`` and ``lse``; arguments as in ``mlacast.sparse_mla_decode``."""
    num_tokens, num_heads, d_qk = q.shape
    target = store_target(out)
    launches = Launches(q.device, target)
    pool = _pool_arguments(launches, k_cache, indices, topk_length)
    extra_pool, extra = pool, None
    width = indices.shape[1]
    if extra_k_cache is not None and extra_indices is not None and extra_kv_format is not None:
        extra_pool = _pool_arguments(launches, extra_k_cache, extra_indices, extra_topk_length)
        extra = hopper_pool_config(extra_kv_format, d_qk, extra_topk_length)
        width += extra_indices.shape[1]
    splits = num_splits or plan_hopper_decode(
        num_tokens, num_heads, width, q.device, batch_invariant
    )
    work = work_config(num_heads, splits)
    partials = [lse, lse, lse]
    if work.is_split:
        partials = split_scratch(splits * num_tokens * num_heads, workspace, launches)
    rope_places = rope_arguments(attn_sink, rope, lse, indices)
    query = query_config(d_qk, q_order, q_norm_eps, rope)
    end = end_config(d_qk, attn_sink, rope)
    scales, scale_config = split_scales(sm_scale, v_scale, lse)
    scale_arguments = (
        scales.sm_scale,
        scales.sm_scale_tensor,
        scales.v_scale,
        scales.v_scale_tensor,
    )
    items = num_tokens * work.head_blocks * splits
    programs = min(items, num_multiprocessors(q.device))
    # What both kernels take behind their pools, before and after the norm's epsilon.
    places = (
        *rope_places,
        lse,
        *partials,
        *target.tensors.values(),
        *target.hopper_numbers,
        num_tokens,
        num_heads,
        splits,
        items,
        programs,
    )
    has_codes = q.dtype == torch.float8_e4m3fn
    constants = {
        "WORK": work,
        "RING": ring_config(d_qk, has_codes),
        "SCALES": scale_config,
        "POOL": hopper_pool_config(kv_format, d_qk, topk_length),
        "END": end,
        "OUTPUT": target.hopper_config,
        **OPTIONS,
    }
    if has_codes:
        assert kv_format.name == "FP8" and extra is None, "codes meet the codes of one FP8 cache"
        assert query == QueryConfig(d_qk, half_pairing=query.half_pairing), "codes stay codes"
        assert q.stride(0) % 16 == q.stride(1) % 16 == 0, "rows are copied 16 bytes at a time"
        launches.launch(
            sparse_mla_decode_fp8_kernel,
            (programs,),
            launches.inside(q, q.view(torch.int32)),
            q.stride(0) // 16,
            q.stride(1) // 16,
            *pool,
            *places,
            *scale_arguments,
            **constants,
        )
    else:
        launches.launch(
            sparse_mla_decode_kernel,
            (programs,),
            q,
            q.stride(0),
            q.stride(1),
            *pool,
            *extra_pool,
            *places,
            q_norm_eps or 0.0,
            *scale_arguments,
            QUERY=query,
            EXTRA=extra,
            **constants,
        )
    if work.is_split:
        merge_splits(
            launches, partials, rope_places, lse, target, num_tokens, num_heads, splits, end
        )
    return launches

"""Hopper ``sparse_mla_decode``: four warpgroups with one role each, paged caches, split-KV.

This is the launch; the kernels are ``sparse_mla_decode_kernel`` for bfloat16 queries,
``sparse_mla_decode_few_kernel`` for up to 32 heads of them, and ``sparse_mla_decode_fp8_kernel``
for e4m3 ones. Their roles stand beside them.
"""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.kernels.common.attention_arguments import (
    CachePool,
    extra_pool,
    list_arguments,
    rope_arguments,
    split_scales,
)
from mlacast.kernels.common.combine_splits import split_places
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
    few_heads_tile,
    few_heads_work,
    has_few_heads,
    hopper_decode_plan,
    num_multiprocessors,
    ring_config,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_kernel import sparse_mla_decode_few_kernel
from mlacast.kernels.gluon.sm90.sparse_mla_decode_fp8_kernel import sparse_mla_decode_fp8_kernel
from mlacast.kernels.gluon.sm90.sparse_mla_decode_kernel import OPTIONS, sparse_mla_decode_kernel
from mlacast.kernels.gluon.sm90.sparse_mla_decode_merge import merge_splits


def _pool_arguments(launches: Launches, pool: CachePool) -> tuple[Any, ...]:
    """One pool as kernel arguments, cache to length stride; pages count in units of 16 bytes."""
    cache = pool.cache
    assert cache.stride(0) * cache.element_size() % 16 == 0, "records are copied 16 bytes at a time"
    return (
        launches.inside(cache, cache.view(torch.int32)),
        cache.stride(0) // 16,
        cache.shape[1],
        *page_division(cache.shape[1]),
        cache.shape[0] * cache.shape[1],
        *list_arguments(pool.indices, pool.lengths),
    )


def _query_arguments(launches: Launches, q: torch.Tensor) -> tuple[Any, ...]:
    """The query as kernel arguments, with its strides; codes count in units of 16 bytes."""
    if q.dtype != torch.float8_e4m3fn:
        return q, q.stride(0), q.stride(1)
    assert q.stride(0) % 16 == q.stride(1) % 16 == 0, "rows are copied 16 bytes at a time"
    return launches.inside(q, q.view(torch.int32)), q.stride(0) // 16, q.stride(1) // 16


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
    pool = _pool_arguments(launches, CachePool(k_cache, indices, topk_length, kv_format))
    extra = extra_pool(extra_k_cache, extra_indices, extra_topk_length, extra_kv_format)
    width = indices.shape[1] + (0 if extra is None else extra.indices.shape[1])
    plan = hopper_decode_plan(
        num_tokens, num_heads, width, num_multiprocessors(q.device), num_splits, batch_invariant
    )
    work, splits, items, programs = plan
    partials = split_places(splits, num_tokens * num_heads, lse, workspace, launches)
    rope_places = rope_arguments(attn_sink, rope, lse, indices)
    query = query_config(d_qk, q_order, q_norm_eps, rope)
    end = end_config(d_qk, attn_sink, rope)
    scales, scale_config = split_scales(sm_scale, v_scale, lse)
    has_codes = q.dtype == torch.float8_e4m3fn
    pool_kind = hopper_pool_config(kv_format, d_qk, topk_length)
    extra_kind = None
    if extra is not None:
        extra_kind = hopper_pool_config(extra.kv_format, d_qk, extra.lengths)
    output = target.hopper_config
    constants = {
        "WORK": work,
        "SCALES": scale_config,
        "POOL": pool_kind,
        "END": end,
        "OUTPUT": output,
        **OPTIONS,
    }
    leading = (*_query_arguments(launches, q), *pool)
    if has_codes:
        assert kv_format.name == "FP8" and extra is None, "codes meet the codes of one FP8 cache"
        assert query == QueryConfig(d_qk, half_pairing=query.half_pairing), "codes stay codes"
    else:
        leading += pool if extra is None else _pool_arguments(launches, extra)
        constants |= {"QUERY": query, "EXTRA": extra_kind}
    # What all kernels take behind the rotation: the output, and the call's sizes.
    sizes = (*target.tensors.values(), *target.hopper_numbers, num_tokens, num_heads)
    ending = (q_norm_eps or 0.0, *scales.in_pairs)
    if has_few_heads(num_heads, work.is_split, pool_kind, extra_kind, output):
        constants |= {"HEADS": few_heads_tile(num_heads), "WORK": few_heads_work(num_heads)}
        arguments = (*leading, *rope_places, lse, *sizes, *ending)
        launches.launch(sparse_mla_decode_few_kernel, (num_tokens,), *arguments, **constants)
        return launches
    constants["RING"] = ring_config(d_qk, has_codes)
    arguments = (*leading, *rope_places, lse, *partials, *sizes, splits, items, programs)
    if has_codes:
        arguments += scales.in_pairs
        launches.launch(sparse_mla_decode_fp8_kernel, (programs,), *arguments, **constants)
    else:
        arguments += ending
        launches.launch(sparse_mla_decode_kernel, (programs,), *arguments, **constants)
    if work.is_split:
        merge_splits(
            launches, partials, rope_places, lse, target, num_tokens, num_heads, splits, end
        )
    return launches

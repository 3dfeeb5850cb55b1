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
from mlacast.kernels.config.attention import end_config, pool_config
from mlacast.kernels.config.sparse_attention import num_multiprocessors, plan_hopper_decode
from mlacast.kernels.gluon.sm90.sparse_mla_decode_fp8_kernel import sparse_mla_decode_fp8_kernel
from mlacast.kernels.gluon.sm90.sparse_mla_decode_kernel import OPTIONS, sparse_mla_decode_kernel
from mlacast.kernels.gluon.sm90.sparse_mla_decode_merge import merge_splits


def _record(kv_format: KvFormat, d_qk: int) -> str:
    """Name of a record format in ``sparse_mla_decode_records``."""
    return f"fp8_{d_qk}" if kv_format.name == "FP8" else pool_config(kv_format).record


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
    head_blocks = -(-num_heads // 64)
    pool = _pool_arguments(launches, k_cache, indices, topk_length)
    extra_pool, extra_format, has_extra = pool, kv_format, False
    width = indices.shape[1]
    if extra_k_cache is not None and extra_indices is not None and extra_kv_format is not None:
        extra_pool = _pool_arguments(launches, extra_k_cache, extra_indices, extra_topk_length)
        extra_format, has_extra = extra_kv_format, True
        width += extra_indices.shape[1]
    splits = num_splits or plan_hopper_decode(
        num_tokens, num_heads, width, q.device, batch_invariant
    )
    is_split = splits > 1
    partials = [lse, lse, lse]
    if is_split:
        partials = split_scratch(splits * num_tokens * num_heads, workspace, launches)
    rope_places = rope_arguments(attn_sink, rope, lse, indices)
    flags = {
        "HAS_ROPE": rope is not None,
        "HALF_PAIRING": rope is not None and rope.pairing == "half",
        "HAS_SINK": attn_sink is not None,
    }
    scales, scale_config = split_scales(sm_scale, v_scale, lse)
    scale_arguments = (
        scales.sm_scale,
        scales.sm_scale_tensor,
        scales.v_scale,
        scales.v_scale_tensor,
    )
    numbers = {name: value for name, value in target.numbers.items() if name != "row_start"}
    constants = {
        name: value for name, value in target.constants.items() if name != "SF_COLUMN_TILES"
    }
    items = num_tokens * head_blocks * splits
    programs = min(items, num_multiprocessors(q.device))
    rotates_query = rope is not None and rope.rotate_query
    # What both kernels take behind their pools, before and after the norm's epsilon.
    places = (
        *rope_places,
        lse,
        *partials,
        *target.tensors.values(),
        *numbers.values(),
        num_tokens,
        num_heads,
        splits,
        items,
        programs,
    )
    constants |= {
        "HEAD_BLOCKS": head_blocks,
        "FULL_TILES": num_heads % 64 == 0,
        "IS_SPLIT": is_split,
        "HAS_SM_SCALE": scale_config.sm_on_device,
        "HAS_V_SCALE": scale_config.v_on_device,
        "HAS_LENGTH": topk_length is not None,
        "FORMAT": _record(kv_format, d_qk),
        **flags,
        **OPTIONS,
    }
    if q.dtype == torch.float8_e4m3fn:
        assert kv_format.name == "FP8" and not has_extra, "codes meet the codes of one FP8 cache"
        assert q_norm_eps is None and not rotates_query and q_order == "head", "codes stay codes"
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
            CHUNK16=q_order == "chunk16",
            ROTATE_QUERY=rotates_query,
            HAS_NORM=q_norm_eps is not None,
            INLINE=kv_format.placement == "inline",
            HAS_EXTRA=has_extra,
            HAS_EXTRA_LENGTH=extra_topk_length is not None,
            EXTRA_FORMAT=_record(extra_format, d_qk),
            EXTRA_INLINE=extra_format.placement == "inline",
            # P V is held back until the next scores are nearly done, where the ring has room.
            NUM_PIECES=4 if d_qk == 576 else 5,
            DELAY_OUTPUT=d_qk != 576,
            DEQUANT_REGISTERS=48,
            **constants,
        )
    if is_split:
        end = end_config(d_qk, attn_sink, rope)
        merge_splits(
            launches, partials, rope_places, lse, target, num_tokens, num_heads, splits, end
        )
    return launches

"""Hopper ``sparse_mla_decode``: four warpgroups with one role each, paged caches, split-KV.

This is the launch; the kernel is ``sparse_mla_decode_kernel``, its roles stand beside it.
"""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.kernels.common.combine_splits import combine_splits, split_scratch
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.sparse_attention import choose_decode_splits, num_multiprocessors
from mlacast.kernels.gluon.sm90.sparse_mla_decode_kernel import OPTIONS, sparse_mla_decode_kernel

# Whether P V waits until the next scores are nearly done; it made no difference while the
# dequantisation was the slowest role.
_DELAY_OUTPUT = False

_RECORDS = {
    "V32": "v32",
    "V4": "v4",
    "V41": "v41",
    "V41_INLINE": "v41",
    "V41_FP4": "v41_fp4",
    "V41_FP4_INLINE": "v41_fp4",
}


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
        cache.shape[0] * cache.shape[1],
        indices,
        indices.stride(0),
        indices.shape[1],
        indices if lengths is None else lengths,
        0 if lengths is None else lengths.stride(0),
    )


def launch_sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    kv_format: KvFormat,
    sm_scale: float,
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
) -> Launches:
    """Fill ``out`` and ``lse``; arguments as in ``mlacast.sparse_mla_decode``."""
    num_tokens, num_heads, d_qk = q.shape
    target = store_target(out)
    launches = Launches(q.device, target)
    head_blocks = -(-num_heads // 64)
    pool = _pool_arguments(launches, k_cache, indices, topk_length)
    extra_pool, extra_format, has_extra = pool, kv_format, False
    blocks = -(-indices.shape[1] // 64)
    if extra_k_cache is not None and extra_indices is not None and extra_kv_format is not None:
        extra_pool = _pool_arguments(launches, extra_k_cache, extra_indices, extra_topk_length)
        extra_format, has_extra = extra_kv_format, True
        blocks += -(-extra_indices.shape[1] // 64)
    multiprocessors = num_multiprocessors(q.device)
    splits = num_splits or choose_decode_splits(
        num_tokens * head_blocks, blocks, multiprocessors, batch_invariant
    )
    is_split = splits > 1
    partials = [lse, lse, lse]
    if is_split:
        partials = split_scratch(splits * num_tokens * num_heads, workspace, launches)
    rope_arguments = [
        lse if attn_sink is None else attn_sink,
        lse if rope is None else rope.cos_sin_cache,
        0 if rope is None else rope.cos_sin_cache.stride(0),
        0 if rope is None else rope.cos_sin_cache.shape[0],
        indices if rope is None else rope.positions,
        0 if rope is None else rope.positions.stride(0),
        lse,
    ]
    flags = {
        "HAS_ROPE": rope is not None,
        "HALF_PAIRING": rope is not None and rope.pairing == "half",
        "HAS_SINK": attn_sink is not None,
    }
    numbers = {name: value for name, value in target.numbers.items() if name != "row_start"}
    constants = {
        name: value for name, value in target.constants.items() if name != "SF_COLUMN_TILES"
    }
    programs = min(num_tokens * head_blocks * splits, multiprocessors)
    launches.launch(
        sparse_mla_decode_kernel,
        (programs,),
        q,
        q.stride(0),
        q.stride(1),
        *pool,
        *extra_pool,
        *rope_arguments,
        *partials,
        *target.tensors.values(),
        *numbers.values(),
        num_tokens,
        num_heads,
        splits,
        q_norm_eps or 0.0,
        sm_scale,
        HEAD_BLOCKS=head_blocks,
        FULL_TILES=num_heads % 64 == 0,
        IS_SPLIT=is_split,
        CHUNK16=q_order == "chunk16",
        HAS_NORM=q_norm_eps is not None,
        HAS_LENGTH=topk_length is not None,
        FORMAT=_RECORDS[kv_format.name],
        INLINE=kv_format.placement == "inline",
        HAS_EXTRA=has_extra,
        HAS_EXTRA_LENGTH=extra_topk_length is not None,
        EXTRA_FORMAT=_RECORDS[extra_format.name],
        EXTRA_INLINE=extra_format.placement == "inline",
        NUM_PIECES=4 if kv_format.name == "V32" else 5,
        DELAY_OUTPUT=_DELAY_OUTPUT,
        DEQUANT_REGISTERS=48,
        **flags,
        **constants,
        **OPTIONS,
    )
    if is_split:
        combine_splits(
            launches, partials, rope_arguments, target, num_tokens, num_heads, splits, d_qk, **flags
        )
    return launches

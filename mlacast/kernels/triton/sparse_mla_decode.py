"""Portable ``sparse_mla_decode``: paged caches, two pools, split-KV, epilogue after the merge."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.kernels.common.attention_arguments import (
    CachePool,
    cache_operand,
    extra_pool,
    list_arguments,
    query_operand,
    rope_arguments,
    split_scales,
)
from mlacast.kernels.common.combine_splits import (
    UNALIGNED_IN_EPILOGUE,
    VARYING_IN_EPILOGUE,
    Partials,
    State,
    combine_splits,
    end_split,
    find_heads,
    find_split_blocks,
    split_places,
)
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.records import Cache
from mlacast.kernels.common.sparse_attention import (
    IndexList,
    attend_pool,
    find_angles,
    load_query,
    load_row_length,
    load_scales,
)
from mlacast.kernels.common.store import Target
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.attention import end_config, pool_config, query_config
from mlacast.kernels.config.shared_memory import shared_memory_of
from mlacast.kernels.config.sparse_attention import num_multiprocessors, portable_decode_plan

# Counts and strides that vary while serving must not pick another variant of the kernel, nor must
# where a slice of a bigger buffer happens to start.
_VARYING = [
    "page_size",
    "num_slots",
    "stride_indices",
    "topk",
    "stride_length",
    "extra_page_size",
    "extra_num_slots",
    "extra_stride_indices",
    "extra_topk",
    "extra_stride_length",
    *VARYING_IN_EPILOGUE,
]
_UNALIGNED = [
    "indices_ptr",
    "length_ptr",
    "extra_indices_ptr",
    "extra_length_ptr",
    "sm_scale_ptr",
    "v_scale_ptr",
    *UNALIGNED_IN_EPILOGUE,
]


class Pool(NamedTuple):
    """A `Cache`, how many slots it has, and an `IndexList` of them."""

    cache: Any
    num_slots: Any
    entries: Any


class Blocks(NamedTuple):
    """Blocks of a row: entries of both lists, blocks of the main one, those of this split."""

    length: Any
    extra_length: Any
    main: Any
    first: Any
    last: Any


@triton.jit
def _find_blocks(
    entries,
    extra_entries,
    token,
    split,
    num_splits,
    BLOCK_N: tl.constexpr,
    POOL: tl.constexpr,
    EXTRA: tl.constexpr,
):
    """The `Blocks` of a split of a token: of the main list, then of the extra list."""
    length = load_row_length(entries, token, POOL.has_length)
    main_blocks = tl.cdiv(length, BLOCK_N)
    total_blocks = main_blocks
    extra_length = 0
    if EXTRA is not None:
        extra_length = load_row_length(extra_entries, token, EXTRA.has_length)
        total_blocks += tl.cdiv(extra_length, BLOCK_N)
    first, last = find_split_blocks(total_blocks, split, num_splits)
    return Blocks(length, extra_length, main_blocks, first, last)


@triton.jit
def _attend_blocks(
    query,
    pool,
    extra_pool,
    token,
    blocks,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERY: tl.constexpr,
    POOL: tl.constexpr,
    EXTRA: tl.constexpr,
):
    """Softmax state of a split: output [BLOCK_H, 512] un-normalised, maxima and sums [BLOCK_H].

    ``query`` is a `Query`, ``blocks`` a `Blocks`.
    """
    entries = pool.entries
    acc, running_max, running_sum = attend_pool(
        query,
        tl.zeros((BLOCK_H, 512), tl.float32),
        tl.full((BLOCK_H,), -float("inf"), tl.float32),
        tl.zeros((BLOCK_H,), tl.float32),
        pool.cache,
        pool.num_slots,
        entries.indices_ptr + token * entries.stride_indices,
        blocks.length,
        tl.minimum(blocks.first, blocks.main),
        tl.minimum(blocks.last, blocks.main),
        BLOCK_N,
        QUERY,
        POOL,
    )
    if EXTRA is not None:
        entries = extra_pool.entries
        acc, running_max, running_sum = attend_pool(
            query,
            acc,
            running_max,
            running_sum,
            extra_pool.cache,
            extra_pool.num_slots,
            entries.indices_ptr + token * entries.stride_indices,
            blocks.extra_length,
            tl.maximum(blocks.first - blocks.main, 0),
            tl.maximum(blocks.last - blocks.main, 0),
            BLOCK_N,
            QUERY,
            EXTRA,
        )
    return acc, running_max, running_sum


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _sparse_mla_decode_kernel(
    q_ptr,
    stride_q_token,
    stride_q_head,
    cache_ptr,
    stride_page,
    stride_slot,
    page_size,
    num_slots,
    indices_ptr,
    stride_indices,
    topk,
    length_ptr,
    stride_length,
    extra_cache_ptr,
    extra_stride_page,
    extra_stride_slot,
    extra_page_size,
    extra_num_slots,
    extra_indices_ptr,
    extra_stride_indices,
    extra_topk,
    extra_length_ptr,
    extra_stride_length,
    sink_ptr,
    table_ptr,
    stride_table,
    table_rows,
    positions_ptr,
    stride_positions,
    lse_ptr,
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    data_ptr,
    sf_ptr,
    scale_ptr,
    stride_data_token,
    stride_data_group,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    row_start,
    padding_rows,
    num_tokens,
    num_heads,
    num_splits,
    eps,
    sm_scale,
    v_scale,
    sm_scale_ptr,
    v_scale_ptr,
    IS_SPLIT: tl.constexpr,
    TILES: tl.constexpr,
    SCALES: tl.constexpr,
    QUERY: tl.constexpr,
    POOL: tl.constexpr,
    EXTRA: tl.constexpr,
    END: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    """One split of BLOCK_H heads of one token. Grid: (s_q * ceil(h_q / BLOCK_H), num_splits).

    Blocks of the main list, then of the extra list, are cut into ``num_splits`` equal runs. A split
    leaves its un-normalised float32 state in the partial buffers; the only one (IS_SPLIT False)
    goes through the epilogue at once. EXTRA is None where there is no second pool.
    """
    BLOCK_H: tl.constexpr = TILES.block_h
    BLOCK_N: tl.constexpr = TILES.block_n
    entries = IndexList(indices_ptr, stride_indices, topk, length_ptr, stride_length)
    extra_entries = IndexList(
        extra_indices_ptr, extra_stride_indices, extra_topk, extra_length_ptr, extra_stride_length
    )
    heads = find_heads(num_tokens, num_heads, BLOCK_H)
    token, head_start, _, _ = heads
    split = tl.program_id(1)
    blocks = _find_blocks(entries, extra_entries, token, split, num_splits, BLOCK_N, POOL, EXTRA)
    angles = find_angles(
        table_ptr,
        stride_table,
        table_rows,
        positions_ptr,
        stride_positions,
        token,
        QUERY.is_rotated or END.rotates_back,
    )
    sm_scale, v_scale = load_scales(sm_scale, v_scale, sm_scale_ptr, v_scale_ptr, SCALES)
    query = load_query(
        q_ptr,
        stride_q_token,
        stride_q_head,
        token,
        head_start,
        num_heads,
        eps,
        angles,
        sm_scale,
        BLOCK_H,
        QUERY,
    )
    cache = Cache(cache_ptr, stride_page, stride_slot, page_size)
    extra_cache = Cache(extra_cache_ptr, extra_stride_page, extra_stride_slot, extra_page_size)
    acc, running_max, running_sum = _attend_blocks(
        query,
        Pool(cache, num_slots, entries),
        Pool(extra_cache, extra_num_slots, extra_entries),
        token,
        blocks,
        BLOCK_H,
        BLOCK_N,
        QUERY,
        POOL,
        EXTRA,
    )
    # The merge of splits is linear in their outputs.
    acc *= v_scale
    target = Target(
        data_ptr,
        sf_ptr,
        scale_ptr,
        stride_data_token,
        stride_data_group,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        row_start,
    )
    end_split(
        State(acc, running_max, running_sum),
        Partials(partial_out_ptr, partial_max_ptr, partial_sum_ptr),
        split,
        heads,
        sink_ptr,
        angles,
        lse_ptr,
        target,
        padding_rows,
        IS_SPLIT,
        END,
        OUTPUT,
    )


def _pool_arguments(launches: Launches, pool: CachePool) -> list[Any]:
    """One pool as kernel arguments, cache to length stride."""
    cache = pool.cache
    flat = launches.inside(cache, cache_operand(cache, pool.kv_format))
    return [
        flat,
        flat.stride(0),
        flat.stride(1),
        flat.shape[1],
        flat.shape[0] * flat.shape[1],
        *list_arguments(pool.indices, pool.lengths),
    ]


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
    v_scale: float | torch.Tensor = 1.0,
    out: QuantizedTensor,
    lse: torch.Tensor,
) -> Launches:
    """Fill ``out`` and ``lse``; arguments as in ``mlacast.sparse_mla_decode``."""
    num_tokens, num_heads, d_qk = q.shape
    target = store_target(out)
    launches = Launches(q.device, target)
    pool = _pool_arguments(launches, CachePool(k_cache, indices, topk_length, kv_format))
    extra = extra_pool(extra_k_cache, extra_indices, extra_topk_length, extra_kv_format)
    width = indices.shape[1] + (0 if extra is None else extra.indices.shape[1])
    plan = portable_decode_plan(
        num_tokens,
        num_heads,
        width,
        num_multiprocessors(q.device),
        shared_memory_of(q.device),
        num_splits,
        batch_invariant,
    )
    tiles, splits, programs = plan
    partials = split_places(splits, num_tokens * num_heads, lse, workspace, launches)
    rope_places = rope_arguments(attn_sink, rope, lse, indices)
    end = end_config(d_qk, attn_sink, rope)
    scales, scale_config = split_scales(sm_scale, v_scale, lse)
    launches.launch(
        _sparse_mla_decode_kernel,
        (programs, splits),
        launches.inside(q, query_operand(q)),
        q.stride(0),
        q.stride(1),
        *pool,
        *(pool if extra is None else _pool_arguments(launches, extra)),
        *rope_places,
        lse,
        *partials,
        *target.tensors.values(),
        *target.numbers.values(),
        num_tokens,
        num_heads,
        splits,
        q_norm_eps or 0.0,
        *scales,
        IS_SPLIT=splits > 1,
        TILES=tiles,
        SCALES=scale_config,
        QUERY=query_config(d_qk, q_order, q_norm_eps, rope),
        POOL=pool_config(kv_format, topk_length),
        EXTRA=None if extra is None else pool_config(extra.kv_format, extra.lengths),
        END=end,
        OUTPUT=target.config,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
    )
    if splits > 1:
        combine_splits(
            launches, partials, rope_places, lse, target, num_tokens, num_heads, splits, end
        )
    return launches

"""Portable ``dense_mla_decode``: pages of each request in order, split-KV, one epilogue."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.kernels.common.attention_arguments import (
    cache_operand,
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
    Angles,
    attend_block,
    load_query,
    load_scales,
)
from mlacast.kernels.common.store import Target
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.attention import end_config, pool_config, query_config
from mlacast.kernels.config.shared_memory import shared_memory_of
from mlacast.kernels.config.sparse_attention import num_multiprocessors, portable_decode_plan

# Counts and strides that vary while serving must not pick another variant of the kernel.
_VARYING = [
    "page_size",
    "num_pages",
    "stride_table",
    "max_pages",
    "stride_length",
    "per_request",
    *(name for name in VARYING_IN_EPILOGUE if name not in ("table_rows", "stride_positions")),
]
_UNALIGNED = [
    "page_table_ptr",
    "seq_lens_ptr",
    "sm_scale_ptr",
    "v_scale_ptr",
    *(name for name in UNALIGNED_IN_EPILOGUE if name not in ("table_ptr", "positions_ptr")),
]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _dense_mla_decode_kernel(
    q_ptr,
    stride_q_request,
    stride_q_token,
    stride_q_head,
    cache_ptr,
    stride_page,
    stride_slot,
    page_size,
    num_pages,
    page_table_ptr,
    stride_table,
    max_pages,
    seq_lens_ptr,
    stride_length,
    per_request,
    sink_ptr,
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
    sm_scale,
    v_scale,
    sm_scale_ptr,
    v_scale_ptr,
    CAUSAL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TILES: tl.constexpr,
    SCALES: tl.constexpr,
    QUERY: tl.constexpr,
    POOL: tl.constexpr,
    END: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    """One split of BLOCK_H heads of one token. Grid: (B * Q * ceil(h_q / BLOCK_H), num_splits).

    The positions that the token sees are cut into ``num_splits`` equal runs of blocks. A split
    leaves its un-normalised float32 state in the partial buffers; the only one (IS_SPLIT False)
    goes through the epilogue at once.
    """
    BLOCK_H: tl.constexpr = TILES.block_h
    BLOCK_N: tl.constexpr = TILES.block_n
    heads = find_heads(num_tokens, num_heads, BLOCK_H)
    token, head_start, _, _ = heads
    split = tl.program_id(1)
    request = token // per_request
    within = token - request * per_request
    length = tl.load(seq_lens_ptr + request * stride_length).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), max_pages.to(tl.int64) * page_size)
    if CAUSAL:
        length = tl.maximum(length - (per_request - 1 - within), 0)
    total_blocks = tl.cdiv(length, BLOCK_N)
    first, last = find_split_blocks(total_blocks, split, num_splits)
    sm_scale, v_scale = load_scales(sm_scale, v_scale, sm_scale_ptr, v_scale_ptr, SCALES)
    # Nothing is rotated.
    angles = Angles(sink_ptr, 0, 0)
    query = load_query(
        q_ptr + request * stride_q_request,
        stride_q_token,
        stride_q_head,
        within,
        head_start,
        num_heads,
        0.0,
        angles,
        sm_scale,
        BLOCK_H,
        QUERY,
    )
    acc = tl.zeros((BLOCK_H, 512), tl.float32)
    running_max = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    running_sum = tl.zeros((BLOCK_H,), tl.float32)
    lane = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    table = page_table_ptr + request * stride_table
    cache = Cache(cache_ptr, stride_page, stride_slot, page_size)
    for block in range(first, last):
        position = block * BLOCK_N + lane  # [BLOCK_N]
        entry = position // page_size  # [BLOCK_N]
        page = tl.load(table + entry, mask=position < length, other=-1)  # [BLOCK_N]
        valid = (page >= 0) & (page < num_pages)  # [BLOCK_N]
        page = tl.where(valid, page, 0).to(tl.int64)  # [BLOCK_N], int64
        offset = (position - entry * page_size).to(tl.int64)  # [BLOCK_N], int64
        acc, running_max, running_sum = attend_block(
            query, acc, running_max, running_sum, cache, page, offset, valid, QUERY, POOL
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


def launch_dense_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormat,
    sm_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    causal: bool,
    attn_sink: torch.Tensor | None,
    out: QuantizedTensor,
    lse: torch.Tensor,
    num_splits: int | None = None,
) -> Launches:
    """Fill ``out`` and ``lse``; arguments as in ``mlacast.dense_mla_decode``.

    ``num_splits`` is chosen by shapes and the size of the GPU where it is None.
    """
    batch, per_request, num_heads, d_qk = q.shape
    num_tokens = batch * per_request
    target = store_target(out)
    launches = Launches(q.device, target)
    width = page_table.shape[1] * k_cache.shape[1]
    plan = portable_decode_plan(
        num_tokens,
        num_heads,
        width,
        num_multiprocessors(q.device),
        shared_memory_of(q.device),
        num_splits,
        False,
    )
    tiles, splits, programs = plan
    partials = split_places(splits, num_tokens * num_heads, lse, None, launches)
    # Sink, then a table and positions that nothing reads.
    rope_places = rope_arguments(attn_sink, None, lse, seq_lens)
    end = end_config(d_qk, attn_sink)
    cache = launches.inside(k_cache, cache_operand(k_cache, kv_format))
    scales, scale_config = split_scales(sm_scale, v_scale, lse)
    launches.launch(
        _dense_mla_decode_kernel,
        (programs, splits),
        launches.inside(q, query_operand(q)),
        q.stride(0),
        q.stride(1),
        q.stride(2),
        cache,
        cache.stride(0),
        cache.stride(1),
        cache.shape[1],
        cache.shape[0],
        page_table,
        page_table.stride(0),
        page_table.shape[1],
        seq_lens,
        seq_lens.stride(0),
        per_request,
        rope_places[0],
        lse,
        *partials,
        *target.tensors.values(),
        *target.numbers.values(),
        num_tokens,
        num_heads,
        splits,
        *scales,
        CAUSAL=causal,
        IS_SPLIT=splits > 1,
        TILES=tiles,
        SCALES=scale_config,
        QUERY=query_config(d_qk),
        POOL=pool_config(kv_format),
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

"""Portable ``sparse_mla_decode``: paged caches, two pools, split-KV, epilogue after the merge."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.kernels.common.combine_splits import (
    UNALIGNED_IN_EPILOGUE,
    VARYING_IN_EPILOGUE,
    combine_splits,
    split_scratch,
)
from mlacast.kernels.common.decode_arguments import RECORDS, number_and_tensor, query_operand
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.sparse_attention import attend_pool, finish_rows, load_query
from mlacast.kernels.common.store import store_output
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.sparse_attention import plan_portable_decode, tile_config


@triton.jit
def _row_length(length_ptr, stride, token, width, HAS_LENGTH: tl.constexpr):
    """Entries of the row that count, clamped to [0, width]."""
    length = width
    if HAS_LENGTH:
        length = tl.minimum(tl.maximum(tl.load(length_ptr + token * stride), 0), width)
    return length


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
    HAS_SM_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    D_QK: tl.constexpr,
    CHUNK16: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROTATE_QUERY: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HALF_PAIRING: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    FORMAT: tl.constexpr,
    INLINE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_EXTRA_LENGTH: tl.constexpr,
    EXTRA_FORMAT: tl.constexpr,
    EXTRA_INLINE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    F: tl.constexpr,
    CHUNK32: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    SF_COLUMN_TILES: tl.constexpr,
):
    """One split of BLOCK_H heads of one token. Grid: (s_q * ceil(h_q / BLOCK_H), num_splits).

    Blocks of the main list, then of the extra list, are cut into ``num_splits`` equal runs. A split
    leaves its un-normalised float32 state in the partial buffers; the only one (IS_SPLIT False)
    goes through the epilogue at once.
    """
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head_start = (tl.program_id(0) % head_blocks) * BLOCK_H
    split = tl.program_id(1)
    length = _row_length(length_ptr, stride_length, token, topk, HAS_LENGTH)
    main_blocks = tl.cdiv(length, BLOCK_N)
    total_blocks = main_blocks
    extra_length = 0
    if HAS_EXTRA:
        extra_length = _row_length(
            extra_length_ptr, extra_stride_length, token, extra_topk, HAS_EXTRA_LENGTH
        )
        total_blocks += tl.cdiv(extra_length, BLOCK_N)
    per_split = tl.cdiv(total_blocks, num_splits)
    first = tl.minimum(split * per_split, total_blocks)
    last = tl.minimum(first + per_split, total_blocks)
    table_row = token * 0
    if HAS_ROPE:
        position = tl.load(positions_ptr + token * stride_positions).to(tl.int64)
        table_row = tl.minimum(tl.maximum(position, 0), table_rows - 1)
    if HAS_SM_SCALE:
        sm_scale = tl.load(sm_scale_ptr)
    if HAS_V_SCALE:
        v_scale = tl.load(v_scale_ptr)
    q, q_tail, score_scale = load_query(
        q_ptr,
        stride_q_token,
        stride_q_head,
        token,
        head_start,
        num_heads,
        eps,
        table_ptr,
        stride_table,
        table_row,
        sm_scale,
        BLOCK_H,
        D_QK,
        CHUNK16,
        HAS_NORM,
        ROTATE_QUERY,
        HALF_PAIRING,
    )
    acc, running_max, running_sum = attend_pool(
        q,
        q_tail,
        score_scale,
        tl.zeros((BLOCK_H, 512), tl.float32),
        tl.full((BLOCK_H,), -float("inf"), tl.float32),
        tl.zeros((BLOCK_H,), tl.float32),
        cache_ptr,
        stride_page,
        stride_slot,
        page_size,
        num_slots,
        indices_ptr + token * stride_indices,
        length,
        tl.minimum(first, main_blocks),
        tl.minimum(last, main_blocks),
        FORMAT,
        INLINE,
        D_QK,
        BLOCK_N,
    )
    if HAS_EXTRA:
        acc, running_max, running_sum = attend_pool(
            q,
            q_tail,
            score_scale,
            acc,
            running_max,
            running_sum,
            extra_cache_ptr,
            extra_stride_page,
            extra_stride_slot,
            extra_page_size,
            extra_num_slots,
            extra_indices_ptr + token * extra_stride_indices,
            extra_length,
            tl.maximum(first - main_blocks, 0),
            tl.maximum(last - main_blocks, 0),
            EXTRA_FORMAT,
            EXTRA_INLINE,
            D_QK,
            BLOCK_N,
        )
    # The merge of splits is linear in their outputs.
    acc *= v_scale
    head = head_start + tl.arange(0, BLOCK_H)
    if IS_SPLIT:
        row = (split * num_tokens + token) * num_heads + head
        d = tl.arange(0, 512)
        mask = (head < num_heads)[:, None] & (d >= 0)[None, :]
        tl.store(partial_out_ptr + row[:, None] * 512 + d[None, :], acc, mask=mask)
        tl.store(partial_max_ptr + row, running_max, mask=head < num_heads)
        tl.store(partial_sum_ptr + row, running_sum, mask=head < num_heads)
    else:
        out, lse, _ = finish_rows(
            acc,
            running_max,
            running_sum,
            sink_ptr,
            head_start,
            num_heads,
            table_ptr,
            stride_table,
            table_row,
            0,
            BLOCK_H,
            512,
            HAS_SINK,
            HAS_ROPE and D_QK == 512,
            HALF_PAIRING,
        )
        tl.store(lse_ptr + token * num_heads + head, lse, mask=head < num_heads)
        store_output(
            out,
            head_start,
            num_heads,
            token,
            data_ptr,
            stride_data_token,
            stride_data_group,
            sf_ptr,
            stride_sf_token,
            stride_sf_group,
            stride_sf_word,
            scale_ptr,
            row_start + token,
            tl.where(token == num_tokens - 1, padding_rows, 0),
            0,
            BLOCK_H,
            512,
            KIND,
            GROUP,
            F,
            CHUNK32,
            AMAX_FLOOR,
            SF_COLUMN_TILES,
        )


def _pool_arguments(
    launches: Launches,
    kv_format: KvFormat,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
) -> list[Any]:
    """One pool as kernel arguments, cache to length stride."""
    rows = kv_format.name == "BF16"
    flat = cache if rows else launches.inside(cache, cache.view(torch.uint8))
    return [
        flat,
        flat.stride(0),
        flat.stride(1),
        flat.shape[1],
        flat.shape[0] * flat.shape[1],
        indices,
        indices.stride(0),
        indices.shape[1],
        indices if lengths is None else lengths,
        0 if lengths is None else lengths.stride(0),
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
    config = tile_config(num_heads)
    programs = num_tokens * triton.cdiv(num_heads, config.block_h)
    pool = _pool_arguments(launches, kv_format, k_cache, indices, topk_length)
    extra_pool, extra_format = pool, kv_format
    width = indices.shape[1]
    has_extra = False
    if extra_k_cache is not None and extra_indices is not None and extra_kv_format is not None:
        has_extra, extra_format = True, extra_kv_format
        extra_pool = _pool_arguments(
            launches, extra_kv_format, extra_k_cache, extra_indices, extra_topk_length
        )
        width += extra_indices.shape[1]
    splits = num_splits or plan_portable_decode(
        num_tokens, num_heads, width, q.device, batch_invariant
    )
    # No more splits than blocks; but two stay two, so that a narrower list runs the same variant.
    splits = min(splits, max(triton.cdiv(width, config.block_n), 2))
    partials: list[torch.Tensor] = [lse, lse, lse]
    if splits > 1:
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
    sm_scale, sm_scale_tensor = number_and_tensor(sm_scale, lse)
    v_scale, v_scale_tensor = number_and_tensor(v_scale, lse)
    launches.launch(
        _sparse_mla_decode_kernel,
        (programs, splits),
        launches.inside(q, query_operand(q)),
        q.stride(0),
        q.stride(1),
        *pool,
        *extra_pool,
        *rope_arguments,
        *partials,
        *target.tensors.values(),
        *target.numbers.values(),
        num_tokens,
        num_heads,
        splits,
        q_norm_eps or 0.0,
        sm_scale,
        v_scale,
        sm_scale_tensor,
        v_scale_tensor,
        HAS_SM_SCALE=sm_scale_tensor is not lse,
        HAS_V_SCALE=v_scale_tensor is not lse,
        D_QK=d_qk,
        CHUNK16=q_order == "chunk16",
        HAS_NORM=q_norm_eps is not None,
        ROTATE_QUERY=rope is not None and rope.rotate_query,
        HAS_LENGTH=topk_length is not None,
        FORMAT=RECORDS[kv_format.name],
        INLINE=kv_format.placement == "inline",
        HAS_EXTRA=has_extra,
        HAS_EXTRA_LENGTH=extra_topk_length is not None,
        EXTRA_FORMAT=RECORDS[extra_format.name],
        EXTRA_INLINE=extra_format.placement == "inline",
        IS_SPLIT=splits > 1,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        **flags,
        **target.constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
    if splits > 1:
        combine_splits(
            launches, partials, rope_arguments, target, num_tokens, num_heads, splits, d_qk, **flags
        )
    return launches

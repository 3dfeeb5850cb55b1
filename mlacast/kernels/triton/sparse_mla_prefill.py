"""Portable ``sparse_mla_prefill``: one launch from the query norm to the output cast."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.kernels.common.attention_arguments import prefill_arguments
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.records import Cache
from mlacast.kernels.common.sparse_attention import (
    IndexList,
    attend_pool,
    find_angles,
    finish_rows,
    load_query,
    load_row_length,
)
from mlacast.kernels.common.store import Target, store_output
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.attention import end_config, query_config, rows_config
from mlacast.kernels.config.shared_memory import shared_memory_of
from mlacast.kernels.config.sparse_attention import tile_config

# Counts and strides that vary while serving must not pick another variant of the kernel.
_VARYING = [
    "s_kv",
    "stride_indices",
    "topk",
    "stride_length",
    "table_rows",
    "stride_positions",
    "row_start",
    "padding_rows",
    "num_tokens",
    "stride_sf_token",
    "stride_sf_group",
    "stride_sf_word",
]
# Nor must where a slice of a bigger buffer happens to start.
_UNALIGNED = [
    "indices_ptr",
    "length_ptr",
    "sink_ptr",
    "table_ptr",
    "positions_ptr",
    "max_logits_ptr",
    "lse_ptr",
    "sf_ptr",
    "scale_ptr",
]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _sparse_mla_prefill_kernel(
    q_ptr,
    stride_q_token,
    stride_q_head,
    kv_ptr,
    stride_kv,
    s_kv,
    indices_ptr,
    stride_indices,
    topk,
    length_ptr,
    stride_length,
    sink_ptr,
    table_ptr,
    stride_table,
    table_rows,
    positions_ptr,
    stride_positions,
    max_logits_ptr,
    lse_ptr,
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
    eps,
    sm_scale,
    TILES: tl.constexpr,
    QUERY: tl.constexpr,
    POOL: tl.constexpr,
    END: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    """BLOCK_H heads of one token.

    Grid: (s_q * ceil(h_q / BLOCK_H),), the head blocks of a token side by side.
    """
    BLOCK_H: tl.constexpr = TILES.block_h
    BLOCK_N: tl.constexpr = TILES.block_n
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head_start = (tl.program_id(0) % head_blocks) * BLOCK_H
    entries = IndexList(indices_ptr, stride_indices, topk, length_ptr, stride_length)
    length = load_row_length(entries, token, POOL.has_length)
    angles = find_angles(
        table_ptr,
        stride_table,
        table_rows,
        positions_ptr,
        stride_positions,
        token,
        QUERY.is_rotated,
    )
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
    acc, running_max, running_sum = attend_pool(
        query,
        tl.zeros((BLOCK_H, 512), tl.float32),
        tl.full((BLOCK_H,), -float("inf"), tl.float32),
        tl.zeros((BLOCK_H,), tl.float32),
        # Each row is a page of its own.
        Cache(kv_ptr, stride_kv, 0, 1),
        s_kv,
        indices_ptr + token * stride_indices,
        length,
        0,
        tl.cdiv(length, BLOCK_N),
        BLOCK_N,
        QUERY,
        POOL,
    )
    out, lse, max_logits = finish_rows(
        acc, running_max, running_sum, sink_ptr, head_start, num_heads, angles, 0, END
    )
    head = head_start + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    tl.store(lse_ptr + token * num_heads + head, lse, mask=head < num_heads)
    tl.store(max_logits_ptr + token * num_heads + head, max_logits, mask=head < num_heads)
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
    padding = tl.where(token == num_tokens - 1, padding_rows, 0)
    store_output(out, head_start, num_heads, token, padding, target, 0, OUTPUT)


def launch_sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    q_norm_eps: float | None,
    rope: Rope | None,
    q_order: str,
    out: QuantizedTensor,
    max_logits: torch.Tensor,
    lse: torch.Tensor,
) -> Launches:
    """Fill ``out``, ``max_logits`` and ``lse``; arguments as in ``mlacast.sparse_mla_prefill``."""
    num_tokens, num_heads, d_qk = q.shape
    target = store_target(out)
    tiles = tile_config(num_heads, shared_memory_of(q.device))
    grid = (num_tokens * triton.cdiv(num_heads, tiles.block_h),)
    launches = Launches(q.device, target)
    launches.launch(
        _sparse_mla_prefill_kernel,
        grid,
        *prefill_arguments(q, kv, indices, topk_length, attn_sink, rope, max_logits, lse),
        *target.tensors.values(),
        *target.numbers.values(),
        num_tokens,
        num_heads,
        q_norm_eps or 0.0,
        sm_scale,
        TILES=tiles,
        QUERY=query_config(d_qk, q_order, q_norm_eps, rope),
        POOL=rows_config(topk_length),
        END=end_config(d_qk, attn_sink, rope),
        OUTPUT=target.config,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
    )
    return launches

"""Portable ``sparse_mla_prefill``: one launch from the query norm to the output cast."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.sparse_attention import attend_pool, finish_rows, load_query
from mlacast.kernels.common.store import store_output
from mlacast.kernels.common.targets import store_target
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
    D_QK: tl.constexpr,
    CHUNK16: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HALF_PAIRING: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    F: tl.constexpr,
    CHUNK32: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    SF_COLUMN_TILES: tl.constexpr,
):
    """BLOCK_H heads of one token.

    Grid: (s_q * ceil(h_q / BLOCK_H),), the head blocks of a token side by side.
    """
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head_start = (tl.program_id(0) % head_blocks) * BLOCK_H
    length = topk
    if HAS_LENGTH:
        length = tl.minimum(tl.maximum(tl.load(length_ptr + token * stride_length), 0), topk)
    table_row = token * 0
    if HAS_ROPE:
        position = tl.load(positions_ptr + token * stride_positions).to(tl.int64)
        table_row = tl.minimum(tl.maximum(position, 0), table_rows - 1)
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
        HAS_ROPE,
        HALF_PAIRING,
    )
    acc, running_max, running_sum = attend_pool(
        q,
        q_tail,
        score_scale,
        tl.zeros((BLOCK_H, 512), tl.float32),
        tl.full((BLOCK_H,), -float("inf"), tl.float32),
        tl.zeros((BLOCK_H,), tl.float32),
        kv_ptr,
        stride_kv,
        0,
        1,
        s_kv,
        indices_ptr + token * stride_indices,
        length,
        0,
        tl.cdiv(length, BLOCK_N),
        "rows",
        True,
        D_QK,
        BLOCK_N,
    )
    out, lse, max_logits = finish_rows(
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
    head = head_start + tl.arange(0, BLOCK_H)
    tl.store(lse_ptr + token * num_heads + head, lse, mask=head < num_heads)
    tl.store(max_logits_ptr + token * num_heads + head, max_logits, mask=head < num_heads)
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
    config = tile_config(num_heads)
    grid = (num_tokens * triton.cdiv(num_heads, config.block_h),)
    launches = Launches(q.device, target)
    launches.launch(
        _sparse_mla_prefill_kernel,
        grid,
        q,
        q.stride(0),
        q.stride(1),
        kv,
        kv.stride(0),
        kv.shape[0],
        indices,
        indices.stride(0),
        indices.shape[1],
        indices if topk_length is None else topk_length,
        0 if topk_length is None else topk_length.stride(0),
        lse if attn_sink is None else attn_sink,
        lse if rope is None else rope.cos_sin_cache,
        0 if rope is None else rope.cos_sin_cache.stride(0),
        0 if rope is None else rope.cos_sin_cache.shape[0],
        indices if rope is None else rope.positions,
        0 if rope is None else rope.positions.stride(0),
        max_logits,
        lse,
        *target.tensors.values(),
        *target.numbers.values(),
        num_tokens,
        num_heads,
        q_norm_eps or 0.0,
        sm_scale,
        D_QK=d_qk,
        CHUNK16=q_order == "chunk16",
        HAS_NORM=q_norm_eps is not None,
        HAS_ROPE=rope is not None,
        HALF_PAIRING=rope is not None and rope.pairing == "half",
        HAS_SINK=attn_sink is not None,
        HAS_LENGTH=topk_length is not None,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        **target.constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
    return launches

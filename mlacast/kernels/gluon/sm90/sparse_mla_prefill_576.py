"""Hopper ``sparse_mla_prefill`` for d_qk 576: four warpgroups with one role each, persistent.

As ``sparse_mla_prefill``, with another division of shared memory: three slots of 512 dimensions,
one buffer for the last 64 of a block, one for the weights. The roles are in the neighbouring files:
gather (``sparse_mla_prefill_576_gather``), scores and softmax (``_score``), two halves of the
output (``_output``). Dispatch sends here only what the pipeline is laid out for: rows at multiples
of 16 elements, scales above zero, whole heads.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.kernels.common.attention_arguments import prefill_arguments
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.attention import end_config, query_config, rows_config
from mlacast.kernels.config.sparse_attention import num_multiprocessors, prefill_576_plan
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576_barriers import (
    NUM_BARRIERS,
    init_barriers,
)
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576_gather import run_gather_role
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576_output import run_output_role
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576_score import run_score_role
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import (
    BLOCK_H,
    BLOCK_N,
    LOG2_E,
    NUM_SLOTS,
    UNALIGNED,
    VARYING,
)

# The default partition (scores) gets what the others leave of 512 registers for four threads: 168.
OPTIONS = {"num_warps": 4, "maxnreg": 128, "launch_pdl": True}
_OUTPUT_REGISTERS = gl.constexpr(160)
_GATHER_REGISTERS = gl.constexpr(24)


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def sparse_mla_prefill_576_kernel(
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
    padding_rows,
    num_tokens,
    num_heads,
    sm_scale,
    WORK: gl.constexpr,
    QUERY: gl.constexpr,
    POOL: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Tiles of 64 heads of one token, at a stride of the grid. Grid: (programs,).

    Barriers (producer -> consumer), of one array as ``sparse_mla_prefill_576_barriers`` numbers it:
    ``K_READY`` gather -> score, ``K_FREE`` output (of a query: score) -> gather, ``TAIL_FREE`` and
    ``Q_FREE`` score -> gather, ``P_READY``, ``P_GO`` and ``FACTOR_READY`` score -> output,
    ``P_FREE``, ``ALPHA_FREE`` and ``FACTOR_FREE`` output -> score.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Of P every piece of 16 columns is its own, and one address register is enough to store them.
    NARROW: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [NUM_SLOTS, BLOCK_N, 512], TILE)
    tail_smem = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, 64], TILE)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, 128], TILE)
    q_16_smem = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, 16], NARROW)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], NARROW)
    alpha_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_H], ROW)
    mask_smem = gl.allocate_shared_memory(gl.int8, [NUM_SLOTS, BLOCK_N], ROW)
    barriers = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    init_barriers(barriers)
    num_tiles = num_tokens * WORK.head_blocks
    # Until here the kernel before this one may run: kernels/common/dependents.py.
    gdc_wait()
    gdc_launch_dependents()
    lengths = (topk, length_ptr, stride_length)
    rope = (table_ptr, stride_table, table_rows, positions_ptr, stride_positions)
    target = (
        data_ptr,
        sf_ptr,
        scale_ptr,
        stride_data_token,
        stride_data_group,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        padding_rows,
    )
    # What both halves of the output get.
    places = (barriers, k_smem, p_smem, alpha_smem, lengths, target, num_heads, num_tiles)
    gl.warp_specialize(
        [
            (
                run_score_role,
                (
                    barriers,
                    (k_smem, tail_smem, q_smem, q_16_smem, p_smem, alpha_smem, mask_smem),
                    lengths,
                    sink_ptr,
                    rope,
                    max_logits_ptr,
                    lse_ptr,
                    num_heads,
                    num_tiles,
                    sm_scale * LOG2_E,
                    WORK,
                    QUERY,
                    POOL,
                    END,
                ),
            ),
            (run_output_role, (places, 0, WORK, POOL, END, OUTPUT)),
            (run_output_role, (places, 1, WORK, POOL, END, OUTPUT)),
            (
                run_gather_role,
                (
                    (q_ptr, stride_q_token, stride_q_head),
                    (kv_ptr, stride_kv, s_kv),
                    (indices_ptr, stride_indices),
                    lengths,
                    num_heads,
                    num_tiles,
                    barriers,
                    (k_smem, tail_smem, q_smem, mask_smem),
                    WORK,
                    POOL,
                ),
            ),
        ],
        [4, 4, 4],
        [_OUTPUT_REGISTERS, _OUTPUT_REGISTERS, _GATHER_REGISTERS],
    )


def launch_sparse_mla_prefill_576(
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
    assert q_norm_eps is None, "a query of 576 dimensions has no norm"
    assert q_order == "head", "a query of 576 dimensions has one element order"
    num_tokens, num_heads, d_qk = q.shape
    target = store_target(out)
    launches = Launches(q.device, target)
    plan = prefill_576_plan(num_tokens, num_heads, num_multiprocessors(q.device))
    launches.launch(
        sparse_mla_prefill_576_kernel,
        (plan.num_programs,),
        *prefill_arguments(q, kv, indices, topk_length, attn_sink, rope, max_logits, lse),
        *target.tensors.values(),
        *target.hopper_numbers,
        num_tokens,
        num_heads,
        sm_scale,
        WORK=plan.work,
        QUERY=query_config(d_qk, q_order, q_norm_eps, rope),
        POOL=rows_config(topk_length),
        END=end_config(d_qk, attn_sink, rope),
        OUTPUT=target.hopper_config,
        **OPTIONS,
    )
    return launches

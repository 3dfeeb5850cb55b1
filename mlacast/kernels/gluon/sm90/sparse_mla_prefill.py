"""Hopper ``sparse_mla_prefill``: four warpgroups with one role each, one persistent program per SM.

The roles are in the neighbouring files: gather (``sparse_mla_prefill_gather``), scores and softmax
(``_score``), two halves of the output (``_output``). Dispatch sends here only
what the pipeline is laid out for: rows at multiples of 16 elements, scales above zero, whole heads.
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
from mlacast.kernels.config.sparse_attention import num_multiprocessors, prefill_plan
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_gather import run_gather_role
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_lone_gather import run_lone_gather_role
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_lone_score import run_lone_score_role
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_output import run_output_role
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_score import run_score_role
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import (
    BLOCK_H,
    BLOCK_N,
    LOG2_E,
    NUM_SLOTS,
    UNALIGNED,
    VARYING,
)

# The default partition (scores) gets what the others leave of 512 registers for four threads: 168,
# or 216.
OPTIONS = {"num_warps": 4, "maxnreg": 128, "launch_pdl": True}
_OUTPUT_REGISTERS = gl.constexpr(160)
# Where two programs share a tile the outputs are half as wide, and the scores keep two blocks.
_HALF_REGISTERS = gl.constexpr(120)
_LONE_GATHER_REGISTERS = gl.constexpr(56)
_GATHER_REGISTERS = gl.constexpr(24)


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def sparse_mla_prefill_kernel(
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
    eps,
    sm_scale,
    WORK: gl.constexpr,
    QUERY: gl.constexpr,
    POOL: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Tiles of 64 heads of one token, at a stride of the grid. Grid: (programs,).

    With ``WORK.parts`` 2 a program has one tile, all of its scores and half of its output; the next
    program has the other half. What is different then is in the ``_lone_`` files.

    Barriers (producer -> consumer): ``k_ready`` gather -> score, ``k_free`` output (of a query:
    score) -> gather, ``p_ready`` and ``p_go`` score -> output, ``p_free`` output -> score.
    With two parts the left output role reads the query as well (``k_ready`` to it, ``k_free`` of
    the query from it), ``p_ready`` also goes to the gather role, and ``p_go`` carries the score
    scales from the left output role to the score role.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [NUM_SLOTS, BLOCK_N, 512], TILE)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, 128], TILE)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_H, BLOCK_N], TILE)
    alpha_smem = gl.allocate_shared_memory(gl.float32, [6, BLOCK_H], ROW)
    bias_smem = gl.allocate_shared_memory(gl.float32, [NUM_SLOTS, BLOCK_N], ROW)
    alive_smem = gl.allocate_shared_memory(gl.int8, [4, BLOCK_N], ROW)
    # Where programs share a tile, the left half of the first block has a barrier of its own.
    k_ready = gl.allocate_shared_memory(gl.int64, [NUM_SLOTS + WORK.parts - 1, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [NUM_SLOTS, 1], BARRIER)
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    p_go = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    p_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(NUM_SLOTS):
        # Each of 128 threads as its copies land, and one more when all are asked for.
        mbarrier.init(k_ready.index(i), count=129)
        # Both halves of the output read a slot; the score role, alone with a query, arrives twice.
        mbarrier.init(k_free.index(i), count=2)
    if WORK.parts == 2:
        mbarrier.init(k_ready.index(NUM_SLOTS), count=129)
    for i in gl.static_range(2):
        mbarrier.init(p_ready.index(i), count=1)
        mbarrier.init(p_go.index(i), count=1)
        # Both halves read all of P.
        mbarrier.init(p_free.index(i), count=2)
    num_tiles = num_tokens * WORK.head_blocks
    # Until here the kernel before this one may run: kernels/common/dependents.py.
    gdc_wait()
    gdc_launch_dependents()
    # What both halves of the output get.
    places = (
        k_smem,
        p_smem,
        alpha_smem,
        k_free,
        p_ready,
        p_go,
        p_free,
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
        num_heads,
        num_tiles,
    )
    # What they need before the first weights where programs share a tile.
    if WORK.parts == 1:
        early = (k_free,)
    else:
        early = (
            k_ready,
            eps,
            sm_scale * LOG2_E,
            indices_ptr,
            stride_indices,
            kv_ptr,
            stride_kv,
            s_kv,
        )
    gl.warp_specialize(
        [
            (
                run_score_role if WORK.parts == 1 else run_lone_score_role,
                (
                    k_smem,
                    q_smem,
                    p_smem,
                    alpha_smem,
                    bias_smem,
                    alive_smem,
                    k_ready,
                    k_free,
                    p_ready,
                    p_go,
                    p_free,
                    topk,
                    length_ptr,
                    stride_length,
                    table_ptr,
                    stride_table,
                    table_rows,
                    positions_ptr,
                    stride_positions,
                    num_tiles,
                    eps,
                    sm_scale * LOG2_E,
                    WORK,
                    QUERY,
                    POOL,
                ),
            ),
            (run_output_role, (places, early, 0, WORK, QUERY, POOL, END, OUTPUT)),
            (run_output_role, (places, early, 1, WORK, QUERY, POOL, END, OUTPUT)),
            (
                run_gather_role if WORK.parts == 1 else run_lone_gather_role,
                (
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
                    num_heads,
                    num_tiles,
                    k_smem,
                    bias_smem,
                    alive_smem,
                    k_ready,
                    k_free if WORK.parts == 1 else (k_free, p_ready),
                    WORK,
                    QUERY,
                    POOL,
                ),
            ),
        ],
        [4, 4, 4],
        [
            _OUTPUT_REGISTERS if WORK.parts == 1 else _HALF_REGISTERS,
            _OUTPUT_REGISTERS if WORK.parts == 1 else _HALF_REGISTERS,
            _GATHER_REGISTERS if WORK.parts == 1 else _LONE_GATHER_REGISTERS,
        ],
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
    launches = Launches(q.device, target)
    plan = prefill_plan(num_tokens, num_heads, num_multiprocessors(q.device))
    launches.launch(
        sparse_mla_prefill_kernel,
        (plan.num_programs,),
        *prefill_arguments(q, kv, indices, topk_length, attn_sink, rope, max_logits, lse),
        *target.tensors.values(),
        *target.hopper_numbers,
        num_tokens,
        num_heads,
        q_norm_eps or 0.0,
        sm_scale,
        WORK=plan.work,
        QUERY=query_config(d_qk, q_order, q_norm_eps, rope),
        POOL=rows_config(topk_length),
        END=end_config(d_qk, attn_sink, rope),
        OUTPUT=target.hopper_config,
        **OPTIONS,
    )
    return launches

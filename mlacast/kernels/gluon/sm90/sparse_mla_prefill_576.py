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
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.sparse_attention import num_multiprocessors
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576_barriers import (
    NUM_BARRIERS,
    init_barriers,
)
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576_gather import gather_role
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576_output import output_role
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576_score import score_role
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
    HEAD_BLOCKS: gl.constexpr,
    FULL_TILES: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    HALF_PAIRING: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_LENGTH: gl.constexpr,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    F: gl.constexpr,
    CHUNK32: gl.constexpr,
    AMAX_FLOOR: gl.constexpr,
):
    """Tiles of 64 heads of one token, at a stride of the grid. Grid: (programs,).

    Who tells whom is in ``sparse_mla_prefill_576_barriers``.
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
    num_tiles = num_tokens * HEAD_BLOCKS
    # Until here the kernel before this one may run: kernels/common/dependents.py.
    gdc_wait()
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                score_role,
                (
                    barriers,
                    k_smem,
                    tail_smem,
                    q_smem,
                    q_16_smem,
                    p_smem,
                    alpha_smem,
                    mask_smem,
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
                    num_heads,
                    num_tiles,
                    sm_scale * LOG2_E,
                    HEAD_BLOCKS,
                    FULL_TILES,
                    HAS_ROPE,
                    HALF_PAIRING,
                    HAS_SINK,
                    HAS_LENGTH,
                ),
            ),
            (
                output_role,
                (
                    barriers,
                    k_smem,
                    p_smem,
                    alpha_smem,
                    topk,
                    length_ptr,
                    stride_length,
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
                    0,
                    HEAD_BLOCKS,
                    FULL_TILES,
                    HAS_SINK,
                    HAS_LENGTH,
                    KIND,
                    GROUP,
                    F,
                    CHUNK32,
                    AMAX_FLOOR,
                ),
            ),
            (
                output_role,
                (
                    barriers,
                    k_smem,
                    p_smem,
                    alpha_smem,
                    topk,
                    length_ptr,
                    stride_length,
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
                    1,
                    HEAD_BLOCKS,
                    FULL_TILES,
                    HAS_SINK,
                    HAS_LENGTH,
                    KIND,
                    GROUP,
                    F,
                    CHUNK32,
                    AMAX_FLOOR,
                ),
            ),
            (
                gather_role,
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
                    barriers,
                    k_smem,
                    tail_smem,
                    q_smem,
                    mask_smem,
                    HEAD_BLOCKS,
                    FULL_TILES,
                    HAS_LENGTH,
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
    num_tokens, num_heads, _ = q.shape
    target = store_target(out)
    launches = Launches(q.device, target)
    numbers = {name: value for name, value in target.numbers.items() if name != "row_start"}
    constants = {
        name: value for name, value in target.constants.items() if name != "SF_COLUMN_TILES"
    }
    head_blocks = -(-num_heads // 64)
    programs = min(num_tokens * head_blocks, num_multiprocessors(q.device))
    launches.launch(
        sparse_mla_prefill_576_kernel,
        (programs,),
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
        *numbers.values(),
        num_tokens,
        num_heads,
        sm_scale,
        HEAD_BLOCKS=head_blocks,
        FULL_TILES=num_heads % 64 == 0,
        HAS_ROPE=rope is not None,
        HALF_PAIRING=rope is not None and rope.pairing == "half",
        HAS_SINK=attn_sink is not None,
        HAS_LENGTH=topk_length is not None,
        **constants,
        **OPTIONS,
    )
    return launches

"""Score role of a Hopper prefill program with one tile: scores a block ahead of the softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlacast.kernels.common.sm90_rotation import (
    find_table_row,
    hide_value,
    load_angles,
    rotate,
    split_pairs,
    sum_squares,
)
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_score import (
    fold_scores,
    publish_last,
)
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import (
    BLOCK_H,
    NUM_SLOTS,
    TOTAL,
    advance_phase,
    advance_slot,
    count_blocks,
    load_row_length,
)


@gluon.jit
def find_score_scales(query, eps, score_scale_log2, S: gl.constexpr, QUERY: gl.constexpr):
    """Score scales [64] of the heads of a query [64, 512]: every sum is that of ``take_query``."""
    Q: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    scale = gl.full((BLOCK_H,), 0.0, gl.float32, ROW) + score_scale_log2  # [64]
    if QUERY.has_norm:
        squares = sum_squares(query.slice(448, 64, dim=1).load(Q), ROW)  # [64]
        squares += sum_squares(query.slice(384, 64, dim=1).load(Q), ROW)
        left = sum_squares(query.slice(0, 256, dim=1).load(Q), ROW)
        squares += left + sum_squares(query.slice(256, 128, dim=1).load(Q), ROW)
        scale *= gl.rsqrt(squares * (1.0 / 512.0) + eps)
    return scale


@gluon.jit
def _start_left(q_left, k, S: gl.constexpr):
    """Issue q k^T [64, 64] of the first 256 dimensions, which are in registers; ``k`` [64, 512]."""
    kt = k.permute((1, 0))
    zeros = gl.zeros((64, 64), gl.float32, S)
    return warpgroup_mma(q_left, kt.slice(0, 256, dim=0), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_middle(q_middle, k, s):
    """Issue the next 128 dimensions, in registers too."""
    return warpgroup_mma(q_middle, k.permute((1, 0)).slice(256, 128, dim=0), s, is_async=True)


@gluon.jit
def _start_right(q_right_smem, k, s):
    """Issue the last 128 dimensions, in shared memory."""
    return warpgroup_mma(q_right_smem, k.permute((1, 0)).slice(384, 128, dim=0), s, is_async=True)


@gluon.jit
def _has_key_out(bias):
    """Whether any of a block's keys does not count, by its ``bias`` [64]; a number for a branch."""
    # Every warp reads all 64 entries: no exchange between warps.
    WARP: gl.constexpr = gl.DistributedLinearLayout(
        [[1]], [[2], [4], [8], [16], [32]], [[0], [0]], [], [64]
    )
    return hide_value(gl.max((bias.load(WARP) < 0.0).to(gl.int32), 0))


@gluon.jit
def run_lone_score_role(
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
    score_scale_log2,
    WORK: gl.constexpr,
    QUERY: gl.constexpr,
    POOL: gl.constexpr,
):
    """Scores and softmax of the program's only tile.

    As ``run_score_role``, same bits, but the products of the next block are issued before the
    softmax of a block: P V takes half of what it does there, and would leave the tensor cores idle
    during the softmax. It follows as soon as the weights are stored.

    Consumes ``k_ready``, ``p_free`` and the score scales (``p_go``); produces ``p_ready`` and, of
    the query, ``k_free``.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    Q: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    PARTIAL: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    token = gl.program_id(0) // (2 * WORK.head_blocks)
    # Without rotation nobody reads them.
    cos = 0
    sin = 0
    if QUERY.is_rotated:
        pairs, other = split_pairs(gl.zeros((BLOCK_H, 64), gl.bfloat16, Q), QUERY.half_pairing)
        angles = find_table_row(table_rows, positions_ptr, stride_positions, token)
        cos, sin = load_angles(table_ptr, stride_table, angles, pairs)
    num_blocks = count_blocks(load_row_length(length_ptr, stride_length, token, topk, POOL))
    mbarrier.wait(k_ready.index(0), 0)
    query = k_smem.index(0)
    q_left = query.slice(0, 256, dim=1).load(Q)  # [64, 256]
    q_middle = query.slice(256, 128, dim=1).load(Q)  # [64, 128]
    q_smem.slice(0, 64, dim=1).store(query.slice(384, 64, dim=1).load(Q))
    q_rope = query.slice(448, 64, dim=1).load(Q)  # [64, 64]
    if QUERY.is_rotated:
        q_rope = gl.convert_layout(rotate(q_rope, cos, sin, QUERY.half_pairing), Q)  # [64, 64]
    q_smem.slice(64, 64, dim=1).store(q_rope)
    fence_async_shared()
    # The left output role has read it too, for the score scales.
    mbarrier.arrive(k_free.index(0), count=1)
    phase = 0
    slot = 1
    # The left half of the first block has a barrier of its own.
    mbarrier.wait(k_ready.index(NUM_SLOTS), phase)
    s = _start_left(q_left, k_smem.index(slot), S)
    mbarrier.wait(k_ready.index(slot), phase)
    s = _start_middle(q_middle, k_smem.index(slot), s)
    s = _start_right(q_smem, k_smem.index(slot), s)
    running_max = gl.full((BLOCK_H,), -float("inf"), gl.float32, ROW)  # [64]
    base = running_max
    partial_sum = gl.full((BLOCK_H, 4), 0.0, gl.float32, PARTIAL)  # [64, 4]
    masked = _has_key_out(bias_smem.index(slot))
    mbarrier.wait(p_go.index(0), 0)
    score_scale = alpha_smem.index(TOTAL).load(ROW)  # [64]
    s = warpgroup_mma_wait(0, deps=[s])
    if masked != 0:
        s += bias_smem.index(slot).load(COLUMN)[None, :]
    for count in range(num_blocks - 1):
        phase = advance_phase(slot, phase)
        slot = advance_slot(slot)
        mbarrier.wait(k_ready.index(slot), phase)
        ahead = _start_left(q_left, k_smem.index(slot), S)
        ahead = _start_middle(q_middle, k_smem.index(slot), ahead)
        p, alpha, base, running_max, partial_sum = fold_scores(
            s, base, running_max, partial_sum, score_scale, PARTIAL, False
        )
        buffer = count & 1
        mbarrier.wait(p_free.index(buffer), ((count >> 1) & 1) ^ 1)
        p_smem.index(buffer).store(p)
        alpha_smem.index(buffer).store(alpha)
        fence_async_shared()
        mbarrier.arrive(p_ready.index(buffer), count=1)
        ahead = _start_right(q_smem, k_smem.index(slot), ahead)
        masked = _has_key_out(bias_smem.index(slot))
        s = warpgroup_mma_wait(0, deps=[ahead])
        if masked != 0:
            s += bias_smem.index(slot).load(COLUMN)[None, :]
    p, alpha, base, running_max, partial_sum = fold_scores(
        s, base, running_max, partial_sum, score_scale, PARTIAL, True
    )
    publish_last(
        p,
        alpha,
        partial_sum,
        running_max,
        alive_smem.index(0),
        p_smem,
        alpha_smem,
        p_ready,
        p_go,
        p_free,
        num_blocks - 1,
        WORK,
    )

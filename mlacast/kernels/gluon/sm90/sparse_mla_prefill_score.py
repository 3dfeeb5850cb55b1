"""Score role of the Hopper prefill kernel: query prologue, scores, softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlacast.kernels.common.sm90_masks import has_marked
from mlacast.kernels.common.sm90_rotation import (
    find_table_row,
    load_angles,
    rotate,
    split_pairs,
    sum_squares,
)
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import (
    BLOCK_H,
    MAXIMUM,
    TOTAL,
    advance_phase,
    advance_slot,
    count_blocks,
    load_row_length,
)

# Weights reach 2**8 before their base moves: as precise in bfloat16, and far from overflow.
LAZINESS = gl.constexpr(8.0)


@gluon.jit
def take_query(
    query,
    q_smem,
    is_free,
    cos,
    sin,
    eps,
    score_scale_log2,
    S: gl.constexpr,
    QUERY: gl.constexpr,
):
    """Rotate a tile's query [64, 512], which leaves its slot of the ring (``is_free``).

    Returns:
        its first 256 dimensions and the next 128, operands of products; the others are in
        ``q_smem``. And the score scale [64] of its heads.
    """
    Q: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    q_rope = query.slice(448, 64, dim=1).load(Q)  # [64, 64]
    if QUERY.has_norm:
        squares = sum_squares(q_rope, ROW)  # [64]
    if QUERY.is_rotated:
        q_rope = gl.convert_layout(rotate(q_rope, cos, sin, QUERY.half_pairing), Q)
    q_smem.slice(64, 64, dim=1).store(q_rope)
    q_part = query.slice(384, 64, dim=1).load(Q)  # [64, 64]
    if QUERY.has_norm:
        squares += sum_squares(q_part, ROW)
    q_smem.slice(0, 64, dim=1).store(q_part)
    fence_async_shared()
    q_left = query.slice(0, 256, dim=1).load(Q)  # [64, 256]
    q_middle = query.slice(256, 128, dim=1).load(Q)  # [64, 128]
    mbarrier.arrive(is_free, count=2)
    score_scale = gl.full((BLOCK_H,), 0.0, gl.float32, ROW) + score_scale_log2  # [64]
    if QUERY.has_norm:
        # The norm is one factor per head, so it joins the score scale; meanwhile the first keys
        # arrive.
        squares += sum_squares(q_left, ROW) + sum_squares(q_middle, ROW)
        score_scale *= gl.rsqrt(squares * (1.0 / 512.0) + eps)
    return q_left, q_middle, score_scale


@gluon.jit
def start_scores(q_left, q_middle, q_right_smem, k, bias):
    """Issue q k^T [64, 64] on top of the bias row, of a block ``k`` [64, 512].

    384 query dimensions are in registers, 128 in memory.
    """
    kt = k.permute((1, 0))
    s = warpgroup_mma(q_left, kt.slice(0, 256, dim=0), bias, is_async=True)
    s = warpgroup_mma(q_middle, kt.slice(256, 128, dim=0), s, is_async=True)
    return warpgroup_mma(q_right_smem, kt.slice(384, 128, dim=0), s, is_async=True)


@gluon.jit
def fold_scores(
    s, base, running_max, partial_sum, score_scale, PARTIAL: gl.constexpr, LAST: gl.constexpr
):
    """Fold one block of scores [64, 64] into the softmax state.

    Weights are relative to ``base``, a maximum that follows the true one only when that has grown
    more than 256-fold: most blocks leave what came before as it is. The last block settles it.

    Returns:
        weights [64, 64] bfloat16, the factor alpha [64] of everything before, the new base and the
        new maximum [64] (base 2) and the new partial sums [64, 4], one per thread of a quad.
    """
    new_max = gl.maximum(running_max, gl.max(s, 1) * score_scale)  # [64]
    new_base = new_max
    if not LAST:
        new_base = gl.where(new_max > base + LAZINESS, new_max, base)  # [64]
    # -inf - -inf is NaN: shift by 0 while nothing valid has been seen.
    shift = gl.where(new_base == -float("inf"), 0.0, new_base)  # [64]
    p = gl.exp2(s * score_scale[:, None] - shift[:, None])  # [64, 64]
    # What came before a row's first key is zero and needs no factor.
    alpha = gl.where(base == -float("inf"), 1.0, gl.exp2(base - shift))  # [64]
    by_quad = gl.sum(gl.sum(gl.reshape(p, (64, 8, 4, 2)), 3), 1)  # [64, 4]
    by_quad = gl.convert_layout(by_quad, PARTIAL, assert_trivial=True)  # [64, 4]
    rescale = gl.convert_layout(alpha, gl.SliceLayout(1, PARTIAL))  # [64]
    sums = partial_sum * rescale[:, None] + by_quad  # [64, 4]
    return p.to(gl.bfloat16), alpha, new_base, new_max, sums


@gluon.jit
def _publish_weights(p, alpha, p_smem, alpha_smem, p_ready, p_free, count):
    """Hand weights [64, 64] and rescale factors [64] of block ``count`` to the output roles.

    Consumes ``p_free``, produces ``p_ready``.
    """
    buffer = count & 1
    mbarrier.wait(p_free.index(buffer), ((count >> 1) & 1) ^ 1)
    p_smem.index(buffer).store(p)
    alpha_smem.index(buffer).store(alpha)
    mbarrier.arrive(p_ready.index(buffer), count=1)


@gluon.jit
def publish_last(
    p,
    alpha,
    partial_sum,
    running_max,
    alive_row,
    p_smem,
    alpha_smem,
    p_ready,
    p_go,
    p_free,
    count,
    WORK: gl.constexpr,
):
    """Hand over a tile's last block ``count``, with the sums and maxima of its rows.

    Consumes ``p_free``, produces ``p_ready`` and, with one program a tile, ``p_go``.
    """
    ROW: gl.constexpr = alpha.type.layout
    # The last block is here, and with it what the gather role knows of the whole tile.
    alive = has_marked(alive_row)
    buffer = count & 1
    mbarrier.wait(p_free.index(buffer), ((count >> 1) & 1) ^ 1)
    p_smem.index(buffer).store(p)
    alpha_smem.index(buffer).store(alpha)
    total = gl.convert_layout(gl.sum(partial_sum, 1), ROW)  # [64]
    alpha_smem.index(TOTAL + buffer).store(gl.where(alive != 0, total, 0.0))
    alpha_smem.index(MAXIMUM + buffer).store(running_max)
    fence_async_shared()
    mbarrier.arrive(p_ready.index(buffer), count=1)
    if WORK.parts == 1:
        mbarrier.arrive(p_go.index(buffer), count=1)


@gluon.jit
def run_score_role(
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
    """Scores and softmax of every tile.

    Consumes ``k_ready`` and ``p_free``; frees the query's slot (``k_free``) itself. Produces per
    block ``p_ready`` (weights stored) and ``p_go`` (weights may be multiplied: released only when
    the next scores are nearly done, so that P V overlaps the softmax and does not starve Q K^T).
    The last block of a tile brings the sums and maxima of its rows.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    Q: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    PARTIAL: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    slot = 0
    phase = 0
    # Bits 0..29 count blocks, the others tiles: one register less.
    count = 0
    first_token = gl.program_id(0) // WORK.head_blocks
    # Without rotation nobody reads them.
    cos = 0
    sin = 0
    if QUERY.is_rotated:
        pairs, other = split_pairs(gl.zeros((BLOCK_H, 64), gl.bfloat16, Q), QUERY.half_pairing)
        angles = find_table_row(table_rows, positions_ptr, stride_positions, first_token)
        cos, sin = load_angles(table_ptr, stride_table, angles, pairs)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token = tile // WORK.head_blocks
        next_token = gl.minimum(tile + gl.num_programs(0), num_tiles - 1) // WORK.head_blocks
        num_blocks = count_blocks(load_row_length(length_ptr, stride_length, token, topk, POOL))
        if QUERY.is_rotated:
            next_angles = find_table_row(table_rows, positions_ptr, stride_positions, next_token)
        mbarrier.wait(k_ready.index(slot), phase)
        q_left, q_middle, score_scale = take_query(
            k_smem.index(slot),
            q_smem,
            k_free.index(slot),
            cos,
            sin,
            eps,
            score_scale_log2,
            S,
            QUERY,
        )
        phase = advance_phase(slot, phase)
        slot = advance_slot(slot)
        mbarrier.wait(k_ready.index(slot), phase)
        zeros = gl.zeros((64, 64), gl.float32, S)
        bias = gl.broadcast(bias_smem.index(slot).load(COLUMN)[None, :], zeros)[0]  # [64, 64]
        s = start_scores(q_left, q_middle, q_smem, k_smem.index(slot), bias)
        running_max = gl.full((BLOCK_H,), -float("inf"), gl.float32, ROW)  # [64]
        base = running_max
        partial_sum = gl.full((BLOCK_H, 4), 0.0, gl.float32, PARTIAL)  # [64, 4]
        s = warpgroup_mma_wait(0, deps=[s])
        for _ in range(num_blocks - 1):
            p, alpha, base, running_max, partial_sum = fold_scores(
                s, base, running_max, partial_sum, score_scale, PARTIAL, False
            )
            _publish_weights(p, alpha, p_smem, alpha_smem, p_ready, p_free, count)
            phase = advance_phase(slot, phase)
            slot = advance_slot(slot)
            mbarrier.wait(k_ready.index(slot), phase)
            bias = gl.broadcast(bias_smem.index(slot).load(COLUMN)[None, :], s)[0]  # [64, 64]
            s = start_scores(q_left, q_middle, q_smem, k_smem.index(slot), bias)
            s = warpgroup_mma_wait(1, deps=[s])
            fence_async_shared()
            mbarrier.arrive(p_go.index(count & 1), count=1)
            s = warpgroup_mma_wait(0, deps=[s])
            count += 1
        # The query's registers are free now, and the end of the tile hides the latency of loads.
        if QUERY.is_rotated:
            cos, sin = load_angles(table_ptr, stride_table, next_angles, pairs)
        p, alpha, base, running_max, partial_sum = fold_scores(
            s, base, running_max, partial_sum, score_scale, PARTIAL, True
        )
        publish_last(
            p,
            alpha,
            partial_sum,
            running_max,
            alive_smem.index((count >> 30) & 3),
            p_smem,
            alpha_smem,
            p_ready,
            p_go,
            p_free,
            count,
            WORK,
        )
        count += 1 + (1 << 30)
        phase = advance_phase(slot, phase)
        slot = advance_slot(slot)

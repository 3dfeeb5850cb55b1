"""Score role of the Hopper prefill kernel for d_qk 576: query rotation, scores, softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlacast.kernels.common.sm90_masks import apply_mask, has_marked
from mlacast.kernels.common.sm90_rotation import (
    find_row_offset,
    find_table_row,
    hide_rows,
    load_angles,
    rotate,
    split_pairs,
)
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576_barriers import (
    ALPHA_FREE,
    FACTOR_FREE,
    FACTOR_READY,
    K_FREE,
    K_READY,
    P_FREE,
    P_GO,
    P_READY,
    Q_FREE,
    TAIL_FREE,
)
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import (
    BLOCK_H,
    LN_2,
    advance_phase,
    advance_slot,
    count_blocks,
    load_row_length,
)

# Sums of the rows [64] of scores by the four threads that share one, [64, 4].
_PARTIAL = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
)


@gluon.jit
def _start_scores(barriers, query, k, tail, S: gl.constexpr):
    """Issue q k^T, the tail first, and hand the tail's buffer back (``TAIL_FREE``).

    The parts from shared memory precede those from registers: the last ones run beside P V, which
    reads shared memory too.

    Returns:
        scores [64, 64] float32; the last 128 dimensions and more may be outstanding.
    """
    q_256, q_128, q_32, q_16, q_16_smem, q_smem = query
    kt = k.permute((1, 0))
    s = gl.zeros((64, 64), gl.float32, S)
    q_tail = q_smem.slice(64, 64, dim=1)
    s = warpgroup_mma(q_tail, tail.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(q_smem.slice(0, 64, dim=1), kt.slice(448, 64, dim=0), s, is_async=True)
    s = warpgroup_mma(q_16_smem, kt.slice(432, 16, dim=0), s, is_async=True)
    s = warpgroup_mma(q_256, kt.slice(0, 256, dim=0), s, is_async=True)
    s = warpgroup_mma(q_32, kt.slice(384, 32, dim=0), s, is_async=True)
    s = warpgroup_mma(q_16, kt.slice(416, 16, dim=0), s, is_async=True)
    s = warpgroup_mma(q_128, kt.slice(256, 128, dim=0), s, is_async=True)
    s = warpgroup_mma_wait(6, deps=[s])
    mbarrier.arrive(barriers.index(TAIL_FREE), count=1)
    return s


@gluon.jit
def _fold_scores(s, running_max, partial_sum, score_scale):
    """Fold one block of scores [64, 64] into the softmax state.

    Returns:
        weights [64, 64] bfloat16, the factor alpha [64] of everything before, the new maximum [64]
        (base 2) and the new partial sums [64, 4], one per thread of a quad.
    """
    new_max = gl.maximum(running_max, gl.max(s, 1) * score_scale)  # [64]
    # -inf - -inf is NaN: shift by 0 while nothing valid has been seen.
    shift = gl.where(new_max == -float("inf"), 0.0, new_max)  # [64]
    p = gl.exp2(s * score_scale - shift[:, None])  # [64, 64]
    alpha = gl.exp2(running_max - shift)  # [64]
    by_quad = gl.sum(gl.sum(gl.reshape(p, (64, 8, 4, 2)), 3), 1)  # [64, 4]
    by_quad = gl.convert_layout(by_quad, _PARTIAL, assert_trivial=True)
    rescale = gl.convert_layout(alpha, gl.SliceLayout(1, _PARTIAL))  # [64]
    return p.to(gl.bfloat16), alpha, new_max, partial_sum * rescale[:, None] + by_quad


@gluon.jit
def _publish_weights(barriers, p, alpha, p_smem, alpha_smem, count):
    """Hand weights [64, 64] and rescale factors [64] of block ``count`` to the output roles.

    Consumes ``P_FREE``, produces ``P_READY``. The fence is also that between the copies of the next
    block, waited for before, and its use.
    """
    mbarrier.wait(barriers.index(P_FREE), (count & 1) ^ 1)
    p_smem.store(p)
    alpha_smem.store(alpha)
    fence_async_shared()
    mbarrier.arrive(barriers.index(P_READY), count=1)


@gluon.jit
def _finish_scores(s, masked, mask):
    """Wait for the scores [64, 64] of a block; keys that ``mask`` marks get -inf."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    s = warpgroup_mma_wait(0, deps=[s])
    if masked != 0:
        s = apply_mask(s, mask, COLUMN)
    return s


@gluon.jit
def _publish_factors(barriers, factor, alpha_smem, count):
    """Hand the factors [64] of a tile to the output roles; bit 30 of ``count`` is its parity.

    Consumes ``ALPHA_FREE``, produces ``FACTOR_READY``.
    """
    mbarrier.wait(barriers.index(ALPHA_FREE), count >> 30)
    alpha_smem.store(factor)
    mbarrier.arrive(barriers.index(FACTOR_READY), count=1)


@gluon.jit
def _rotate_query(q_smem, slot, cos, sin, Q: gl.constexpr, HALF_PAIRING: gl.constexpr):
    """Rotate the last 64 dimensions of the query where they lie, the right half of ``q_smem``."""
    # Zero, but as part of the address it keeps that from being held from tile to tile.
    q_rope = q_smem.index(slot >> 2).slice(64, 64, dim=1)
    rotated = rotate(q_rope.load(Q), cos, sin, HALF_PAIRING)  # [64, 64]
    q_rope.store(gl.convert_layout(rotated, Q))


@gluon.jit
def _load_query(q_slot, q_16_smem, q_smem, Q: gl.constexpr):
    """The query in parts: 432 dimensions of the slot in registers, 16 and 128 in shared memory."""
    q_16_smem.store(q_slot.slice(432, 16, dim=1).load(Q))
    return (
        q_slot.slice(0, 256, dim=1).load(Q),
        q_slot.slice(256, 128, dim=1).load(Q),
        q_slot.slice(384, 32, dim=1).load(Q),
        q_slot.slice(416, 16, dim=1).load(Q),
        q_16_smem,
        q_smem.index(0),
    )


@gluon.jit
def _load_sink(sink_ptr, tile, num_heads, WORK: gl.constexpr, ROW: gl.constexpr):
    """Sinks [64] of the heads of a tile."""
    head = (tile % WORK.head_blocks) * BLOCK_H + hide_rows(ROW)  # [64]
    if WORK.full_tiles:
        return gl.load(sink_ptr + head)
    else:
        # Absent heads take the sink of the last: nobody reads what they become.
        return gl.load(sink_ptr + gl.minimum(head, num_heads - 1))


@gluon.jit
def _find_factors(running_max, partial_sum, sink, HAS_SINK: gl.constexpr):
    """What multiplies the output of each row, 0 for an empty one, and its lse; all [64].

    ``sink`` [64] is not looked at without HAS_SINK.
    """
    total = gl.convert_layout(gl.sum(partial_sum, 1), running_max.type.layout)  # [64]
    empty = total == 0.0
    divisor = gl.where(empty, 1.0, total)  # [64]
    lse = gl.where(empty, -float("inf"), (running_max + gl.log2(divisor)) * LN_2)  # [64]
    factor = gl.where(empty, 0.0, 1.0 / divisor)  # [64]
    if HAS_SINK:
        # An empty row keeps the factor 0: -inf - (-inf) would be NaN.
        shifted = gl.where(empty, 0.0, sink - lse)  # [64]
        factor = gl.where(sink == float("inf"), 0.0, factor / (1.0 + gl.exp(shifted)))  # [64]
    return factor, lse


@gluon.jit
def _store_sums(max_logits_ptr, lse_ptr, running_max, lse, tile, num_heads, WORK: gl.constexpr):
    """Store lse and the largest logits [64] of the heads of a tile."""
    ROW: gl.constexpr = lse.type.layout
    head = (tile % WORK.head_blocks) * BLOCK_H + hide_rows(ROW)  # [64]
    target = find_row_offset(tile // WORK.head_blocks, num_heads)
    if WORK.full_tiles:
        gl.store(lse_ptr + target + head, lse)
        gl.store(max_logits_ptr + target + head, running_max * LN_2)
    else:
        gl.store(lse_ptr + target + head, lse, mask=head < num_heads)
        gl.store(max_logits_ptr + target + head, running_max * LN_2, mask=head < num_heads)


@gluon.jit
def run_score_role(
    barriers,
    memory,
    lengths,
    sink_ptr,
    rope,
    max_logits_ptr,
    lse_ptr,
    num_heads,
    num_tiles,
    scale_log2,
    WORK: gl.constexpr,
    QUERY: gl.constexpr,
    POOL: gl.constexpr,
    END: gl.constexpr,
):
    """Scores and softmax of every tile; lse and max_logits to global memory.

    Consumes ``K_READY``, ``P_FREE``, ``ALPHA_FREE`` and ``FACTOR_FREE``; frees the query's slot
    (``K_FREE``), ``TAIL_FREE`` and ``Q_FREE``. Produces per block ``P_READY`` and ``P_GO``, the
    latter only when the next scores are nearly done, so that P V overlaps the softmax and does not
    starve Q K^T, and per tile ``FACTOR_READY``. Of the query 432 dimensions are in registers,
    144 in shared memory: 16 more in registers would spill.
    """
    k_smem, tail_smem, q_smem, q_16_smem, p_smem, alpha_smem, mask_smem = memory
    topk, length_ptr, stride_length = lengths
    table_ptr, stride_table, table_rows, positions_ptr, stride_positions = rope
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    Q: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    slot = 0
    phase = 0
    # Blocks; bit 30 is the parity of tiles, which shares the register.
    count = 0
    first_token = gl.program_id(0) // WORK.head_blocks
    if QUERY.is_rotated:
        pairs, other = split_pairs(gl.zeros((BLOCK_H, 64), gl.bfloat16, Q), QUERY.half_pairing)
        angles = find_table_row(table_rows, positions_ptr, stride_positions, first_token)
        cos, sin = load_angles(table_ptr, stride_table, angles, pairs)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token = tile // WORK.head_blocks
        # A selection stays in uniform registers, where a minimum would not.
        next_tile = tile + gl.num_programs(0)
        next_token = gl.where(next_tile < num_tiles, next_tile, tile) // WORK.head_blocks
        # No token is negative: a number of blocks that all tiles share would be kept, and spill.
        columns = gl.where(token < 0, 0, topk)
        num_blocks = count_blocks(load_row_length(length_ptr, stride_length, token, columns, POOL))
        if QUERY.is_rotated:
            next_angles = find_table_row(table_rows, positions_ptr, stride_positions, next_token)
        mbarrier.wait(barriers.index(K_READY + slot), phase)
        if QUERY.is_rotated:
            _rotate_query(q_smem, slot, cos, sin, Q, QUERY.half_pairing)
        query = _load_query(k_smem.index(slot), q_16_smem, q_smem, Q)
        mbarrier.arrive(barriers.index(K_FREE + slot), count=2)
        phase = advance_phase(slot, phase)
        slot = advance_slot(slot)
        mbarrier.wait(barriers.index(K_READY + slot), phase)
        fence_async_shared()
        s = _start_scores(barriers, query, k_smem.index(slot), tail_smem, S)  # [64, 64]
        masked = has_marked(mask_smem.index(slot))
        # The rescale factors of this tile come where the final factors of the last one are.
        mbarrier.wait(barriers.index(FACTOR_FREE), (count >> 30) ^ 1)
        running_max = gl.full((BLOCK_H,), -float("inf"), gl.float32, ROW)  # [64]
        partial_sum = gl.full((BLOCK_H, 4), 0.0, gl.float32, _PARTIAL)  # [64, 4]
        s = _finish_scores(s, masked, mask_smem.index(slot))
        for _ in range(num_blocks - 1):
            phase = advance_phase(slot, phase)
            slot = advance_slot(slot)
            p, alpha, running_max, partial_sum = _fold_scores(
                s, running_max, partial_sum, scale_log2
            )
            mbarrier.wait(barriers.index(K_READY + slot), phase)
            _publish_weights(barriers, p, alpha, p_smem, alpha_smem, count)
            s = _start_scores(barriers, query, k_smem.index(slot), tail_smem, S)
            masked = has_marked(mask_smem.index(slot))
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(barriers.index(P_GO + (count & 1)), count=1)
            s = _finish_scores(s, masked, mask_smem.index(slot))
            count += 1
        mbarrier.arrive(barriers.index(Q_FREE), count=1)
        # The query's registers are free now, and the end of the tile hides the latency of loads.
        sink = running_max
        if END.has_sink:
            sink = _load_sink(sink_ptr, tile, num_heads, WORK, ROW)
        if QUERY.is_rotated:
            cos, sin = load_angles(table_ptr, stride_table, next_angles, pairs)
        p, alpha, running_max, partial_sum = _fold_scores(s, running_max, partial_sum, scale_log2)
        _publish_weights(barriers, p, alpha, p_smem, alpha_smem, count)
        mbarrier.arrive(barriers.index(P_GO + (count & 1)), count=1)
        count += 1
        phase = advance_phase(slot, phase)
        slot = advance_slot(slot)

        factor, lse = _find_factors(running_max, partial_sum, sink, END.has_sink)
        _publish_factors(barriers, factor, alpha_smem, count)
        count ^= 1 << 30
        _store_sums(max_logits_ptr, lse_ptr, running_max, lse, tile, num_heads, WORK)

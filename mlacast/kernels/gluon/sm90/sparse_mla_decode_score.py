"""Score role of the Hopper decode kernel: query prologue, scores, softmax."""

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
    find_table_row,
    hide_value,
    load_angles,
    prefetch_angles,
    rotate,
    split_pairs,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import has_plain, has_tail
from mlacast.kernels.gluon.sm90.sparse_mla_decode_softmax import (
    finish_item,
    fold_scores,
    publish_weights,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import (
    BLOCK_H,
    KEY_UNIT,
    advance_place,
    find_phase,
    find_slot,
    find_token,
    find_work_range,
)


@gluon.jit
def _start_scores(
    query,
    q_3_smem,
    q_4_smem,
    q_tail_smem,
    k_even,
    k_odd,
    place,
    k_ready,
    tail,
    NUM_PIECES: gl.constexpr,
    HAS_TAIL: gl.constexpr,
    S: gl.constexpr,
):
    """Issue q k^T, the right half of the keys as soon as it is there; consumes its ``k_ready``.

    Returns:
        scores [64, 64] float32, all outstanding, and the place of the right half.
    """
    q_0, q_1, q_2 = query
    fence_async_shared()
    slot = find_slot(place, NUM_PIECES)
    s = gl.zeros((64, 64), gl.float32, S)
    s = warpgroup_mma(q_0, k_even.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(q_1, k_odd.index(slot).permute((1, 0)), s, is_async=True)
    place = advance_place(place, NUM_PIECES)
    slot = find_slot(place, NUM_PIECES)
    mbarrier.wait(k_ready.index(slot), find_phase(place, NUM_PIECES))
    fence_async_shared()
    even = k_even.index(slot).permute((1, 0))
    s = warpgroup_mma(q_2, even.slice(0, 64, dim=0), s, is_async=True)
    s = warpgroup_mma(q_3_smem, even.slice(64, 64, dim=0), s, is_async=True)
    s = warpgroup_mma(q_4_smem, k_odd.index(slot).permute((1, 0)), s, is_async=True)
    if HAS_TAIL:
        s = warpgroup_mma(q_tail_smem, tail.permute((1, 0)), s, is_async=True)
    return s, place


@gluon.jit
def _start_gram(k_even, k_odd, slot, right, S: gl.constexpr):
    """Issue q q^T of the query in pieces ``slot`` and ``right``: its diagonal has the squares.

    A hundredth of the instructions that squares in registers would take, and code that runs once an
    item is paid for by its length.
    """
    fence_async_shared()
    gram = gl.zeros((64, 64), gl.float32, S)
    for piece in gl.static_range(2):
        at = slot if piece == 0 else right
        even = k_even.index(at)
        odd = k_odd.index(at)
        gram = warpgroup_mma(even, even.permute((1, 0)), gram, use_acc=piece > 0, is_async=True)
        gram = warpgroup_mma(odd, odd.permute((1, 0)), gram, is_async=True)
    return gram


@gluon.jit
def _delay_rows(row):
    """``hide_value(row)`` for the rows of an accumulator: a thread's two are kept as one."""
    return hide_value(row & ~8) | (row & 8)


@gluon.jit
def _take_diagonal(x, row):
    """Diagonal [64] of [64, 64], in the layout of ``row``, the numbers 0 to 63."""
    # First the eight columns with the row's, which are those of a warp: few comparisons.
    blocks = gl.reshape(x, (64, 8, 8))  # [64, 8, 8]
    BLOCK: gl.constexpr = gl.SliceLayout(2, blocks.type.layout)
    block = gl.arange(0, 8, gl.SliceLayout(0, BLOCK))  # [8]
    own = gl.convert_layout(row // 8, gl.SliceLayout(1, BLOCK), assert_trivial=True)  # [64]
    in_block = gl.expand_dims(own[:, None] == block[None, :], 2)  # [64, 8, 1]
    columns = gl.sum(gl.where(in_block, blocks, 0.0), 1)  # [64, 8]
    COLUMNS: gl.constexpr = columns.type.layout
    column = gl.arange(0, 8, gl.SliceLayout(0, COLUMNS))  # [8]
    own = gl.convert_layout(row % 8, gl.SliceLayout(1, COLUMNS), assert_trivial=True)  # [64]
    diagonal = gl.sum(gl.where(own[:, None] == column[None, :], columns, 0.0), 1)  # [64]
    return gl.convert_layout(diagonal, row.type.layout, assert_trivial=True)


@gluon.jit
def _find_next_item(item, num_items, num_programs):
    """The program's next item, or the last of all.

    In one piece, without a sum that the loop needs too: what is kept over the keys spills.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .s32 limit;
        sub.s32 limit, $2, $3;
        sub.s32 limit, limit, 1;
        min.s32 limit, limit, $1;
        add.s32 $0, limit, $3;
        }""",
        "=r,r,r,r",
        [item, num_items, num_programs],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _take_query(
    k_even,
    k_odd,
    q_halves,
    q_64_smem,
    q_tail_smem,
    k_ready,
    k_free,
    place,
    row,
    table,
    angles,
    pairs,
    eps,
    score_scale_log2,
    QUERY: gl.constexpr,
    POOL: gl.constexpr,
    RING: gl.constexpr,
    S: gl.constexpr,
):
    """Take the query of an item out of the ring, rotated; its last parts go to shared memory.

    ``table`` is the RoPE table and its stride; it, ``angles`` and ``pairs`` are looked at where the
    query is rotated. Consumes ``k_ready`` of the query's pieces and produces their ``k_free``.

    Returns:
        the first three parts of the query, two of 128 and one of 64 dimensions, in registers, what
        scores are multiplied by [64], and the place of the first keys.
    """
    HAS_TAIL: gl.constexpr = has_tail(POOL.record)
    Q: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    table_ptr, stride_table = table
    slot = find_slot(place, RING.num_pieces)
    mbarrier.wait(k_ready.index(slot), find_phase(place, RING.num_pieces))
    place = advance_place(place, RING.num_pieces)
    right = find_slot(place, RING.num_pieces)
    mbarrier.wait(k_ready.index(right), find_phase(place, RING.num_pieces))
    last = k_odd.index(right)  # [64, 128]
    if QUERY.has_norm:
        gram = _start_gram(k_even, k_odd, slot, right, S)
    q_halves.index(0).store(last.slice(0, 64, dim=1).load(Q))
    q_64_smem.index(0).store(k_even.index(right).slice(64, 64, dim=1).load(Q))
    q_rope = last.slice(64, 64, dim=1).load(Q)  # [64, 64]
    if HAS_TAIL:
        q_halves.index(1).store(q_rope)
        place = advance_place(place, RING.num_pieces)
        third = find_slot(place, RING.num_pieces)
        mbarrier.wait(k_ready.index(third), find_phase(place, RING.num_pieces))
        q_rope = k_even.index(third).slice(0, 64, dim=1).load(Q)  # [64, 64]
        mbarrier.arrive(k_free.index(third), count=1)
    if QUERY.is_rotated:
        cos, sin = load_angles(table_ptr, stride_table, angles, pairs)
        q_rope = gl.convert_layout(rotate(q_rope, cos, sin, QUERY.half_pairing), Q)  # [64, 64]
    if has_plain(POOL.record):
        # The keys' last dimensions are not in the unit of the others.
        q_rope = (q_rope.to(gl.float32) * (1.0 / KEY_UNIT)).to(gl.bfloat16)
    if HAS_TAIL:
        q_tail_smem.index(0).store(q_rope)
    else:
        q_halves.index(1).store(q_rope)
    query = (
        k_even.index(slot).load(Q),
        k_odd.index(slot).load(Q),
        k_even.index(right).slice(0, 64, dim=1).load(Q),
    )
    score_scale = gl.full((BLOCK_H,), 0.0, gl.float32, ROW) + score_scale_log2 * KEY_UNIT
    if QUERY.has_norm:
        # The norm is one factor per head, so it joins the score scale.
        gram = warpgroup_mma_wait(0, deps=[gram])
        squares = _take_diagonal(gram, _delay_rows(row))  # [64]
        score_scale *= gl.rsqrt(squares * (1.0 / 512.0) + eps)
        # NaN in the query comes with the scores; here it would reach masked keys.
        score_scale = gl.where(score_scale != score_scale, 1.0, score_scale)  # [64]
    mbarrier.arrive(k_free.index(slot), count=1)
    mbarrier.arrive(k_free.index(right), count=1)
    place = advance_place(place, RING.num_pieces)
    return query, score_scale, place


@gluon.jit
def run_score_role(
    k_even,
    k_odd,
    tail_smem,
    q_64_smem,
    q_128_smem,
    q_tail_smem,
    p_smem,
    alpha_smem,
    mask_smem,
    factor_smem,
    k_ready,
    k_free,
    p_ready,
    p_go,
    p_free,
    factor_ready,
    factor_free,
    pool,
    extra_pool,
    rope,
    sink_ptr,
    lse_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    work,
    eps,
    score_scale_log2,
    v_scale,
    WORK: gl.constexpr,
    QUERY: gl.constexpr,
    POOL: gl.constexpr,
    EXTRA: gl.constexpr,
    END: gl.constexpr,
    RING: gl.constexpr,
):
    """Scores and softmax of every work item; lse or the split's state to global memory.

    Consumes ``k_ready``, ``p_free`` and, where items are whole rows, ``factor_free``; frees the
    query's pieces (``k_free``) itself. Produces per block ``p_ready`` (weights stored) and, with
    delayed outputs, ``p_go`` (they may be multiplied), per item of whole rows ``factor_ready``.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    Q: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    PARTIAL: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    HAS_TAIL: gl.constexpr = has_tail(POOL.record)
    table_ptr, stride_table, table_rows, positions_ptr, stride_positions = rope
    # The same memory as two tiles of the weights' shape, whose addresses are kept anyway.
    q_halves = q_128_smem._reinterpret(gl.bfloat16, [2, BLOCK_H, 64], q_64_smem.type.layout)
    row = gl.arange(0, BLOCK_H, ROW)  # [64]
    place = 0
    # Blocks; bit 30 is the phase of ``factor_free``, which shares the register.
    count = 0
    angles = ()
    pairs = ()
    if QUERY.is_rotated:
        pairs, other = split_pairs(gl.zeros((BLOCK_H, 64), gl.bfloat16, Q), QUERY.half_pairing)
        first_token = find_token(gl.program_id(0), work, WORK)
        angles = find_table_row(table_rows, positions_ptr, stride_positions, first_token)
        prefetch_angles(table_ptr, stride_table, angles)
    for item in range(gl.program_id(0), work.num_items, work.num_programs):
        token, _, num_blocks, _, _ = find_work_range(
            item, work, pool, extra_pool, WORK, POOL, EXTRA
        )
        if QUERY.is_rotated:
            next_item = _find_next_item(item, work.num_items, work.num_programs)
            next_token = find_token(next_item, work, WORK)
            next_angles = find_table_row(table_rows, positions_ptr, stride_positions, next_token)
        query, score_scale, place = _take_query(
            k_even,
            k_odd,
            q_halves,
            q_64_smem,
            q_tail_smem,
            k_ready,
            k_free,
            place,
            row,
            (table_ptr, stride_table),
            angles,
            pairs,
            eps,
            score_scale_log2,
            QUERY,
            POOL,
            RING,
            S,
        )
        base = gl.full((BLOCK_H,), -float("inf"), gl.float32, ROW)  # [64]
        partial_sum = gl.full((BLOCK_H, 4), 0.0, gl.float32, PARTIAL)  # [64, 4]
        for i in range(num_blocks):
            mbarrier.wait(
                k_ready.index(find_slot(place, RING.num_pieces)), find_phase(place, RING.num_pieces)
            )
            # Zero, but part of a block's addresses: those of an item would be kept, and spill.
            zero = count >> 31
            s, place = _start_scores(
                query,
                q_64_smem.index(zero if WORK.is_split and not HAS_TAIL else 0),
                q_128_smem.index(zero if HAS_TAIL else 0),
                q_tail_smem.index(zero if HAS_TAIL else 0),
                k_even,
                k_odd,
                place,
                k_ready,
                tail_smem.index(count & 1) if HAS_TAIL else tail_smem,
                RING.num_pieces,
                HAS_TAIL,
                S,
            )
            mask = mask_smem.index(count & 3)  # [64]
            masked = has_marked(mask)
            if RING.delays_output:
                s = warpgroup_mma_wait(1, deps=[s])
                if i > 0:
                    mbarrier.arrive(p_go, count=1)
            s = warpgroup_mma_wait(0, deps=[s])
            place = advance_place(place, RING.num_pieces)
            if masked != 0:
                s = apply_mask(s, mask, COLUMN)
            p, alpha, base, partial_sum = fold_scores(
                s, base, partial_sum, score_scale, PARTIAL, gl.bfloat16
            )
            publish_weights(p, alpha, p_smem, alpha_smem, p_ready, p_free, count)
            count += 1
        if RING.delays_output:
            mbarrier.arrive(p_go, count=1)
        if QUERY.is_rotated:
            angles = next_angles
            prefetch_angles(table_ptr, stride_table, angles)
        finish_item(
            base,
            partial_sum,
            item,
            token,
            _delay_rows(row),
            factor_smem,
            factor_ready,
            factor_free,
            (count >> 30) & 1,
            sink_ptr,
            lse_ptr,
            partial_max_ptr,
            partial_sum_ptr,
            work,
            KEY_UNIT * v_scale,
            WORK,
            END,
        )
        if not WORK.is_split:
            count ^= 1 << 30

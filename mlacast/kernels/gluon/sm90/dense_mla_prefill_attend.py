"""Consumers of the Hopper dense prefill kernel: scores, softmax, output of 64 rows each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlacast.kernels.common.sm90_order import wait_until_there
from mlacast.kernels.common.sm90_rescale import rescale
from mlacast.kernels.common.sm90_rotation import find_row_offset, hide_rows
from mlacast.kernels.common.sm90_store import NVFP4
from mlacast.kernels.common.sm90_token_store import store_token_block
from mlacast.kernels.gluon.sm90.dense_mla_prefill_tiles import (
    BLOCK_M,
    BLOCK_N,
    CONSUMERS,
    DIAGONAL,
    FIRST_ROW,
    HEAD,
    LN_2,
    NUM_BLOCKS,
    NUM_KEYS,
    SEQUENCE_START,
    STAGES,
    read_word,
)

# Weights reach 2**8 before their base moves: as precise in bfloat16, and far from overflow.
_LAZINESS = gl.constexpr(8.0)

# Per warp: -inf for the thread's 64 scores past a last key, or nothing when that is beyond the
# block. $64.. are the scores again, $128 and $130 the last keys of the thread's two rows.
_MASK = gl.constexpr(
    "{ .reg .pred out; .reg .b32 lane, first, second; "
    "min.s32 first, $128, $130; setp.lt.s32 out, first, 127; "
    "vote.sync.any.pred out, out, 0xffffffff; @!out bra DONE; "
    "mov.u32 lane, %laneid; and.b32 lane, lane, 3; shl.b32 lane, lane, 1; "
    "sub.s32 first, $128, lane; sub.s32 second, $130, lane; "
    + "".join(
        f"setp.lt.s32 out, {('first', 'second')[i >> 1 & 1]}, {8 * (i >> 2) + (i & 1)}; "
        f"selp.f32 ${i}, 0fFF800000, ${i}, out; "
        for i in range(64)
    )
    + "DONE: }"
)
_MASK_OPERANDS = gl.constexpr(",".join(["=f"] * 64 + [str(i) for i in range(64)] + ["r"] * 64))


@gluon.jit
def _apply_mask(s, last):
    """Scores [64, 128] with -inf right of column ``last`` (int32 [64])."""
    return gl.inline_asm_elementwise(
        _MASK, _MASK_OPERANDS, [s, last[:, None]], dtype=gl.float32, is_pure=False, pack=64
    )


@gluon.jit
def _load_query(q_smem, CONSUMER: gl.constexpr, OPERAND: gl.constexpr):
    """The consumer's rows in registers: three parts [64, 64]."""
    query = ()
    for part in gl.static_range(3):
        query = query + (q_smem.index(CONSUMER * 3 + part).load(OPERAND),)
    return query


@gluon.jit
def _start_scores(query, k_smem, stage, S: gl.constexpr):
    """Issue q k^T [64, 128] with the query, three parts [64, 64], from registers."""
    s = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, S)
    for part in gl.static_range(3):
        keys = k_smem.index(stage * 3 + part).permute((1, 0))
        s = warpgroup_mma(query[part], keys, s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def _fold_scores(s, base, partial_sum, scale, PARTIAL: gl.constexpr):
    """Fold one block of scores [64, 128] into the softmax state.

    Weights are relative to ``base``, which moves to the maximum of a block only when that is more
    than 256-fold larger: most blocks leave what came before as it is.

    Returns:
        weights [64, 128] float32, the factor alpha [64] of everything before, the new base [64]
        (base 2) and the new partial sums [64, 4], one per thread of a quad.
    """
    # In short chains: the maximum is what the exponentials wait for.
    # [64, 4]
    by_quad = gl.max(gl.max(gl.max(gl.reshape(s, (BLOCK_M, 4, 4, 4, 2)), 4), 1), 1)
    top = gl.convert_layout(gl.max(by_quad, 1), base.type.layout) * scale  # [64]
    new_base = gl.where(top > base + _LAZINESS, top, base)  # [64]
    # -inf - -inf is NaN: shift by 0 while nothing valid has been seen.
    shift = gl.where(new_base == -float("inf"), 0.0, new_base)  # [64]
    p = gl.exp2(s * scale - shift[:, None])  # [64, 128]
    # What came before a row's first key is zero and needs no factor.
    alpha = gl.where(base == -float("inf"), 1.0, gl.exp2(base - shift))  # [64]
    sums = gl.sum(gl.sum(gl.reshape(p, (BLOCK_M, 16, 4, 2)), 3), 1)  # [64, 4]
    sums = gl.convert_layout(sums, PARTIAL, assert_trivial=True)
    again = gl.convert_layout(alpha, gl.SliceLayout(1, PARTIAL))  # [64]
    return p, alpha, new_base, partial_sum * again[:, None] + sums


@gluon.jit
def _store_tile(
    state,
    words,
    target,
    lse_ptr,
    num_rows,
    stages,
    CONSUMER: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Normalise and store the consumer's rows of a tile, and their lse.

    The state is the un-normalised output [64, 128], bases [64] and partial sums [64, 4].
    """
    o, base, partial_sum = state
    ROW: gl.constexpr = base.type.layout
    # [64], and so is all up to ``alive``.
    total = gl.convert_layout(gl.sum(partial_sum, 1), ROW)
    empty = total == 0.0
    divisor = gl.where(empty, 1.0, total)
    lse = gl.where(empty, -float("inf"), (base + gl.log2(divisor)) * LN_2)
    factor = gl.where(empty, 0.0, 1.0 / divisor)
    alive = gl.where(empty, 0, -1)
    head = read_word(words, HEAD)
    first_row = read_word(words, FIRST_ROW) + CONSUMER * BLOCK_M
    token = read_word(words, SEQUENCE_START) + first_row
    # Rows before the sequence belong to the one before it.
    skipped = -first_row
    local = hide_rows(ROW)  # [64]
    gl.store(lse_ptr + find_row_offset(head, num_rows) + token + local, lse, mask=local >= skipped)
    stage = stages
    if OUTPUT.kind == NVFP4:
        stage = stages[CONSUMER]
    store_token_block(o, factor, alive, target, token, skipped, head, stage, OUTPUT)


@gluon.jit
def run_attend_role(
    rows,
    CONSUMER: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Rows ``64 * CONSUMER``.. of every tile.

    Consumes ``q_ready``, ``k_ready``, ``v_ready``; produces ``q_free``, and together with the other
    consumer ``k_free`` and ``v_free``. The product with the values of a block runs beside the
    softmax of the next one. The consumers issue their products in turn, so that one's softmax runs
    beside the other's products: each waits for its own of ``turns`` and arrives at the other's.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    PARTIAL: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    buffers, barriers, turns, stages, target, lse_ptr, num_rows, scale_log2 = rows
    q_smem, k_smem, v_smem, words_smem = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    count = 0
    tile = 0
    turn = 0
    words = words_smem.index(0)
    mbarrier.wait(q_ready.index(CONSUMER), 0)
    num_blocks = read_word(words, NUM_BLOCKS)
    while num_blocks > 0:
        num_keys = read_word(words, NUM_KEYS)
        diagonal = read_word(words, DIAGONAL) + read_word(words, FIRST_ROW) + CONSUMER * BLOCK_M
        query = _load_query(q_smem, CONSUMER, OPERAND)
        mbarrier.arrive(q_free.index(CONSUMER), count=1)
        base = gl.full((BLOCK_M,), -float("inf"), gl.float32, ROW)
        partial_sum = gl.full((BLOCK_M, 4), 0.0, gl.float32, PARTIAL)
        o = gl.zeros((BLOCK_M, 128), gl.float32, S)
        # The last key that a row sees, counted from the first of the block: [64].
        last = gl.minimum(hide_rows(ROW) + diagonal, num_keys - 1) - (num_blocks - 1) * BLOCK_N
        if num_blocks * BLOCK_N > num_keys:
            # The end of the sequence was copied by threads, not by the copy engine.
            mbarrier.wait(v_ready.index(count % STAGES), (count // STAGES) & 1)
            fence_async_shared()
        stage = count % STAGES
        mbarrier.wait(k_ready.index(stage), (count // STAGES) & 1)
        s = _start_scores(query, k_smem, stage, S)  # [64, 128]
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(stage), count=1)
        s = _apply_mask(s, last)
        p, alpha, base, partial_sum = _fold_scores(s, base, partial_sum, scale_log2, PARTIAL)
        weights = gl.convert_layout(p.to(gl.bfloat16), OPERAND)
        for _ in range(num_blocks - 1):
            stage = (count + 1) % STAGES
            v_stage = count % STAGES
            mbarrier.wait(k_ready.index(stage), ((count + 1) // STAGES) & 1)
            # Consumer 0 begins.
            mbarrier.wait(turns.index(CONSUMER), (turn & 1) ^ (CONSUMER == 0))
            s = _start_scores(query, k_smem, stage, S)  # [64, 128]
            mbarrier.wait(v_ready.index(v_stage), (count // STAGES) & 1)
            o = warpgroup_mma(weights, v_smem.index(v_stage), o, is_async=True)
            mbarrier.arrive(turns.index((CONSUMER + 1) % CONSUMERS), count=1)
            turn += 1
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_free.index(stage), count=1)
            last += BLOCK_N
            s = _apply_mask(s, last)
            p, alpha, base, partial_sum = _fold_scores(s, base, partial_sum, scale_log2, PARTIAL)
            # The wait for the product with the values would else move before this softmax.
            partial_sum = wait_until_there(partial_sum)
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(v_free.index(v_stage), count=1)
            o = rescale(o, alpha, 64)
            weights = gl.convert_layout(p.to(gl.bfloat16), OPERAND)
            count += 1
        v_stage = count % STAGES
        mbarrier.wait(v_ready.index(v_stage), (count // STAGES) & 1)
        o = warpgroup_mma(weights, v_smem.index(v_stage), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_free.index(v_stage), count=1)
        count += 1
        state = (o, base, partial_sum)
        _store_tile(state, words, target, lse_ptr, num_rows, stages, CONSUMER, OUTPUT)
        tile += 1
        words = words_smem.index(tile & 1)
        mbarrier.wait(q_ready.index(CONSUMER), tile & 1)
        num_blocks = read_word(words, NUM_BLOCKS)

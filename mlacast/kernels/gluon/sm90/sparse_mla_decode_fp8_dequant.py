"""Dequantising role of the Hopper decode kernel for FP8 queries: codes copied, keys decoded.

Queries and keys are copied as they are into stages, which the scores read. Of the keys, what the
outputs multiply becomes float16 as well, in the ring: it holds every code, and one instruction
turns two codes into it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from mlacast.kernels.common.sm90_rotation import hide_value
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import UNITS, has_tail
from mlacast.kernels.gluon.sm90.sparse_mla_decode_slots import load_slots, locate
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import (
    BLOCK_H,
    BLOCK_N,
    advance_piece,
    find_head_start,
    find_token,
    find_work_range,
)

# Reads of a stage: eight threads hold one 16-byte chunk of eight rows, which a 128-byte swizzle
# keeps out of each other's banks, as it does what they store.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [32, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]],
        [[8, 0], [16, 0]],
        [],
        [64, 32],
    )
)
# Copies: eight threads ask for 128 bytes of a row, so that a warp asks for few lines.
_COPY_WARPS = [[4, 0], [8, 0]]
_COPY = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0], [32, 0]],
        [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        _COPY_WARPS,
        [],
        [64, 32],
    )
)
# Of the same rows a thread: the third bit of a lane copies nothing else.
_COPY_TAIL = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0], [32, 0]],
        [[0, 4], [0, 8], [0, 0], [1, 0], [2, 0]],
        _COPY_WARPS,
        [],
        [64, 16],
    )
)
_ROW = gl.constexpr(gl.SliceLayout(1, _COPY))
WORDS_OF_UNIT = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
WORDS_OF_TAIL = gl.constexpr(gl.NVMMASharedLayout(64, 32, 2))


@gluon.jit
def _copy_rows(target, rows, valid, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Start copying words ``FIRST``.. of ``rows`` [64]; those that are not valid become zeros."""
    PER_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    column = FIRST + gl.arange(0, target.shape[1], gl.SliceLayout(0, LAYOUT))  # [n]
    # [64, n]
    pointers = gl.convert_layout(rows, PER_ROW, assert_trivial=True)[:, None] + column[None, :]
    mask = gl.convert_layout(valid, PER_ROW, assert_trivial=True)[:, None]
    async_copy.async_copy_global_to_shared(target, pointers, mask=mask)


# PTX: four codes ``$2`` as four float16 in ``$0`` and ``$1``.
_AS_FLOAT16 = gl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@gluon.jit
def _cast_e4m3_to_float16(words):
    """Four codes a word: two words of two float16, which holds every code."""
    return gl.inline_asm_elementwise(
        _AS_FLOAT16,
        "=r,=r,r",
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _load_slots_of(cursor, work, pool, WORK: gl.constexpr):
    """Slots [64] of the block under a cursor; on a query, of the first block of its item.

    Past the program's last item: slots that nobody asks for.
    """
    item, block, first, _, length = cursor
    token = find_token(gl.minimum(item, work.num_items - 1), work, WORK)
    lane = gl.arange(0, BLOCK_N, _ROW)  # [64]
    ids, _ = load_slots(lane, first + gl.maximum(block, 0), length, 0, token, pool, pool, None)
    return ids


@gluon.jit
def _advance(cursor, work, pool, WORK: gl.constexpr, POOL: gl.constexpr):
    """Move a cursor to the next 64 rows: the query of an item (block -1), or a block of its keys.

    A cursor is an item, a block of it, its first block, their number, and the length of its list.
    """
    item, block, first, count, length = cursor
    block += 1
    if block == count:
        block = -1
        item += work.num_programs
        _, first, count, length, _ = find_work_range(
            gl.minimum(item, work.num_items - 1),
            work,
            pool,
            pool,
            WORK,
            POOL,
            None,
        )
    return item, block, first, count, length


@gluon.jit
def _send(
    cursor,
    ids,
    sent,
    query,
    pool,
    codes,
    tail_codes,
    mask_smem,
    codes_ready,
    codes_free,
    work,
    WORK: gl.constexpr,
    POOL: gl.constexpr,
):
    """Start copying the rows [64] under a cursor into the stage whose turn it is, ``sent`` before.

    Consumes ``codes_free`` of the stage, and produces ``codes_ready`` once this warpgroup's copies
    have landed: 128 arrivals and one. ``query`` is a pointer to int32 words with its strides of
    tokens and heads, which count 16 bytes. Where a thread copies to, others have read: between is
    the arrival at ``k_ready``, which awaits them.
    """
    item, block, _, _, _ = cursor
    q_ptr, stride_q_token, stride_q_head = query
    stage = sent & 1
    token = find_token(item, work, WORK)
    rows, _, valid = locate(ids, False, pool, pool, POOL, None)  # [64]
    head = find_head_start(item, work, WORK) + hide_value(gl.arange(0, BLOCK_H, _ROW))  # [64]
    # Four words at a time: so the compiler knows that copies of 16 bytes are aligned. Heads of a
    # token are less than 2**31 bytes apart (``heads:far_apart`` in ``ops.layout``).
    q_rows = q_ptr + token.to(gl.int64) * stride_q_token * 4 + head * stride_q_head * 4
    rows = gl.where(block < 0, q_rows, rows)  # [64]
    valid = gl.where(block < 0, head < work.num_heads, valid)
    mbarrier.wait(codes_free.index(stage), ((sent >> 1) & 1) ^ 1)
    mask_smem.index(sent & 3).store(gl.where(valid, 0, 1).to(gl.int8))
    for unit in gl.static_range(UNITS):
        _copy_rows(codes[unit].index(stage), rows, valid, 32 * unit, _COPY)
    if has_tail(POOL.record):
        _copy_rows(tail_codes.index(stage), rows, valid, 128, _COPY_TAIL)
    async_copy.mbarrier_arrive(codes_ready.index(stage), increment_count=False)
    mbarrier.arrive(codes_ready.index(stage), count=1)


@gluon.jit
def run_fp8_dequant_role(
    query,
    pool,
    work,
    codes,
    tail_codes,
    k_even,
    k_odd,
    mask_smem,
    codes_ready,
    codes_free,
    k_ready,
    k_free,
    WORK: gl.constexpr,
    POOL: gl.constexpr,
    NUM_PIECES: gl.constexpr,
):
    """Copy queries and blocks of keys into two stages in turn; decode keys into the ring.

    ``codes`` (one [2, 64, 32] a unit) and ``tail_codes`` [2, 64, 16] are words of the stages.
    The ring is float16. Produces ``codes_ready`` and ``k_ready``, consumes ``codes_free`` and
    ``k_free``. Keys that do not count are zero and marked in ``mask_smem``.
    """
    even_words = k_even._reinterpret(gl.int32, [NUM_PIECES, 64, 64], WORDS_OF_UNIT)
    odd_words = k_odd._reinterpret(gl.int32, [NUM_PIECES, 64, 64], WORDS_OF_UNIT)
    slot = 0
    phase = 1
    sent = 0
    decoded = 0
    cursor = _advance(
        (gl.program_id(0) - work.num_programs, -1, 0, 0, 0),
        work,
        pool,
        WORK,
        POOL,
    )
    ids = _load_slots_of(cursor, work, pool, WORK)
    # Two rounds before the first item fill the stages, with its query and its first block.
    for item in range(gl.program_id(0) - 2 * work.num_programs, work.num_items, work.num_programs):
        _, _, count, _, _ = find_work_range(
            gl.maximum(item, 0),
            work,
            pool,
            pool,
            WORK,
            POOL,
            None,
        )
        # What an item begins with, its query, is not decoded.
        for i in range(gl.where(item < 0, 1, count + 1)):
            if i > 0:
                stage = decoded & 1
                mbarrier.wait(codes_ready.index(stage), (decoded >> 1) & 1)
                mbarrier.wait(k_free.index(slot), phase)
                for unit in gl.static_range(UNITS):
                    if unit == 2:
                        mbarrier.arrive(k_ready.index(slot), count=1)
                        slot, phase = advance_piece(slot, phase, NUM_PIECES)
                        mbarrier.wait(k_free.index(slot), phase)
                    low, high = _cast_e4m3_to_float16(codes[unit].index(stage).load(_WORDS))
                    target = even_words if unit % 2 == 0 else odd_words
                    target.index(slot).store(gl.reshape(gl.join(low, high), (64, 64)))
                mbarrier.arrive(k_ready.index(slot), count=1)
                slot, phase = advance_piece(slot, phase, NUM_PIECES)
            if item >= 0:
                decoded += 1
            if cursor[0] < work.num_items:
                _send(
                    cursor,
                    ids,
                    sent,
                    query,
                    pool,
                    codes,
                    tail_codes,
                    mask_smem,
                    codes_ready,
                    codes_free,
                    work,
                    WORK,
                    POOL,
                )
                sent += 1
                cursor = _advance(
                    cursor,
                    work,
                    pool,
                    WORK,
                    POOL,
                )
                ids = _load_slots_of(cursor, work, pool, WORK)

"""A block of keys of the Hopper decode kernel: decoded while what comes next is copied."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from mlacast.kernels.gluon.sm90.sparse_mla_decode_fetch import (
    fetch_plain,
    fetch_scales,
    fetch_unit,
    find_own_word,
    view_fp4_scale_stage,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_layouts import ROW
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import TAIL_UNIT, UNITS, V32_SCALES
from mlacast.kernels.gluon.sm90.sparse_mla_decode_scales import read_scales, read_two_scales
from mlacast.kernels.gluon.sm90.sparse_mla_decode_slots import load_slots, locate
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import (
    BLOCK_N,
    advance_piece,
    find_token,
    find_work_range,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_unit import decode_unit


@gluon.constexpr_function
def loads_early(FORMAT, MIXED):
    """Whether slots are loaded a block before their rows are located.

    Beside codes of four bits it loses 3 %; with those of one scale it was not tried.
    """
    return FORMAT in ("v4", "v41", "v32") and not MIXED


@gluon.jit
def load_next_slots(
    cursor,
    work,
    pool,
    extra_pool,
    WORK: gl.constexpr,
    POOL: gl.constexpr,
    EXTRA: gl.constexpr,
):
    """Move a cursor to the next block and load its slots.

    A cursor is an item, a block of it, its first block, their number, and the lengths of both
    lists. Past the program's last item it stays in that item.

    Returns:
        The cursor, the slots [64], and whether they are the extra pool's.
    """
    item, block, first, count, length, extra_length = cursor
    block += 1
    if block == count:
        block = 0
        # A selection stays in uniform registers, where a minimum would not.
        item = gl.where(item + work.num_programs < work.num_items, item + work.num_programs, item)
        _, first, count, length, extra_length = find_work_range(
            item, work, pool, extra_pool, WORK, POOL, EXTRA
        )
    ids, is_extra = load_slots(
        gl.arange(0, BLOCK_N, ROW),
        first + block,
        length,
        extra_length,
        find_token(item, work, WORK),
        pool,
        extra_pool,
        EXTRA,
    )
    return (item, block, first, count, length, extra_length), ids, is_extra


@gluon.jit
def locate_rows(slots, pool, extra_pool, POOL: gl.constexpr, EXTRA: gl.constexpr):
    """Rows of the block that ``slots`` are of, as ``load_next_slots`` returns them.

    Returns:
        Addresses [64] of a thread's own words and of scales, which rows exist, and whether they are
        the extra pool's.
    """
    _, ids, is_extra = slots
    row_ptr, scale_ptr, valid = locate(
        ids, is_extra, pool, extra_pool, POOL, EXTRA, find_own_word()
    )
    return row_ptr, scale_ptr, valid, is_extra


@gluon.jit
def choose_scale_stage(scale_stage, blocks, FORMAT: gl.constexpr):
    """Where the scales of a block are: those of "v32" are read while the next ones are copied."""
    return scale_stage.index(blocks & 1) if FORMAT == "v32" else scale_stage


@gluon.jit
def fetch(
    stage,
    tail_stage,
    scale_stage,
    rows,
    UNIT: gl.constexpr,
    MIXED: gl.constexpr,
    FORMAT: gl.constexpr,
    EXTRA_FORMAT: gl.constexpr,
):
    """Start copying one unit of 64 records of either pool, with the first all their scales."""
    row_ptr, scale_ptr, valid, is_extra = rows
    if FORMAT == "v32":
        # From the codes' address, so that a thread keeps one a record. Only the first thread of a
        # row copies scales, and its own words are the first.
        scale_ptr = row_ptr + V32_SCALES
    if FORMAT == "fp8_576" and UNIT == TAIL_UNIT - 1:
        fetch_unit(tail_stage, row_ptr, valid, TAIL_UNIT, FORMAT, MIXED)
    if MIXED:
        if is_extra:
            fetch_unit(stage, row_ptr, valid, UNIT, EXTRA_FORMAT, MIXED)
            if UNIT == 0:
                fetch_scales(view_fp4_scale_stage(stage), scale_ptr, valid, EXTRA_FORMAT)
        else:
            fetch_unit(stage, row_ptr, valid, UNIT, FORMAT, MIXED)
            if UNIT == 0:
                fetch_scales(scale_stage, scale_ptr, valid, FORMAT)
    else:
        fetch_unit(stage, row_ptr, valid, UNIT, FORMAT, MIXED)
        if UNIT == 0:
            fetch_scales(scale_stage, scale_ptr, valid, FORMAT)
    async_copy.commit_group()


@gluon.jit
def read_block_scales(scale_stage, stages, is_extra, MIXED: gl.constexpr, FORMAT: gl.constexpr):
    """Scales of the block in the stage; with mixed pools those of its pool, in the same words."""
    if MIXED:
        if is_extra:
            scales = read_scales(view_fp4_scale_stage(stages[0]), "v41_fp4", MIXED)
        else:
            scales = read_scales(scale_stage, FORMAT, MIXED)
    else:
        scales = read_scales(scale_stage, FORMAT, MIXED)
    return scales


@gluon.jit
def _decode(
    stage,
    scales,
    target_even,
    target_odd,
    is_extra,
    UNIT: gl.constexpr,
    ONE_PRODUCT: gl.constexpr,
    MIXED: gl.constexpr,
    FORMAT: gl.constexpr,
    EXTRA_FORMAT: gl.constexpr,
):
    """Decode one unit of either pool: ``decode_unit``, whose shapes these are."""
    if MIXED:
        if is_extra:
            decode_unit(
                stage, scales, target_even, target_odd, UNIT, ONE_PRODUCT, EXTRA_FORMAT, MIXED
            )
        else:
            decode_unit(stage, scales, target_even, target_odd, UNIT, ONE_PRODUCT, FORMAT, MIXED)
    else:
        decode_unit(stage, scales, target_even, target_odd, UNIT, ONE_PRODUCT, FORMAT, MIXED)


@gluon.jit
def decode_block(
    blocks,
    place,
    rows,
    slots,
    scales,
    memory,
    work,
    pool,
    extra_pool,
    ONE_PRODUCT: gl.constexpr,
    WORK: gl.constexpr,
    POOL: gl.constexpr,
    EXTRA: gl.constexpr,
    RING: gl.constexpr,
):
    """Decode a block, whose first unit is there, and start copying three units further.

    ``blocks`` are those before it. ``place`` is slot and phase of the ring; ``rows`` are those of
    this block and ``slots`` of the next or, with ``loads_early``, that is where both are loaded.
    ``scales`` are the block's; those of "v32" are read here. Produces ``k_ready`` of the first half
    of the block; consumes ``k_free`` of the second, and leaves its ``k_ready`` to the caller: there
    the unscaled dimensions of "v4" arrive by themselves, 128 of 129 arrivals.

    Returns:
        ``place`` and, a block further, ``rows`` and ``slots``.
    """
    FORMAT: gl.constexpr = POOL.record
    EXTRA_FORMAT: gl.constexpr = FORMAT if EXTRA is None else EXTRA.record
    MIXED: gl.constexpr = FORMAT != EXTRA_FORMAT
    even_words, odd_words, tail_words, stages, tail_stage, scale_stage, k_ready, k_free = memory
    slot, phase = place
    is_extra = rows[3]
    own_rows = rows
    for unit in gl.static_range(UNITS):
        if unit == 2:
            # Two units of 128 dimensions are a piece: its scores need not wait for more.
            mbarrier.arrive(k_ready.index(slot), count=129)
            slot, phase = advance_piece(slot, phase, RING.num_pieces)
        if unit > 0:
            # Of three units on their way this one was asked for first; two may be missing.
            async_copy.wait_group(2)
        if unit == 2:
            # Behind the copies, for which the barrier before it is as good.
            mbarrier.wait(k_free.index(slot), phase)
            if FORMAT == "v4":
                fetch_plain(
                    odd_words.index(slot).slice(32, 32, dim=1), own_rows[0], own_rows[2], FORMAT
                )
                async_copy.mbarrier_arrive(k_ready.index(slot), increment_count=False)
        if FORMAT == "v32" and unit % 2 == 0:
            scales = read_two_scales(choose_scale_stage(scale_stage, blocks, FORMAT), unit)
        if unit == UNITS - 3:
            rows = locate_rows(slots, pool, extra_pool, POOL, EXTRA)
        if FORMAT == "v32" and unit == 0:
            # With the copy of the last unit, which is waited for before the block is ready.
            fetch_plain(tail_words.index(blocks & 1), rows[0], rows[2], FORMAT)
        # Into the stage of the unit before: the wait has synchronised since it was read.
        fetch(
            stages[(unit + 3) % UNITS],
            tail_stage,
            choose_scale_stage(scale_stage, blocks + 1, FORMAT),
            rows,
            (unit + 3) % UNITS,
            MIXED,
            FORMAT,
            EXTRA_FORMAT,
        )
        if loads_early(FORMAT, MIXED) and unit == UNITS - 3:
            slots = load_next_slots(slots[0], work, pool, extra_pool, WORK, POOL, EXTRA)
        _decode(
            stages[unit],
            scales,
            even_words.index(slot),
            odd_words.index(slot),
            is_extra,
            unit,
            ONE_PRODUCT,
            MIXED,
            FORMAT,
            EXTRA_FORMAT,
        )
    return (slot, phase), rows, slots

"""Dequantising role of the Hopper decode kernel: queries and selected records into the ring."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from mlacast.kernels.common.sm90_rotation import hide_value
from mlacast.kernels.gluon.sm90.sparse_mla_decode_layouts import ROW
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import (
    TAIL_UNIT,
    V32_SCALES,
    count_units,
    decode_unit,
    fetch_scales,
    fetch_tail,
    fetch_unit,
    has_tail,
    read_scales,
    view_fp4_scale_stage,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_slots import load_slots, locate
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import (
    BLOCK_H,
    BLOCK_N,
    advance_piece,
    find_head_start,
    find_token,
    find_work_range,
)


@gluon.jit
def _view_words(halves, NUM_PIECES: gl.constexpr):
    """Halves of the ring's pieces as int32 [NUM_PIECES, 64, 64]."""
    return halves._reinterpret(gl.int32, [NUM_PIECES, 64, 64], gl.NVMMASharedLayout(128, 32, 2))


@gluon.jit
def _fetch_query(
    q_ptr,
    stride_q_token,
    stride_q_head,
    token,
    first_head,
    num_heads,
    k_even,
    k_odd,
    slot,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    FULL_TILES: gl.constexpr,
    CHUNK16: gl.constexpr,
):
    """Start copying COUNT dimensions, ``FIRST``.., of 64 heads of a query [64, COUNT].

    Heads of a token are less than 2**31 elements apart (``heads:far_apart`` in ``ops.layout``).
    """
    # In either order of the query, so that one set of addresses is kept.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lane = gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))  # [64]
    base = q_ptr + token.to(gl.int64) * stride_q_token
    for first in gl.static_range(0, COUNT, 64):
        head = first_head + hide_value(lane)  # [64]
        d = FIRST + first + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))  # [64]
        if CHUNK16:
            chunk = (d // 16) * (hide_value(num_heads) * 16) + d % 16
            pointers = base + ((head * 16)[:, None] + chunk[None, :])  # [64, 64]
        else:
            pointers = base + (head * stride_q_head)[:, None] + d[None, :]  # [64, 64]
        half = k_even if first < 128 else k_odd
        target = half.index(slot).slice(first % 128, 64, dim=1)
        if FULL_TILES:
            async_copy.async_copy_global_to_shared(target, pointers)
        else:
            mask = (head < num_heads)[:, None]
            async_copy.async_copy_global_to_shared(target, pointers, mask=mask)


@gluon.jit
def _send_query(
    q_ptr,
    stride_q_token,
    stride_q_head,
    item,
    work,
    k_even,
    k_odd,
    k_ready,
    k_free,
    slot,
    phase,
    WORK: gl.constexpr,
    QUERY: gl.constexpr,
    RING: gl.constexpr,
):
    """Start copying the query of a work item into the next pieces of the ring.

    Consumes ``k_free`` of each, and produces ``k_ready`` once this warpgroup's copies have landed:
    128 arrivals and one.
    """
    token = find_token(item, work, WORK)
    first_head = find_head_start(item, work, WORK)
    for part in gl.static_range(3 if QUERY.d_qk == 576 else 2):
        mbarrier.wait(k_free.index(slot), phase)
        _fetch_query(
            q_ptr,
            stride_q_token,
            stride_q_head,
            token,
            first_head,
            work.num_heads,
            k_even,
            k_odd,
            slot,
            part * 256,
            256 if part < 2 else 64,
            WORK.full_tiles,
            QUERY.chunk16,
        )
        async_copy.mbarrier_arrive(k_ready.index(slot), increment_count=False)
        mbarrier.arrive(k_ready.index(slot), count=1)
        slot, phase = advance_piece(slot, phase, RING.num_pieces)
    return slot, phase


@gluon.jit
def _fetch(
    stage,
    tail_stage,
    scale_stage,
    row_ptr,
    scale_ptr,
    valid,
    is_extra,
    UNIT: gl.constexpr,
    MIXED: gl.constexpr,
    FORMAT: gl.constexpr,
    EXTRA_FORMAT: gl.constexpr,
):
    """Start copying one unit of 64 records of either pool, with the first all their scales."""
    if FORMAT == "v32":
        # From the codes' address, so that a thread keeps one a record.
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
def _read_scales(
    scale_stage,
    stages,
    is_extra,
    MIXED: gl.constexpr,
    FORMAT: gl.constexpr,
):
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
    MIXED: gl.constexpr,
    FORMAT: gl.constexpr,
    EXTRA_FORMAT: gl.constexpr,
):
    """Decode one unit of either pool: ``decode_unit``, whose shapes these are."""
    if MIXED:
        if is_extra:
            decode_unit(stage, scales, target_even, target_odd, UNIT, EXTRA_FORMAT, MIXED)
        else:
            decode_unit(stage, scales, target_even, target_odd, UNIT, FORMAT, MIXED)
    else:
        decode_unit(stage, scales, target_even, target_odd, UNIT, FORMAT, MIXED)


@gluon.jit
def _load_next_slots(
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
            item,
            work,
            pool,
            extra_pool,
            WORK,
            POOL,
            EXTRA,
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
def run_dequant_role(
    q_ptr,
    stride_q_token,
    stride_q_head,
    pool,
    extra_pool,
    work,
    k_even,
    k_odd,
    tail_smem,
    stages,
    tail_stage,
    scale_stage,
    mask_smem,
    k_ready,
    k_free,
    WORK: gl.constexpr,
    QUERY: gl.constexpr,
    POOL: gl.constexpr,
    EXTRA: gl.constexpr,
    RING: gl.constexpr,
):
    """Fill the ring: per work item the query, then its blocks of 64 keys as bfloat16.

    Produces ``k_ready``, consumes ``k_free``. Three units of records are on their way at a time.
    With four units a record every stage is an allocation of its own: no hazards that are none.
    Keys that do not count are zero and marked in ``mask_smem``.
    """
    NUM_PIECES: gl.constexpr = RING.num_pieces
    FORMAT: gl.constexpr = POOL.record
    UNITS: gl.constexpr = count_units(FORMAT)
    EXTRA_FORMAT: gl.constexpr = FORMAT if EXTRA is None else EXTRA.record
    MIXED: gl.constexpr = FORMAT != EXTRA_FORMAT
    TAIL: gl.constexpr = has_tail(FORMAT)
    # Where the registers allow it.
    EARLY: gl.constexpr = FORMAT == "v41" and not MIXED and not (WORK.is_split and POOL.has_length)
    even_words = _view_words(k_even, NUM_PIECES)
    odd_words = _view_words(k_odd, NUM_PIECES)
    if TAIL:
        tail_words = tail_smem._reinterpret(gl.int32, [2, 64, 32], gl.NVMMASharedLayout(128, 32, 2))
    slot = 0
    phase = 1
    blocks = 0
    step = work.num_programs
    # The cursor of the slots is a block ahead of what is copied, which is one ahead of what is
    # decoded. With EARLY it moves on as soon as the addresses are known.
    at_item = gl.program_id(0)
    _, at_first, at_count, length, extra_length = find_work_range(
        at_item,
        work,
        pool,
        extra_pool,
        WORK,
        POOL,
        EXTRA,
    )
    cursor = (at_item, 0, at_first, at_count, length, extra_length)
    ids, next_extra = load_slots(
        gl.arange(0, BLOCK_N, ROW),
        at_first,
        length,
        extra_length,
        find_token(at_item, work, WORK),
        pool,
        extra_pool,
        EXTRA,
    )
    located_extra = next_extra
    valid = gl.arange(0, BLOCK_N, ROW) < 0  # [64]
    nowhere = gl.zeros((BLOCK_N,), gl.int64, ROW)  # [64]
    row_ptr = pool[0] + nowhere  # [64]
    scale_ptr = pool[0] + nowhere  # [64]
    # One round before the first item: its query goes before the keys, whose signal would otherwise
    # wait for them.
    for item in range(gl.program_id(0) - step, work.num_items, step):
        _, _, count, _, _ = find_work_range(
            gl.maximum(item, 0),
            work,
            pool,
            extra_pool,
            WORK,
            POOL,
            EXTRA,
        )
        for _ in range(gl.where(item < 0, 0, count)):
            is_extra = located_extra
            if not EARLY:
                cursor, ids, next_extra = _load_next_slots(
                    cursor,
                    work,
                    pool,
                    extra_pool,
                    WORK,
                    POOL,
                    EXTRA,
                )
            mbarrier.wait(k_free.index(slot), phase)
            mask_smem.index(blocks & 3).store(gl.where(valid, 0, 1).to(gl.int8))
            for unit in gl.static_range(UNITS):
                # Five units take turns in four stages.
                stage = (blocks + unit) & 3
                ahead = (stage + 3) & 3
                if unit == 2:
                    # Two units of 128 dimensions are a piece: its scores need not wait for more.
                    mbarrier.arrive(k_ready.index(slot), count=129)
                    slot, phase = advance_piece(slot, phase, NUM_PIECES)
                    mbarrier.wait(k_free.index(slot), phase)
                # Of three units on their way this one was asked for first; two may be missing.
                async_copy.wait_group(2)
                if unit == 0:
                    scales = _read_scales(scale_stage, stages, is_extra, MIXED, FORMAT)
                if unit == UNITS - 3:
                    row_ptr, scale_ptr, valid = locate(
                        ids,
                        next_extra,
                        pool,
                        extra_pool,
                        POOL,
                        EXTRA,
                    )
                    located_extra = next_extra
                if FORMAT == "v32" and unit == 0:
                    # With the copy of the last unit, which is waited for before the block is ready.
                    fetch_tail(tail_words.index(blocks & 1), row_ptr, valid)
                # Into the stage of the unit before: the wait has synchronised since it was read.
                _fetch(
                    stages[(unit + 3) % 4] if UNITS == 4 else stages.index(ahead),
                    tail_stage,
                    scale_stage,
                    row_ptr,
                    scale_ptr,
                    valid,
                    located_extra if unit >= UNITS - 3 else is_extra,
                    (unit + 3) % UNITS,
                    MIXED,
                    FORMAT,
                    EXTRA_FORMAT,
                )
                if EARLY and unit == UNITS - 3:
                    cursor, ids, next_extra = _load_next_slots(
                        cursor,
                        work,
                        pool,
                        extra_pool,
                        WORK,
                        POOL,
                        EXTRA,
                    )
                _decode(
                    stages[unit] if UNITS == 4 else stages.index(stage),
                    scales,
                    even_words.index(slot),
                    odd_words.index(slot),
                    is_extra,
                    unit,
                    MIXED,
                    FORMAT,
                    EXTRA_FORMAT,
                )
            if FORMAT == "fp8_576":
                tail = tail_words.index(blocks & 1)
                decode_unit(tail_stage, scales, tail, tail, TAIL_UNIT, FORMAT, MIXED)
            mbarrier.arrive(k_ready.index(slot), count=129)
            slot, phase = advance_piece(slot, phase, NUM_PIECES)
            blocks += 1
        if item + step < work.num_items:
            slot, phase = _send_query(
                q_ptr,
                stride_q_token,
                stride_q_head,
                item + step,
                work,
                k_even,
                k_odd,
                k_ready,
                k_free,
                slot,
                phase,
                WORK,
                QUERY,
                RING,
            )
        if item < 0:
            row_ptr, scale_ptr, valid = locate(
                ids,
                next_extra,
                pool,
                extra_pool,
                POOL,
                EXTRA,
            )
            for unit in gl.static_range(3):
                _fetch(
                    stages[unit] if UNITS == 4 else stages.index(unit),
                    tail_stage,
                    scale_stage,
                    row_ptr,
                    scale_ptr,
                    valid,
                    next_extra,
                    unit,
                    MIXED,
                    FORMAT,
                    EXTRA_FORMAT,
                )
            located_extra = next_extra
            if EARLY:
                cursor, ids, next_extra = _load_next_slots(
                    cursor,
                    work,
                    pool,
                    extra_pool,
                    WORK,
                    POOL,
                    EXTRA,
                )

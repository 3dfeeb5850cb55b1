"""Dequantising role of the Hopper decode kernel: queries and selected records into the ring."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from mlacast.kernels.common.sm90_rotation import opaque
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import (
    ROW,
    decode_unit,
    fetch_scales,
    fetch_unit,
    fp4_scale_stage,
    read_scales,
    unit_count,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_slots import load_slots, locate
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import (
    BLOCK_H,
    BLOCK_N,
    head_start,
    next_piece,
    work_range,
)


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
    """Start copying COUNT dimensions, ``FIRST``.., of 64 heads of the query into a piece."""
    PLAIN: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # In chunk16 order heads are neighbours in a chunk of 16.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]) if CHUNK16 else PLAIN
    lane = gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))
    base = q_ptr + token.to(gl.int64) * stride_q_token
    for first in gl.static_range(0, COUNT, 64):
        head = first_head + opaque(lane)
        d = FIRST + first + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
        if CHUNK16:
            chunk = (d // 16) * (opaque(num_heads) * 16) + d % 16
            pointers = base + ((head * 16)[:, None] + chunk[None, :])
        else:
            pointers = base + (head * stride_q_head)[:, None] + d[None, :]
        half = k_even if first < 128 else k_odd
        target = half.index(slot).slice(first % 128, 64, dim=1)
        if FULL_TILES:
            async_copy.async_copy_global_to_shared(target, pointers)
        else:
            mask = (head < num_heads)[:, None]
            async_copy.async_copy_global_to_shared(target, pointers, mask=mask)


@gluon.jit
def _publish_query(k_ready, slot):
    """Signal a piece of a query once this warpgroup's copies have landed: 128 arrivals and one."""
    async_copy.mbarrier_arrive(k_ready.index(slot), increment_count=False)
    mbarrier.arrive(k_ready.index(slot), count=1)


@gluon.jit
def _fetch(
    stage,
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
    if MIXED:
        if is_extra:
            fetch_unit(stage, row_ptr, valid, UNIT, EXTRA_FORMAT)
            if UNIT == 0:
                fetch_scales(fp4_scale_stage(stage), scale_ptr, valid, EXTRA_FORMAT)
        else:
            fetch_unit(stage, row_ptr, valid, UNIT, FORMAT)
            if UNIT == 0:
                fetch_scales(scale_stage, scale_ptr, valid, FORMAT)
    else:
        fetch_unit(stage, row_ptr, valid, UNIT, FORMAT)
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
    """Scales of the block in the stage; with mixed pools both kinds."""
    scales = read_scales(scale_stage, FORMAT)
    extra_scales = scales
    if MIXED:
        extra_scales = read_scales(fp4_scale_stage(stages[0]), "v41_fp4")
    return scales, extra_scales


@gluon.jit
def _decode(
    stage,
    scales,
    extra_scales,
    target_even,
    target_odd,
    is_extra,
    UNIT: gl.constexpr,
    MIXED: gl.constexpr,
    FORMAT: gl.constexpr,
    EXTRA_FORMAT: gl.constexpr,
):
    """Decode one unit of either pool."""
    if MIXED:
        if is_extra:
            decode_unit(stage, extra_scales, target_even, target_odd, UNIT, EXTRA_FORMAT)
        else:
            decode_unit(stage, scales, target_even, target_odd, UNIT, FORMAT)
    else:
        decode_unit(stage, scales, target_even, target_odd, UNIT, FORMAT)


@gluon.jit
def dequant_role(
    q_ptr,
    stride_q_token,
    stride_q_head,
    pool,
    extra_pool,
    num_heads,
    num_items,
    num_splits,
    k_even,
    k_odd,
    tail_smem,
    stages,
    scale_stage,
    mask_smem,
    k_ready,
    k_free,
    HEAD_BLOCKS: gl.constexpr,
    FULL_TILES: gl.constexpr,
    IS_SPLIT: gl.constexpr,
    CHUNK16: gl.constexpr,
    HAS_LENGTH: gl.constexpr,
    HAS_EXTRA: gl.constexpr,
    HAS_EXTRA_LENGTH: gl.constexpr,
    FORMAT: gl.constexpr,
    INLINE: gl.constexpr,
    EXTRA_FORMAT: gl.constexpr,
    EXTRA_INLINE: gl.constexpr,
    NUM_PIECES: gl.constexpr,
):
    """Fill the ring: per work item the query, then its blocks of 64 keys as bfloat16.

    Produces ``k_ready``, consumes ``k_free``. Three units of records are on their way at a time.
    With four units a record every stage is an allocation of its own: no hazards that are none.
    Keys that do not count are zero and marked in ``mask_smem``.
    """
    UNITS: gl.constexpr = unit_count(FORMAT)
    MIXED: gl.constexpr = HAS_EXTRA and FORMAT != EXTRA_FORMAT
    TAIL: gl.constexpr = FORMAT == "v32"
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    even_words = k_even._reinterpret(gl.int32, [NUM_PIECES, 64, 64], WORDS)
    odd_words = k_odd._reinterpret(gl.int32, [NUM_PIECES, 64, 64], WORDS)
    if TAIL:
        tail_words = tail_smem._reinterpret(gl.int32, [2, 64, 32], WORDS)
    slot = 0
    phase = 1
    blocks = 0
    step = gl.num_programs(0)
    # The cursor of the slots: two blocks ahead of what is decoded, one ahead of what is copied.
    at_item = gl.program_id(0)
    at_block = 0
    at_token, at_first, at_count, length, extra_length = work_range(
        at_item,
        num_splits,
        pool,
        extra_pool,
        HEAD_BLOCKS,
        IS_SPLIT,
        HAS_LENGTH,
        HAS_EXTRA,
        HAS_EXTRA_LENGTH,
    )
    ids, next_extra = load_slots(
        gl.arange(0, BLOCK_N, ROW),
        at_first,
        length,
        extra_length,
        at_token,
        pool,
        extra_pool,
        HAS_EXTRA,
    )
    row_ptr, scale_ptr, valid = locate(
        ids, next_extra, pool, extra_pool, HAS_EXTRA, FORMAT, INLINE, EXTRA_FORMAT, EXTRA_INLINE
    )
    for unit in gl.static_range(3):
        _fetch(
            stages[unit] if UNITS == 4 else stages.index(unit),
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
    for item in range(gl.program_id(0), num_items, step):
        token, _, count, _, _ = work_range(
            item,
            num_splits,
            pool,
            extra_pool,
            HEAD_BLOCKS,
            IS_SPLIT,
            HAS_LENGTH,
            HAS_EXTRA,
            HAS_EXTRA_LENGTH,
        )
        for part in gl.static_range(3 if TAIL else 2):
            mbarrier.wait(k_free.index(slot), phase)
            _fetch_query(
                q_ptr,
                stride_q_token,
                stride_q_head,
                token,
                head_start(item, num_splits, HEAD_BLOCKS, IS_SPLIT),
                num_heads,
                k_even,
                k_odd,
                slot,
                part * 256,
                256 if part < 2 else 64,
                FULL_TILES,
                CHUNK16,
            )
            _publish_query(k_ready, slot)
            slot, phase = next_piece(slot, phase, NUM_PIECES)
        for _ in range(count):
            at_block += 1
            if at_block == at_count:
                at_block = 0
                at_item = gl.minimum(at_item + step, num_items - 1)
                at_token, at_first, at_count, length, extra_length = work_range(
                    at_item,
                    num_splits,
                    pool,
                    extra_pool,
                    HEAD_BLOCKS,
                    IS_SPLIT,
                    HAS_LENGTH,
                    HAS_EXTRA,
                    HAS_EXTRA_LENGTH,
                )
            is_extra = next_extra
            ids, next_extra = load_slots(
                gl.arange(0, BLOCK_N, ROW),
                at_first + at_block,
                length,
                extra_length,
                at_token,
                pool,
                extra_pool,
                HAS_EXTRA,
            )
            mbarrier.wait(k_free.index(slot), phase)
            mask_smem.index(blocks & 3).store(gl.where(valid, 0, 1).to(gl.int8))
            for unit in gl.static_range(UNITS):
                # Five units take turns in four stages.
                stage = (blocks + unit) & 3
                ahead = (stage + 3) & 3
                if unit == 2:
                    mbarrier.arrive(k_ready.index(slot), count=129)
                    slot, phase = next_piece(slot, phase, NUM_PIECES)
                    mbarrier.wait(k_free.index(slot), phase)
                async_copy.wait_group(2)
                if unit == 0:
                    scales, extra_scales = _read_scales(
                        scale_stage, stages, is_extra, MIXED, FORMAT
                    )
                if unit == UNITS - 3:
                    row_ptr, scale_ptr, valid = locate(
                        ids,
                        next_extra,
                        pool,
                        extra_pool,
                        HAS_EXTRA,
                        FORMAT,
                        INLINE,
                        EXTRA_FORMAT,
                        EXTRA_INLINE,
                    )
                # Into the stage of the unit before: the wait has synchronised since it was read.
                _fetch(
                    stages[(unit + 3) % 4] if UNITS == 4 else stages.index(ahead),
                    scale_stage,
                    row_ptr,
                    scale_ptr,
                    valid,
                    next_extra if unit >= UNITS - 3 else is_extra,
                    (unit + 3) % UNITS,
                    MIXED,
                    FORMAT,
                    EXTRA_FORMAT,
                )
                _decode(
                    stages[unit] if UNITS == 4 else stages.index(stage),
                    scales,
                    extra_scales,
                    tail_words.index(blocks & 1) if TAIL and unit == 4 else even_words.index(slot),
                    odd_words.index(slot),
                    is_extra,
                    unit,
                    MIXED,
                    FORMAT,
                    EXTRA_FORMAT,
                )
            mbarrier.arrive(k_ready.index(slot), count=129)
            slot, phase = next_piece(slot, phase, NUM_PIECES)
            blocks += 1

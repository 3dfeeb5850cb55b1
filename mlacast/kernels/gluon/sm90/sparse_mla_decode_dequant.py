"""Dequantising role of the Hopper decode kernel: queries and selected records into the ring."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from mlacast.kernels.common.sm90_rotation import hide_value
from mlacast.kernels.gluon.sm90.sparse_mla_decode_block import (
    choose_scale_stage,
    decode_block,
    fetch,
    load_next_slots,
    loads_early,
    locate_rows,
    read_block_scales,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_layouts import ROW
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import TAIL_UNIT, has_tail
from mlacast.kernels.gluon.sm90.sparse_mla_decode_scales import have_lower_parts
from mlacast.kernels.gluon.sm90.sparse_mla_decode_slots import load_slots
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import (
    BLOCK_H,
    BLOCK_N,
    advance_piece,
    find_head_start,
    find_token,
    find_work_range,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_unit import decode_unit


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
def _start_copies(slots, memory, pool, extra_pool, POOL: gl.constexpr, EXTRA: gl.constexpr):
    """Start copying three units of the first block, that of ``slots``; its rows."""
    FORMAT: gl.constexpr = POOL.record
    EXTRA_FORMAT: gl.constexpr = FORMAT if EXTRA is None else EXTRA.record
    _, _, _, stages, tail_stage, scale_stage, _, _ = memory
    rows = locate_rows(slots, pool, extra_pool, POOL, EXTRA)
    for unit in gl.static_range(3):
        fetch(
            stages[unit],
            tail_stage,
            choose_scale_stage(scale_stage, 0, FORMAT),
            rows,
            unit,
            FORMAT != EXTRA_FORMAT,
            FORMAT,
            EXTRA_FORMAT,
        )
    return rows


@gluon.jit
def _end_branch(number):
    """Something that only one branch ends with, so that what both do stays in them.

    The compiler would do their stores behind both, of numbers that are all kept until then.
    """
    gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _decode_next(
    blocks,
    place,
    rows,
    slots,
    memory,
    work,
    pool,
    extra_pool,
    WORK: gl.constexpr,
    POOL: gl.constexpr,
    EXTRA: gl.constexpr,
    RING: gl.constexpr,
):
    """Decode a block by the program for its scales; arguments and returns as ``decode_block``.

    Produces ``k_ready`` and consumes ``k_free`` as that does.
    """
    FORMAT: gl.constexpr = POOL.record
    MIXED: gl.constexpr = EXTRA is not None and EXTRA.record != FORMAT
    _, _, tail_words, stages, tail_stage, scale_stage, _, _ = memory
    lists = (memory, work, pool, extra_pool)
    if FORMAT == "v32":
        # One branch a block: of one a unit what the others need would spill.
        if have_lower_parts(choose_scale_stage(scale_stage, blocks, FORMAT)) == 0:
            place, rows, slots = decode_block(
                blocks, place, rows, slots, (), *lists, True, WORK, POOL, EXTRA, RING
            )
            _end_branch(blocks)
        else:
            place, rows, slots = decode_block(
                blocks, place, rows, slots, (), *lists, False, WORK, POOL, EXTRA, RING
            )
    else:
        scales = read_block_scales(scale_stage, stages, rows[3], MIXED, FORMAT)
        place, rows, slots = decode_block(
            blocks, place, rows, slots, scales, *lists, False, WORK, POOL, EXTRA, RING
        )
        if FORMAT == "fp8_576":
            tail = tail_words.index(blocks & 1)
            decode_unit(tail_stage, (), tail, tail, TAIL_UNIT, False, FORMAT, MIXED)
    return place, rows, slots


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
    Every stage is an allocation of its own: no hazards that are none. Keys that do not count are
    zero and marked in ``mask_smem``.
    """
    NUM_PIECES: gl.constexpr = RING.num_pieces
    FORMAT: gl.constexpr = POOL.record
    MIXED: gl.constexpr = EXTRA is not None and EXTRA.record != FORMAT
    even_words = _view_words(k_even, NUM_PIECES)
    odd_words = _view_words(k_odd, NUM_PIECES)
    tail_words = tail_smem
    if has_tail(FORMAT):
        tail_words = tail_smem._reinterpret(gl.int32, [2, 64, 32], gl.NVMMASharedLayout(128, 32, 2))
    memory = (even_words, odd_words, tail_words, stages, tail_stage, scale_stage, k_ready, k_free)
    slot = 0
    phase = 1
    blocks = 0
    step = work.num_programs
    # The cursor of the slots is a block ahead of what is copied, which is one ahead of what is
    # decoded. Where it is early it moves on as soon as the addresses are known.
    at_item = gl.program_id(0)
    _, at_first, at_count, length, extra_length = find_work_range(
        at_item, work, pool, extra_pool, WORK, POOL, EXTRA
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
    slots = (cursor, ids, next_extra)
    nowhere = pool.cache_ptr + gl.zeros((BLOCK_N,), gl.int64, ROW)  # [64]
    rows = (nowhere, nowhere, gl.arange(0, BLOCK_N, ROW) < 0, slots[2])
    # One round before the first item: its query goes before the keys, whose signal would otherwise
    # wait for them.
    for item in range(gl.program_id(0) - step, work.num_items, step):
        _, _, count, _, _ = find_work_range(
            gl.maximum(item, 0), work, pool, extra_pool, WORK, POOL, EXTRA
        )
        for _ in range(gl.where(item < 0, 0, count)):
            if not loads_early(FORMAT, MIXED):
                slots = load_next_slots(slots[0], work, pool, extra_pool, WORK, POOL, EXTRA)
            mbarrier.wait(k_free.index(slot), phase)
            mask_smem.index(blocks & 3).store(gl.where(rows[2], 0, 1).to(gl.int8))
            # Of three units on their way the first was asked for first; two may be missing.
            async_copy.wait_group(2)
            place, rows, slots = _decode_next(
                blocks,
                (slot, phase),
                rows,
                slots,
                memory,
                work,
                pool,
                extra_pool,
                WORK,
                POOL,
                EXTRA,
                RING,
            )
            slot, phase = place
            # Of "v4" every thread has asked for unscaled dimensions there, and they arrive for it.
            mbarrier.arrive(k_ready.index(slot), count=1 if FORMAT == "v4" else 129)
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
            rows = _start_copies(slots, memory, pool, extra_pool, POOL, EXTRA)
            if loads_early(FORMAT, MIXED):
                slots = load_next_slots(slots[0], work, pool, extra_pool, WORK, POOL, EXTRA)

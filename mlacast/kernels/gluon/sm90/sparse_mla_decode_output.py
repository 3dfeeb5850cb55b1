"""Output roles of the Hopper decode kernel: P V of 256 dimensions each, and the end of an item."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlacast.kernels.common.sm90_order import hold_back
from mlacast.kernels.common.sm90_rescale import rescale
from mlacast.kernels.common.sm90_rotation import (
    find_aligned_offset,
    find_row_offset,
    find_table_row,
    hide_rows,
    load_angles,
    prefetch_angles,
    rotate_back,
    split_halves,
    split_pairs,
)
from mlacast.kernels.common.sm90_scaled_store import store_scaled_block
from mlacast.kernels.common.sm90_store import NVFP4
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import has_plain, has_tail
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import (
    BLOCK_H,
    KEY_UNIT,
    find_head_start,
    find_split,
    find_work_range,
    skip_pieces,
)


@gluon.jit
def _store_partial(
    o,
    unit,
    partial_out_ptr,
    state,
    first_head,
    num_heads,
    FIRST: gl.constexpr,
    PLAIN: gl.constexpr,
    FULL_TILES: gl.constexpr,
):
    """Store an un-normalised [64, 128] of a split in float32, times ``unit``.

    ``state`` counts rows of 512. With PLAIN the right half is in units of one.
    """
    # Lanes trade pairs of columns with their neighbours, so that a store has 16 bytes a thread.
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
    o = gl.convert_layout(o, LAYOUT)
    head = first_head + hide_rows(gl.SliceLayout(1, LAYOUT))  # [64]
    d = FIRST + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))  # [128]
    # [64, 128]
    pointers = partial_out_ptr + state * 512 + ((head * 512)[:, None] + d[None, :])
    if PLAIN:
        o *= gl.where(d % 128 < 64, unit, unit * (1.0 / KEY_UNIT))[None, :]
    else:
        o *= unit
    if FULL_TILES:
        gl.store(pointers, o)
    else:
        gl.store(pointers, o, mask=(head < num_heads)[:, None])


@gluon.jit
def _take_to_key_unit(block):
    """[64, 128], whose right half was summed in units of one, in the unit of the left half."""
    LAYOUT: gl.constexpr = block.type.layout
    column = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))  # [128]
    return block * gl.where(column < 64, 1.0, 1.0 / KEY_UNIT)[None, :]


@gluon.jit
def _end_rows(
    even,
    odd,
    ends,
    item_phase,
    token,
    first_head,
    angles,
    pairs,
    HALF: gl.constexpr,
    PLAIN: gl.constexpr,
    WORK: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """End an item of whole rows: both [64, 128] times the factor of their head, rotated, stored.

    With PLAIN the last 64 dimensions were summed in units of one. ``ends`` are what only ends need
    of what a role gets; ``angles`` and ``pairs`` are looked at where the last 64 dimensions are
    rotated. Consumes ``factor_ready`` and produces ``factor_free``.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, even.type.layout)
    ROTATES: gl.constexpr = END.rotates_back and HALF == 1
    IS_NVFP4: gl.constexpr = OUTPUT.kind == NVFP4
    # Rows that are zero whatever the accumulator and the table hold.
    MASKED: gl.constexpr = END.has_sink or ROTATES
    factor_smem, factor_ready, factor_free, rope, target, work = ends
    table_ptr, stride_table, _, _, _ = rope
    (
        data_ptr,
        sf_ptr,
        scale_ptr,
        stride_data_token,
        stride_data_group,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        padding_rows,
    ) = target
    if ROTATES:
        prefetch_angles(table_ptr, stride_table, angles)
    elif PLAIN:
        odd = _take_to_key_unit(odd)
    mbarrier.wait(factor_ready, item_phase)
    factor = factor_smem.load(ROW)  # [64]
    if not IS_NVFP4:
        mbarrier.arrive(factor_free, count=1)
    padding = gl.where(token == work.num_tokens - 1, padding_rows, 0)
    # The rotated block last: only then are there registers for its angles.
    for first in gl.static_range(0, 256, 128):
        block = even if first == 0 else odd  # [64, 128]
        if IS_NVFP4 and first == 128:
            # Read again: kept while codes are made it would spill.
            factor = factor_smem.load(ROW)  # [64]
            mbarrier.arrive(factor_free, count=1)
        factor = hold_back(factor)
        if ROTATES and first == 128:
            cos, sin = load_angles(table_ptr, stride_table, angles, pairs)
            if PLAIN:
                cos *= 1.0 / KEY_UNIT
                sin *= 1.0 / KEY_UNIT
            block = rotate_back(block, cos, sin, END.half_pairing)
        alive = gl.where(factor == 0.0, 0, -1)  # [64]
        store_scaled_block(
            block,
            factor,
            alive,
            data_ptr + find_aligned_offset(token, stride_data_token),
            stride_data_group,
            sf_ptr,
            stride_sf_token,
            stride_sf_group,
            stride_sf_word,
            scale_ptr,
            token.to(gl.int64),
            padding,
            first_head,
            work.num_heads,
            HALF * 256 + first,
            WORK.full_tiles,
            MASKED,
            OUTPUT,
        )


@gluon.jit
def run_output_role(
    places,
    HALF: gl.constexpr,
    WORK: gl.constexpr,
    POOL: gl.constexpr,
    EXTRA: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
    QUERY_PIECES: gl.constexpr,
    RING: gl.constexpr,
):
    """Accumulate dimensions ``256 * HALF``.. of every item; a split leaves its state, others end.

    ``places`` are memory and numbers that both halves get: ``unit`` is what a sum of weights times
    the ring is multiplied by, where a split leaves it. Of the ring a query takes QUERY_PIECES
    pieces before the keys of its item. Consumes ``p_ready``, with delayed outputs ``p_go``, where
    the ring holds no queries ``k_ready``, and where items are whole rows ``factor_ready``; produces
    ``p_free``, ``k_free`` of its half of the keys and, of whole rows, ``factor_free``.
    """
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    (
        k_even,
        k_odd,
        p_smem,
        alpha_smem,
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
        target,
        partial_out_ptr,
        unit,
        work,
    ) = places
    _, _, table_rows, positions_ptr, stride_positions = rope
    slot = HALF + QUERY_PIECES - 2
    count = 0
    item_phase = 0
    ROTATES: gl.constexpr = END.rotates_back and HALF == 1 and not WORK.is_split
    # The last 64 dimensions are not in the unit of the others.
    PLAIN: gl.constexpr = HALF == 1 and has_plain(POOL.record) and not has_tail(POOL.record)
    pairs = ()
    if ROTATES:
        pairs, other = split_pairs(
            split_halves(gl.zeros((BLOCK_H, 128), gl.float32, OUT), 128)[1], END.half_pairing
        )
    for item in range(gl.program_id(0), work.num_items, work.num_programs):
        token, _, num_blocks, _, _ = find_work_range(
            item, work, pool, extra_pool, WORK, POOL, EXTRA
        )
        first_head = find_head_start(item, work, WORK)
        angles = ()
        if ROTATES:
            angles = find_table_row(table_rows, positions_ptr, stride_positions, token)
        even = gl.zeros((BLOCK_H, 128), gl.float32, OUT)
        odd = gl.zeros((BLOCK_H, 128), gl.float32, OUT)
        for _ in range(num_blocks):
            slot = skip_pieces(slot, 2, RING.num_pieces)
            phase = count & 1
            mbarrier.wait(p_ready, phase)
            alpha = alpha_smem.load(ROW)  # [64]
            even = rescale(even, alpha, 64)
            odd = rescale(odd, alpha, 64)
            if RING.delays_output:
                mbarrier.wait(p_go, phase)
            if QUERY_PIECES == 0:
                # The scores were taken from elsewhere: that they are done says nothing of the keys.
                mbarrier.wait(k_ready.index(slot), (2 * count + HALF) // RING.num_pieces & 1)
            fence_async_shared()
            even = warpgroup_mma(p_smem, k_even.index(slot), even, is_async=True)
            odd = warpgroup_mma(p_smem, k_odd.index(slot), odd, is_async=True)
            even, odd = warpgroup_mma_wait(0, deps=[even, odd])
            mbarrier.arrive(p_free, count=1)
            mbarrier.arrive(k_free.index(slot), count=1)
            count += 1
        # The query of the next item.
        slot = skip_pieces(slot, QUERY_PIECES, RING.num_pieces)
        if WORK.is_split:
            # No scratch of 4 TB: splits times tokens can be counted in 32 bits.
            state = find_row_offset(
                find_split(item, work.num_splits) * work.num_tokens + token, work.num_heads
            )
            for first in gl.static_range(0, 256, 128):
                _store_partial(
                    even if first == 0 else odd,
                    unit,
                    partial_out_ptr,
                    state,
                    first_head,
                    work.num_heads,
                    HALF * 256 + first,
                    PLAIN and first == 128,
                    WORK.full_tiles,
                )
        else:
            _end_rows(
                even,
                odd,
                (factor_smem, factor_ready, factor_free, rope, target, work),
                item_phase,
                token,
                first_head,
                angles,
                pairs,
                HALF,
                PLAIN,
                WORK,
                END,
                OUTPUT,
            )
            item_phase ^= 1

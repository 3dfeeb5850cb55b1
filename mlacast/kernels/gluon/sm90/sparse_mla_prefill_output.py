"""Output roles of the Hopper prefill kernel: P V of 256 or 128 dimensions, and the epilogue."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlacast.kernels.common.sm90_order import hold_back, wait_until_there
from mlacast.kernels.common.sm90_rescale import rescale
from mlacast.kernels.common.sm90_rotation import (
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
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_lone_output import (
    prefetch_rows,
    serve_scores,
)
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import (
    BLOCK_H,
    BLOCK_N,
    LN_2,
    MAXIMUM,
    NUM_SLOTS,
    TOTAL,
    advance_slot,
    count_blocks,
    find_tile_range,
    load_row_length,
)


@gluon.jit
def _start_product(
    o,
    slot,
    buffer,
    phase,
    k_smem,
    p_smem,
    alpha_smem,
    p_ready,
    p_go,
    SIDE: gl.constexpr,
    WORK: gl.constexpr,
):
    """Issue ``o * alpha + P V`` of one block, [64, 256] or, with two programs a tile, [64, 128].

    Consumes ``p_ready`` and, with one program a tile, ``p_go``.
    """
    mbarrier.wait(p_ready.index(buffer), phase)
    alpha = alpha_smem.index(buffer).load(gl.SliceLayout(1, o.type.layout))  # [64]
    if WORK.parts == 1:
        o = rescale(o, alpha, 128)
        mbarrier.wait(p_go.index(buffer), phase)
        v = k_smem.index(slot).slice(SIDE * 256, 256, dim=1)
    else:
        o = rescale(o, alpha, 64)
        part = gl.program_id(0) % 2
        pieces = k_smem._reinterpret(gl.bfloat16, [2 * NUM_SLOTS, BLOCK_N, 256], k_smem.layout)
        v = pieces.index(2 * slot + part).slice(SIDE * 128, 128, dim=1)
    return warpgroup_mma(p_smem.index(buffer), v, o, is_async=True)


@gluon.jit
def _store_rows(target_ptr, numbers, token, head, num_heads, WORK: gl.constexpr):
    """Store numbers [64] of a token's heads."""
    target = target_ptr + find_row_offset(token, num_heads) + head
    if WORK.full_tiles:
        gl.store(target, numbers)
    else:
        gl.store(target, numbers, mask=head < num_heads)


@gluon.jit
def run_output_role(
    places,
    early,
    SIDE: gl.constexpr,
    WORK: gl.constexpr,
    QUERY: gl.constexpr,
    POOL: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Accumulate half of what the program has of the output, normalise, rotate back and store.

    Consumes ``p_ready`` and, with one program a tile, ``p_go``; produces ``p_free`` and, together
    with the other output role, ``k_free``. The role with the first dimensions (SIDE 0) also stores
    lse and max_logits; with two programs a tile it first takes the score scales from the query
    (``k_ready``) and hands them to the score role (``p_go``).
    """
    (
        k_smem,
        p_smem,
        alpha_smem,
        k_free,
        p_ready,
        p_go,
        p_free,
        topk,
        length_ptr,
        stride_length,
        sink_ptr,
        table_ptr,
        stride_table,
        table_rows,
        positions_ptr,
        stride_positions,
        max_logits_ptr,
        lse_ptr,
        data_ptr,
        sf_ptr,
        scale_ptr,
        stride_data_token,
        stride_data_group,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        padding_rows,
        num_heads,
        num_tiles,
    ) = places
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    ROTATES: gl.constexpr = END.rotates_back and SIDE == 1
    WIDTH: gl.constexpr = 256 // WORK.parts
    if ROTATES:
        last = gl.zeros((BLOCK_H, WIDTH), gl.float32, OUT)
        if WIDTH == 256:
            last = split_halves(last, 256)[1]
        pairs, other = split_pairs(split_halves(last, 128)[1], END.half_pairing)
    slot = 0
    count = 0
    # Of two programs with the same tile the first has the left half of the output.
    part = 0
    if WORK.parts == 2:
        part = gl.program_id(0) % 2
        if SIDE == 0:
            serve_scores(early, k_smem, alpha_smem, k_free, p_go, QUERY)
        else:
            prefetch_rows(early, topk, WORK)
    first_tile, end_tile, step = find_tile_range(num_tiles, WORK)
    for tile in range(first_tile, end_tile, step):
        token = tile // WORK.head_blocks
        num_blocks = count_blocks(load_row_length(length_ptr, stride_length, token, topk, POOL))
        if ROTATES:
            angles = find_table_row(table_rows, positions_ptr, stride_positions, token)
        o = gl.zeros((BLOCK_H, WIDTH), gl.float32, OUT)
        for _ in range(num_blocks - 1):
            slot = advance_slot(slot)
            buffer = count & 1
            o = _start_product(
                o,
                slot,
                buffer,
                (count >> 1) & 1,
                k_smem,
                p_smem,
                alpha_smem,
                p_ready,
                p_go,
                SIDE,
                WORK,
            )
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(p_free.index(buffer), count=1)
            mbarrier.arrive(k_free.index(slot), count=1)
            count += 1
        slot = advance_slot(slot)
        buffer = count & 1
        o = _start_product(
            o,
            slot,
            buffer,
            (count >> 1) & 1,
            k_smem,
            p_smem,
            alpha_smem,
            p_ready,
            p_go,
            SIDE,
            WORK,
        )
        # The last product hides the tile's sums and the latency of loads.
        head_start = (tile % WORK.head_blocks) * BLOCK_H
        head = head_start + hide_rows(ROW)  # [64]
        total = alpha_smem.index(TOTAL + buffer).load(ROW)  # [64]
        running_max = alpha_smem.index(MAXIMUM + buffer).load(ROW)  # [64]
        if END.has_sink:
            if WORK.full_tiles:
                sink = gl.load(sink_ptr + head)  # [64]
            else:
                # Absent heads take the sink of the last: nobody reads what they become.
                sink = gl.load(sink_ptr + gl.minimum(head, num_heads - 1))  # [64]
        if ROTATES:
            prefetch_angles(table_ptr, stride_table, angles)
        empty = total == 0.0  # [64]
        divisor = gl.where(empty, 1.0, total)  # [64]
        lse2 = running_max + gl.log2(divisor)  # [64]
        lse = gl.where(empty, -float("inf"), lse2 * LN_2)  # [64]
        factor = gl.where(empty, 0.0, 1.0 / divisor)  # [64]
        if END.has_sink:
            # An empty row keeps the factor 0: -inf - (-inf) would be NaN. One rounding in both
            # roles, of which one stores lse: which one has a dimension depends on the batch.
            shifted = gl.where(empty, 0.0, gl.fma(lse2, gl.full_like(lse2, -LN_2), sink))  # [64]
            factor = gl.where(sink == float("inf"), 0.0, factor / (1.0 + gl.exp(shifted)))  # [64]
        if SIDE == 0:  # noqa: SIM102 - decided while compiling, the other while running
            if part == 0:
                _store_rows(lse_ptr, lse, token, head, num_heads, WORK)
                _store_rows(max_logits_ptr, running_max * LN_2, token, head, num_heads, WORK)
        factor = wait_until_there(factor)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(p_free.index(buffer), count=1)
        mbarrier.arrive(k_free.index(slot), count=1)
        count += 1
        token_row = token.to(gl.int64)
        padding = gl.where(token == num_tiles // WORK.head_blocks - 1, padding_rows, 0)
        left, right = split_halves(o, 256) if WIDTH == 256 else (o, o)
        # The rotated block last: only then are there registers for its angles.
        for first in gl.static_range(0, WIDTH, 128):
            block = left if first == 0 else right  # [64, 128]
            if first + 128 == WIDTH:
                if WIDTH == 256:
                    # The next tile's first softmax is what everything waits for: go on while its
                    # second scores occupy the tensor cores.
                    mbarrier.wait(
                        p_ready.index(count & 1),
                        (count >> 1) & 1,
                        pred=tile + step < end_tile,
                    )
                    factor = hold_back(factor)
                if ROTATES:  # noqa: SIM102 - as above
                    if part == WORK.parts - 1:
                        cos, sin = load_angles(table_ptr, stride_table, angles, pairs)
                        block = gl.convert_layout(
                            rotate_back(block, cos, sin, END.half_pairing),
                            block.type.layout,
                            assert_trivial=True,
                        )
            alive = gl.where(factor == 0.0, 0, -1)  # [64]
            store_scaled_block(
                block,
                factor,
                alive,
                data_ptr + token_row * stride_data_token,
                stride_data_group,
                sf_ptr,
                stride_sf_token,
                stride_sf_group,
                stride_sf_word,
                scale_ptr,
                token_row,
                padding,
                head_start,
                num_heads,
                part * 256 + SIDE * WIDTH + first,
                WORK.full_tiles,
                True,
                OUTPUT,
            )
        slot = advance_slot(slot)

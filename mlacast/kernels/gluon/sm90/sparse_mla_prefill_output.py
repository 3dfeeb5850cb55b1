"""Output roles of the Hopper prefill kernel: P V of 256 dimensions each, and the epilogue."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlacast.kernels.common.sm90_order import awaited, held_back
from mlacast.kernels.common.sm90_rescale import rescale
from mlacast.kernels.common.sm90_rotation import (
    halves,
    load_angles,
    opaque_rows,
    prefetch_angles,
    rotate_back,
    row_offset,
    split_pairs,
    table_row,
)
from mlacast.kernels.common.sm90_scaled_store import store_scaled_block
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import (
    BLOCK_H,
    LN_2,
    MAXIMUM,
    TOTAL,
    block_count,
    next_slot,
    row_length,
)


@gluon.jit
def _start_product(
    o, slot, buffer, phase, k_smem, p_smem, alpha_smem, p_ready, p_go, HALF: gl.constexpr
):
    """Issue ``o * alpha + P V`` of one block."""
    mbarrier.wait(p_ready.index(buffer), phase)
    alpha = alpha_smem.index(buffer).load(gl.SliceLayout(1, o.type.layout))
    o = rescale(o, alpha, 128)
    mbarrier.wait(p_go.index(buffer), phase)
    v = k_smem.index(slot).slice(HALF * 256, 256, dim=1)
    return warpgroup_mma(p_smem.index(buffer), v, o, is_async=True)


@gluon.jit
def output_role(
    places,
    HALF: gl.constexpr,
    WORK: gl.constexpr,
    POOL: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Accumulate dimensions ``256 * HALF``.. of every tile, normalise, rotate back and store.

    Consumes ``p_ready`` and ``p_go``; produces ``p_free`` and, together with the other half,
    ``k_free``. The left half also stores lse and max_logits.
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
    ROTATES: gl.constexpr = END.rotates_back and HALF == 1
    if ROTATES:
        pairs, other = split_pairs(
            halves(halves(gl.zeros((BLOCK_H, 256), gl.float32, OUT), 256)[1], 128)[1],
            END.half_pairing,
        )
    slot = 0
    count = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token = tile // WORK.head_blocks
        num_blocks = block_count(row_length(length_ptr, stride_length, token, topk, POOL))
        if ROTATES:
            angles = table_row(table_rows, positions_ptr, stride_positions, token)
        o = gl.zeros((BLOCK_H, 256), gl.float32, OUT)
        for _ in range(num_blocks - 1):
            slot = next_slot(slot)
            buffer = count & 1
            o = _start_product(
                o, slot, buffer, (count >> 1) & 1, k_smem, p_smem, alpha_smem, p_ready, p_go, HALF
            )
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(p_free.index(buffer), count=1)
            mbarrier.arrive(k_free.index(slot), count=1)
            count += 1
        slot = next_slot(slot)
        buffer = count & 1
        o = _start_product(
            o, slot, buffer, (count >> 1) & 1, k_smem, p_smem, alpha_smem, p_ready, p_go, HALF
        )
        # The last product hides the tile's sums and the latency of loads.
        head_start = (tile % WORK.head_blocks) * BLOCK_H
        head = head_start + opaque_rows(ROW)
        total = alpha_smem.index(TOTAL + buffer).load(ROW)
        running_max = alpha_smem.index(MAXIMUM + buffer).load(ROW)
        if END.has_sink:
            if WORK.full_tiles:
                sink = gl.load(sink_ptr + head)
            else:
                # Absent heads take the sink of the last: nobody reads what they become.
                sink = gl.load(sink_ptr + gl.minimum(head, num_heads - 1))
        if ROTATES:
            prefetch_angles(table_ptr, stride_table, angles)
        empty = total == 0.0
        divisor = gl.where(empty, 1.0, total)
        lse = gl.where(empty, -float("inf"), (running_max + gl.log2(divisor)) * LN_2)
        factor = gl.where(empty, 0.0, 1.0 / divisor)
        if END.has_sink:
            # An empty row keeps the factor 0: -inf - (-inf) would be NaN.
            shifted = gl.where(empty, 0.0, sink - lse)
            factor = gl.where(sink == float("inf"), 0.0, factor / (1.0 + gl.exp(shifted)))
        if HALF == 0:
            target = row_offset(token, num_heads)
            if WORK.full_tiles:
                gl.store(lse_ptr + target + head, lse)
                gl.store(max_logits_ptr + target + head, running_max * LN_2)
            else:
                gl.store(lse_ptr + target + head, lse, mask=head < num_heads)
                gl.store(max_logits_ptr + target + head, running_max * LN_2, mask=head < num_heads)
        factor = awaited(factor)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(p_free.index(buffer), count=1)
        mbarrier.arrive(k_free.index(slot), count=1)
        count += 1
        token_row = token.to(gl.int64)
        padding = gl.where(token == num_tiles // WORK.head_blocks - 1, padding_rows, 0)
        left, right = halves(o, 256)
        # The rotated block last: only then are there registers for its angles.
        for first in gl.static_range(0, 256, 128):
            block = left if first == 0 else right
            if first == 128:
                # The next tile's first softmax is what everything waits for: go on while its
                # second scores occupy the tensor cores.
                mbarrier.wait(
                    p_ready.index(count & 1),
                    (count >> 1) & 1,
                    pred=tile + gl.num_programs(0) < num_tiles,
                )
                factor = held_back(factor)
                if ROTATES:
                    cos, sin = load_angles(table_ptr, stride_table, angles, pairs)
                    block = rotate_back(block, cos, sin, END.half_pairing)
            alive = gl.where(factor == 0.0, 0, -1)
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
                HALF * 256 + first,
                WORK.full_tiles,
                True,
                OUTPUT,
            )
        slot = next_slot(slot)

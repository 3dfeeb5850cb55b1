"""Output roles of the Hopper prefill kernel for d_qk 576: P V of 256 dimensions each, the store."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlacast.kernels.common.sm90_order import hold_back
from mlacast.kernels.common.sm90_rotation import find_aligned_offset, split_halves
from mlacast.kernels.common.sm90_scaled_store import store_scaled_block
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576_barriers import (
    ALPHA_FREE,
    FACTOR_FREE,
    FACTOR_READY,
    K_FREE,
    P_FREE,
    P_GO,
    P_READY,
)
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import (
    BLOCK_H,
    advance_slot,
    count_blocks,
    load_row_length,
)


@gluon.jit
def run_output_role(
    places,
    HALF: gl.constexpr,
    WORK: gl.constexpr,
    POOL: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Accumulate dimensions ``256 * HALF``.. of every tile, normalise and store.

    Consumes ``P_READY``, ``P_GO`` and ``FACTOR_READY``; produces, together with the other half,
    ``P_FREE``, ``ALPHA_FREE``, ``K_FREE`` and ``FACTOR_FREE``.
    """
    barriers, k_smem, p_smem, alpha_smem, lengths, target, num_heads, num_tiles = places
    topk, length_ptr, stride_length = lengths
    data_ptr, sf_ptr, scale_ptr, stride_data_token, stride_data_group = target[:5]
    stride_sf_token, stride_sf_group, stride_sf_word, padding_rows = target[5:]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    slot = 0
    count = 0
    tile_phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token = tile // WORK.head_blocks
        num_blocks = count_blocks(load_row_length(length_ptr, stride_length, token, topk, POOL))
        o = gl.zeros((BLOCK_H, 256), gl.float32, OUT)
        for i in range(num_blocks):
            slot = advance_slot(slot)
            mbarrier.wait(barriers.index(P_READY), count & 1)
            alpha = alpha_smem.load(ROW)  # [64]
            # Only the final factors wait for that; the next rescale factors wait for P V.
            mbarrier.arrive(barriers.index(ALPHA_FREE), count=1, pred=i == num_blocks - 1)
            o = o * alpha[:, None]
            # The last quarter in registers frees the weights' only buffer before P V is done.
            p = p_smem.slice(48, 16, dim=1).load(P)  # [64, 16]
            mbarrier.wait(barriers.index(P_GO + (count & 1)), (count >> 1) & 1)
            v = k_smem.index(slot).slice(HALF * 256, 256, dim=1)  # [64, 256]
            o = warpgroup_mma(p_smem.slice(0, 32, dim=1), v.slice(0, 32, dim=0), o, is_async=True)
            o = warpgroup_mma(p_smem.slice(32, 16, dim=1), v.slice(32, 16, dim=0), o, is_async=True)
            o = warpgroup_mma(p, v.slice(48, 16, dim=0), o, is_async=True)
            o = warpgroup_mma_wait(1, deps=[o])
            mbarrier.arrive(barriers.index(P_FREE), count=1)
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(barriers.index(K_FREE + slot), count=1)
            count += 1
        mbarrier.wait(barriers.index(FACTOR_READY), tile_phase)
        factor = alpha_smem.load(ROW)  # [64]
        mbarrier.arrive(barriers.index(FACTOR_FREE), count=1)
        tile_phase ^= 1
        row = token.to(gl.int64)
        head_start = (tile % WORK.head_blocks) * BLOCK_H
        padding = gl.where(token == num_tiles // WORK.head_blocks - 1, padding_rows, 0)
        left, right = split_halves(o, 256)
        for part in gl.static_range(2):
            factor = hold_back(factor)
            alive = gl.where(factor == 0.0, 0, -1)  # [64]
            store_scaled_block(
                left if part == 0 else right,
                factor,
                alive,
                data_ptr + find_aligned_offset(token, stride_data_token),
                stride_data_group,
                sf_ptr,
                stride_sf_token,
                stride_sf_group,
                stride_sf_word,
                scale_ptr,
                row,
                padding,
                head_start,
                num_heads,
                HALF * 256 + part * 128,
                WORK.full_tiles,
                # A closed sink gives zeros whatever the accumulator holds.
                END.has_sink,
                OUTPUT,
            )
        slot = advance_slot(slot)

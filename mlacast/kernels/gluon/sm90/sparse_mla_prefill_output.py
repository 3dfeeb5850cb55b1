"""Output roles of the Hopper prefill kernel: P V of 256 dimensions each, and the epilogue."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlacast.kernels.gluon.sm90.sparse_mla_prefill_store import store_block
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import (
    BLOCK_H,
    block_count,
    join_pairs,
    load_angles,
    next_slot,
    row_length,
    split_pairs,
    table_row,
)


@gluon.jit
def _halves(x, N: gl.constexpr):
    """Split [64, N] into its left and right columns."""
    return gl.split(gl.permute(gl.reshape(x, (BLOCK_H, 2, N // 2)), (0, 2, 1)))


@gluon.jit
def _rotate_back_last_64(x, table_ptr, stride_table, table_row, dead, HALF_PAIRING: gl.constexpr):
    """Rotate the last 64 of 128 columns by the negative angles; ``dead`` rows [64] stay zero."""
    plain, rope = _halves(x, 128)
    first, second = split_pairs(rope, HALF_PAIRING)
    cos, sin = load_angles(table_ptr, stride_table, table_row, first)
    # Whatever the table holds at the position of an empty row, its output is zero.
    gone = gl.convert_layout(dead, gl.SliceLayout(1, first.type.layout))[:, None]
    rotated_first = gl.where(gone, 0.0, first * cos + second * sin)
    rotated_second = gl.where(gone, 0.0, second * cos - first * sin)
    rope = join_pairs(rotated_first, rotated_second, HALF_PAIRING)
    joined = gl.join(plain, gl.convert_layout(rope, plain.type.layout))
    return gl.reshape(gl.permute(joined, (0, 2, 1)), (BLOCK_H, 128))


@gluon.jit
def output_role(
    k_smem,
    p_smem,
    alpha_smem,
    factor_smem,
    k_free,
    p_ready,
    p_go,
    p_free,
    factor_ready,
    factor_free,
    topk,
    length_ptr,
    stride_length,
    table_ptr,
    stride_table,
    table_rows,
    positions_ptr,
    stride_positions,
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
    HALF: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr,
    FULL_TILES: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    HALF_PAIRING: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_LENGTH: gl.constexpr,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    F: gl.constexpr,
    CHUNK32: gl.constexpr,
    AMAX_FLOOR: gl.constexpr,
):
    """Accumulate dimensions ``256 * HALF``.. of every tile, normalise, rotate back and store.

    Consumes ``p_ready``, ``p_go`` and ``factor_ready``; produces ``p_free``, ``factor_free`` and,
    together with the other half, ``k_free``.
    """
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    slot = 0
    count = 0
    tile_phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token = tile // HEAD_BLOCKS
        num_blocks = block_count(row_length(length_ptr, stride_length, token, topk, HAS_LENGTH))
        if HAS_ROPE and HALF == 1:
            angles = table_row(table_rows, positions_ptr, stride_positions, token)
        o = gl.zeros((BLOCK_H, 256), gl.float32, OUT)
        for _ in range(num_blocks):
            slot = next_slot(slot)
            buffer = count & 1
            phase = (count >> 1) & 1
            mbarrier.wait(p_ready.index(buffer), phase)
            alpha = alpha_smem.index(buffer).load(ROW)
            o = o * alpha[:, None]
            mbarrier.wait(p_go.index(buffer), phase)
            v = k_smem.index(slot).slice(HALF * 256, 256, dim=1)
            o = warpgroup_mma(p_smem.index(buffer), v, o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(p_free.index(buffer), count=1)
            mbarrier.arrive(k_free.index(slot), count=1)
            count += 1
        mbarrier.wait(factor_ready, tile_phase)
        factor = factor_smem.load(ROW)
        mbarrier.arrive(factor_free, count=1)
        tile_phase ^= 1
        dead = factor == 0.0
        o = o * factor[:, None]
        if HAS_SINK:
            # A closed sink gives zeros whatever the accumulator holds.
            o = gl.where(dead[:, None], 0.0, o)
        row = token.to(gl.int64)
        head_start = (tile % HEAD_BLOCKS) * BLOCK_H
        padding = gl.where(token == num_tiles // HEAD_BLOCKS - 1, padding_rows, 0)
        left, right = _halves(o, 256)
        store_block(
            left,
            data_ptr + row * stride_data_token,
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
            HALF * 256,
            FULL_TILES,
            KIND,
            GROUP,
            F,
            CHUNK32,
            AMAX_FLOOR,
        )
        if HAS_ROPE and HALF == 1:
            right = _rotate_back_last_64(right, table_ptr, stride_table, angles, dead, HALF_PAIRING)
        store_block(
            right,
            data_ptr + row * stride_data_token,
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
            HALF * 256 + 128,
            FULL_TILES,
            KIND,
            GROUP,
            F,
            CHUNK32,
            AMAX_FLOOR,
        )
        slot = next_slot(slot)

"""The storing epilogue: float32 rows [BLOCK_H, WIDTH] into a buffer of any output format.

A program holds whole heads of one token, or WIDTH dimensions of them. Codes and scale bytes have
one writer each; the program of the buffer's last token also zeroes the padding of the scale columns
that it writes.
"""

import triton
import triton.language as tl

from mlacast.kernels.common.numbers import encode_e2m1, encode_e4m3, encode_ue8m0

# Kinds of output, the compile-time part of an OutFormat.
BF16 = tl.constexpr(0)
FP8_TENSOR = tl.constexpr(1)
FP8_FLOAT32 = tl.constexpr(2)
FP8_FLOAT32_POW2 = tl.constexpr(3)
FP8_UE8M0 = tl.constexpr(4)
NVFP4 = tl.constexpr(5)


@triton.jit
def _positions(heads, d, F: tl.constexpr, CHUNK32: tl.constexpr):
    """Group and position in the group of elements (head, d)."""
    if CHUNK32:
        heads_per_group = F // 512
        group = heads // heads_per_group + d * 0
        position = ((d // 32) * heads_per_group + heads % heads_per_group) * 32 + d % 32
    else:
        flat = heads * 512 + d
        group = flat // F
        position = flat % F
    return group, position


@triton.jit
def _store_scale(
    sf_ptr,
    stride_token,
    stride_group,
    stride_word,
    row,
    group,
    index,
    values,
    mask,
    padding_rows,
    AS_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Store one scale per (head, block); bytes go four to a word.

    Where SCALES, those of a group, do not fill its last word, the last one also zeroes the rest.
    """
    base = group.to(tl.int64) * stride_group
    if AS_BYTES:
        sf_ptr = sf_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        offsets = (base + (index // 4).to(tl.int64) * stride_word) * 4 + index % 4
        step = stride_token * 4
        zeros = (values * 0).to(tl.uint8)
        tl.store(sf_ptr + row * step + offsets, values.to(tl.uint8), mask=mask)
        for padding in range(padding_rows):
            tl.store(sf_ptr + (row + 1 + padding) * step + offsets, zeros, mask=mask)
        if SCALES % 4 != 0:
            last = mask & (index == SCALES - 1)
            for rest in tl.static_range(1, 5 - SCALES % 4):
                for padding in range(padding_rows + 1):
                    tl.store(sf_ptr + (row + padding) * step + offsets + rest, zeros, mask=last)
    else:
        offsets = base + index.to(tl.int64) * stride_word
        tl.store(sf_ptr + row * stride_token + offsets, values, mask=mask)
        for padding in range(padding_rows):
            zeros = tl.zeros(values.shape, tl.float32)
            tl.store(sf_ptr + (row + 1 + padding) * stride_token + offsets, zeros, mask=mask)


@triton.jit
def _swizzled_offset(row, column, column_tiles):
    """Byte of scale (row, column) in the 128x4 layout."""
    tile = (row // 128) * column_tiles + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


@triton.jit
def store_output(
    out,
    head_start,
    num_heads,
    row,
    data_ptr,
    stride_data_token,
    stride_data_group,
    sf_ptr,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    scale_ptr,
    absolute_row,
    padding_rows,
    first,
    BLOCK_H: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    F: tl.constexpr,
    CHUNK32: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    SF_COLUMN_TILES: tl.constexpr,
):
    """Quantise and store dimensions ``first``.. of heads ``head_start``.. of token ``row``.

    ``out`` is [BLOCK_H, WIDTH] float32, ``first`` a multiple of WIDTH; heads at or past
    ``num_heads`` are not stored. ``row``, an int64, counts in the token range, ``absolute_row`` in
    the whole buffer. ``padding_rows`` rows of scales after this one are zeroed: 0 except for the
    buffer's last token. GROUP elements share a
    scale, F features make an output group.
    """
    head = head_start + tl.arange(0, BLOCK_H)
    d = first + tl.arange(0, WIDTH)
    mask = (head < num_heads)[:, None] & (d >= 0)[None, :]
    group, position = _positions(head[:, None], d[None, :], F, CHUNK32)
    data = data_ptr + row * stride_data_token + group.to(tl.int64) * stride_data_group
    if KIND == BF16:
        tl.store(data + position, out.to(data_ptr.dtype.element_ty), mask=mask)
    elif KIND == FP8_TENSOR:
        inverse = tl.math.div_rn(1.0, tl.load(scale_ptr))
        tl.store(data + position, encode_e4m3(out * inverse).to(tl.uint8), mask=mask)
    else:
        blocks: tl.constexpr = WIDTH // GROUP
        grouped = tl.reshape(out, (BLOCK_H, blocks, GROUP))
        amax = tl.max(tl.abs(grouped), 2)
        # max drops a NaN; a group with one is all NaN.
        has_nan = tl.max((grouped != grouped).to(tl.int32), 2) != 0
        block = first // GROUP + tl.arange(0, blocks)
        scale_mask = (head < num_heads)[:, None] & (block >= 0)[None, :]
        scale_group, scale_position = _positions(head[:, None], block[None, :] * GROUP, F, CHUNK32)
        scale_index = scale_position // GROUP
        if KIND == NVFP4:
            global_scale = tl.load(scale_ptr)
            wanted = tl.minimum(global_scale * tl.math.div_rn(amax, 6.0), 448.0)
            sf = tl.where(has_nan, 0x7F, encode_e4m3(wanted))
            # The codes match the stored scale, so the multiplier comes from its decoded value.
            sf16 = (sf.to(tl.uint16) << 7).to(tl.float16, bitcast=True)
            decoded = sf16.to(tl.float32) * 256.0
            multiplier = tl.where(
                sf == 0, 0.0, tl.math.div_rn(global_scale, tl.where(sf == 0, 1.0, decoded))
            )
            codes = encode_e2m1(grouped * tl.expand_dims(multiplier, 2))
            dead = tl.expand_dims((sf == 0).to(tl.int32), 2) != 0
            codes = tl.where(dead, 0, codes)
            codes = tl.where(tl.expand_dims(has_nan.to(tl.int32), 2) != 0, 0x7, codes)
            low, high = tl.split(tl.reshape(codes, (BLOCK_H, WIDTH // 2, 2)))
            half = first // 2 + tl.arange(0, WIDTH // 2)
            pair_group, pair_position = _positions(head[:, None], 2 * half[None, :], F, CHUNK32)
            pairs = data_ptr + row * stride_data_token + pair_group.to(tl.int64) * stride_data_group
            pair_mask = (head < num_heads)[:, None] & (half >= 0)[None, :]
            tl.store(pairs + pair_position // 2, (low | (high << 4)).to(tl.uint8), mask=pair_mask)
            column = scale_group * (F // GROUP) + scale_index
            offsets = _swizzled_offset(absolute_row, column, SF_COLUMN_TILES)
            tl.store(sf_ptr + offsets, sf.to(tl.uint8), mask=scale_mask)
            for padding in range(padding_rows):
                offsets = _swizzled_offset(absolute_row + 1 + padding, column, SF_COLUMN_TILES)
                tl.store(sf_ptr + offsets, (sf * 0).to(tl.uint8), mask=scale_mask)
        else:
            floored = tl.maximum(amax, AMAX_FLOOR)
            if KIND == FP8_FLOAT32:
                floored = tl.minimum(floored, 3.4028234663852886e38)
                scale = tl.math.div_rn(floored, 448.0)
                stored = tl.where(has_nan, float("nan"), scale)
            else:
                # An infinite amax keeps its bits here and takes the largest exponent.
                exponent = encode_ue8m0(tl.math.div_rn(floored, 448.0))
                exponent = tl.where(has_nan, 254, exponent)
                scale = (exponent << 23).to(tl.float32, bitcast=True)
                stored = scale if KIND == FP8_FLOAT32_POW2 else exponent
            if KIND == FP8_FLOAT32:
                ratio = tl.math.div_rn(
                    grouped, tl.broadcast_to(tl.expand_dims(scale, 2), grouped.shape)
                )
            else:
                # Dividing by a power of two is exact as a product; 2**-127 is a subnormal.
                inverse_bits = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23)
                ratio = grouped * tl.expand_dims(inverse_bits.to(tl.float32, bitcast=True), 2)
            codes = encode_e4m3(ratio)
            codes = tl.where(tl.expand_dims(has_nan.to(tl.int32), 2) != 0, 0x7F, codes)
            codes = tl.reshape(codes, (BLOCK_H, WIDTH))
            tl.store(data + position, codes.to(tl.uint8), mask=mask)
            _store_scale(
                sf_ptr,
                stride_sf_token,
                stride_sf_group,
                stride_sf_word,
                row,
                scale_group,
                scale_index,
                stored,
                scale_mask,
                padding_rows,
                KIND == FP8_UE8M0,
                F // GROUP,
            )

"""The storing epilogue: float32 rows [ROWS, WIDTH] into a buffer of any output format.

A row holds dimensions of one head of one token; a program holds heads of a token, tokens of a head,
or both. Codes and scale bytes have one writer each; the programs of the buffer's last token also
zero the padding of the scale columns that they write.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mlacast.kernels.common.e2m1_casts import cast_to_e2m1_pairs
from mlacast.kernels.common.fp8_casts import cast_from_e4m3, cast_to_fp8
from mlacast.kernels.common.numbers import encode_e2m1_numbers, encode_e4m3, encode_ue8m0

# Kinds of output, the compile-time part of an OutFormat.
BF16 = tl.constexpr(0)
FP8_TENSOR = tl.constexpr(1)
FP8_FLOAT32 = tl.constexpr(2)
FP8_FLOAT32_POW2 = tl.constexpr(3)
FP8_UE8M0 = tl.constexpr(4)
NVFP4 = tl.constexpr(5)


class Target(NamedTuple):
    """Where a token range lies: tensors, strides in elements, and its place in the buffer.

    Attributes:
        data_ptr: Codes.
        sf_ptr: Scales.
        scale_ptr: One scale of the whole tensor.
        stride_data_token: Between tokens.
        stride_data_group: Between groups.
        stride_sf_token: Between tokens.
        stride_sf_group: Between groups.
        stride_sf_word: Between words of a group.
        row_start: Its first row in the buffer.
    """

    data_ptr: Any
    sf_ptr: Any
    scale_ptr: Any
    stride_data_token: Any
    stride_data_group: Any
    stride_sf_token: Any
    stride_sf_group: Any
    stride_sf_word: Any
    row_start: Any


class Padding(NamedTuple):
    """Rows of scales that a program zeroes.

    Attributes:
        start: The first, counted in the range.
        rows: How many: 0 except where the program holds the buffer's last token.
        lane: Which of the rows zeroed at a time each row of the program takes, or one number.
        mask: Rows of the program that have a head.
    """

    start: Any
    rows: Any
    lane: Any
    mask: Any


@triton.jit
def _find_positions(heads, d, F: tl.constexpr, CHUNK32: tl.constexpr, D: tl.constexpr):
    """Group and position in the group of dimensions ``d`` of heads that are D wide.

    Heads are a number or [ROWS, 1], dimensions [1, n]: the results are [1, n] or [ROWS, n].
    """
    if CHUNK32:
        heads_per_group = F // 512
        if D != 512:
            # The order is one of heads of 512, whatever the width of those here.
            flat = heads * D + d
            heads = flat // 512
            d = flat % 512
        group = heads // heads_per_group + d * 0
        position = ((d // 32) * heads_per_group + heads % heads_per_group) * 32 + d % 32
    else:
        flat = heads * D + d
        group = flat // F
        position = flat % F
    return group, position


@triton.jit
def _find_group(target, row, group):
    """First code of a group of a row; both of any shapes that go together."""
    offset = row * target.stride_data_token + group.to(tl.int64) * target.stride_data_group
    return target.data_ptr + offset


@triton.jit
def _find_swizzled_offset(row, column, column_tiles):
    """Byte of scale (row, column) in the 128x4 layout; ``row`` is an int64, shapes go together."""
    tile = (row // 128) * column_tiles + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


@triton.jit
def _store_scales(target, row, group, index, values, mask, OUTPUT: tl.constexpr):
    """Store one scale per (row, block): scale ``index`` of the group; of the token for NVFP4.

    ``values`` are [ROWS, blocks]. Packed bytes go four to a word. Where those of a group do not
    fill its last word, the last one also zeroes the rest.
    """
    SCALES: tl.constexpr = OUTPUT.features // OUTPUT.group
    sf_ptr = target.sf_ptr
    if OUTPUT.kind == NVFP4:
        offsets = _find_swizzled_offset(target.row_start + row, index, OUTPUT.sf_column_tiles)
        tl.store(sf_ptr + offsets, values.to(tl.uint8), mask=mask)
    elif OUTPUT.kind == FP8_UE8M0:
        sf_ptr = sf_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        word = group.to(tl.int64) * target.stride_sf_group
        word += (index // 4).to(tl.int64) * target.stride_sf_word
        offsets = (row * target.stride_sf_token + word) * 4 + index % 4
        tl.store(sf_ptr + offsets, values.to(tl.uint8), mask=mask)
        if SCALES % 4 != 0:
            last = mask & (index == SCALES - 1)
            for rest in tl.static_range(1, 5 - SCALES % 4):
                tl.store(sf_ptr + offsets + rest, (values * 0).to(tl.uint8), mask=last)
    else:
        offsets = group.to(tl.int64) * target.stride_sf_group
        offsets += index.to(tl.int64) * target.stride_sf_word
        tl.store(sf_ptr + (row * target.stride_sf_token + offsets), values, mask=mask)


@triton.jit
def _choose_larger_or_nan(a, b):
    """The larger of two, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _find_largest(grouped, NATIVE: tl.constexpr):
    """Largest magnitude [ROWS, blocks] of ``grouped`` [ROWS, blocks, GROUP], and where it is NaN.

    There the magnitude may be any. By maxima of float32 alone: those of integers came out as zero
    where the numbers are those of a matrix product (triton 3.6.0, sm_90).
    """
    if NATIVE:
        amax = tl.reduce(tl.abs(grouped), 2, _choose_larger_or_nan)
        return amax, amax != amax
    else:
        is_nan = grouped != grouped
        amax = tl.max(tl.where(is_nan, 0.0, tl.abs(grouped)), 2)
        return amax, tl.max(tl.where(is_nan, 1.0, 0.0), 2) != 0.0


@triton.jit
def _encode_nvfp4(out, global_scale, NATIVE: tl.constexpr):
    """Bytes of two e2m1 codes [ROWS, WIDTH / 2] of ``out`` [ROWS, WIDTH], and scales (uint8).

    One scale byte for 16 elements, [ROWS, WIDTH / 16]. A block under the scale 0 has codes 0, one
    with a NaN has codes 7.
    """
    ROWS: tl.constexpr = out.shape[0]
    WIDTH: tl.constexpr = out.shape[1]
    grouped = tl.reshape(out, (ROWS, WIDTH // 16, 16))  # [ROWS, blocks, 16]
    amax, has_nan = _find_largest(grouped, NATIVE)  # [ROWS, blocks]
    wanted = tl.minimum(global_scale * tl.math.div_rn(amax, 6.0), 448.0)  # [ROWS, blocks]
    # The codes match the stored scale, so the multiplier comes from its decoded value.
    if NATIVE:
        # [ROWS, blocks]
        sf = tl.where(has_nan, 0x7F, cast_to_fp8(wanted, False, NATIVE)).to(tl.uint8)
        counts = (sf != 0) & (has_nan == 0)
        decoded = cast_from_e4m3(tl.where(counts, sf, 0x38).to(tl.uint8), NATIVE)
        multiplier = tl.math.div_rn(global_scale, decoded)  # [ROWS, blocks]
        multiplier = tl.where(counts, multiplier, tl.where(has_nan, float("nan"), 0.0))
        kept = tl.where(counts, -0x80000000, 0)
        low, high = tl.split(tl.reshape(out, (ROWS, WIDTH // 16, 8, 2)))  # [ROWS, blocks, 8]
        factor = tl.broadcast_to(tl.expand_dims(multiplier, 2), low.shape)
        kept = tl.broadcast_to(tl.expand_dims(kept, 2), low.shape)
        pairs = cast_to_e2m1_pairs(low, high, factor, kept)
        return tl.reshape(pairs, (ROWS, WIDTH // 2)), sf
    else:
        sf = tl.where(has_nan, 0x7F, encode_e4m3(wanted))  # [ROWS, blocks]
        sf16 = (sf.to(tl.uint16) << 7).to(tl.float16, bitcast=True)
        decoded = sf16.to(tl.float32) * 256.0
        multiplier = tl.where(
            sf == 0, 0.0, tl.math.div_rn(global_scale, tl.where(sf == 0, 1.0, decoded))
        )  # [ROWS, blocks]
        codes = encode_e2m1_numbers(grouped * tl.expand_dims(multiplier, 2))  # [ROWS, blocks, 16]
        kept = tl.expand_dims(tl.where(has_nan | (sf == 0), 0, 0xF), 2)
        codes = (codes & kept) | tl.expand_dims(tl.where(has_nan, 0x7, 0), 2)
        low, high = tl.split(tl.reshape(codes, (ROWS, WIDTH // 2, 2)))
        return (low | (high << 4)).to(tl.uint8), sf


@triton.jit
def _divide(x, divisor, NATIVE: tl.constexpr):
    """IEEE quotients of ``x`` [ROWS, blocks, GROUP] and positive ``divisor`` [ROWS, blocks]."""
    if NATIVE:
        # A product with the reciprocal, corrected once by its exact remainder, is the quotient
        # unless that is subnormal, and then its code is 0. Infinity becomes the largest number.
        # [ROWS, blocks, GROUP]
        inverse = tl.broadcast_to(tl.expand_dims(tl.math.div_rn(1.0, divisor), 2), x.shape)
        x = tl.minimum(tl.maximum(x, -3.4028234663852886e38), 3.4028234663852886e38)
        quotient = x * inverse
        divisor = tl.broadcast_to(tl.expand_dims(divisor, 2), x.shape)
        # Negated twice, the remainder keeps the sign of a zero; -x would be 0 - x.
        opposite = tl.fma(quotient, divisor, x * -1.0)
        return tl.fma(opposite * -1.0, inverse, quotient)
    else:
        return tl.math.div_rn(x, tl.broadcast_to(tl.expand_dims(divisor, 2), x.shape))


@triton.jit
def _encode_fp8(grouped, KIND: tl.constexpr, AMAX_FLOOR: tl.constexpr, NATIVE: tl.constexpr):
    """e4m3 codes (uint8) like ``grouped`` [ROWS, blocks, GROUP] and scales [ROWS, blocks].

    The scales are float32, or exponents (int32) for packed bytes.
    """
    amax, has_nan = _find_largest(grouped, NATIVE)  # [ROWS, blocks]
    floored = tl.maximum(amax, AMAX_FLOOR)  # [ROWS, blocks]
    if KIND == FP8_FLOAT32:
        floored = tl.minimum(floored, 3.4028234663852886e38)
        scale = tl.math.div_rn(floored, 448.0)
        stored = tl.where(has_nan, float("nan"), scale)  # [ROWS, blocks]
        ratio = _divide(grouped, scale, NATIVE)
    else:
        # An infinite amax keeps its bits here and takes the largest exponent.
        exponent = encode_ue8m0(tl.math.div_rn(floored, 448.0))  # [ROWS, blocks]
        exponent = tl.where(has_nan, 254, exponent)
        stored = exponent
        if KIND == FP8_FLOAT32_POW2:
            stored = (exponent << 23).to(tl.float32, bitcast=True)
        # Dividing by a power of two is exact as a product; 2**-127 is a subnormal.
        inverse_bits = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23)  # [ROWS, blocks]
        ratio = grouped * tl.expand_dims(inverse_bits.to(tl.float32, bitcast=True), 2)
    codes = cast_to_fp8(ratio, False, NATIVE)
    return tl.where(tl.expand_dims(has_nan.to(tl.int32), 2) != 0, 0x7F, codes).to(tl.uint8), stored


@triton.constexpr_function
def packs_products(OUTPUT):
    """Whether the sums of a matrix product may be stored as others are, with NATIVE.

    Not as Nvfp4: on an H200 those of ``v_up_project`` came out as zeros (triton 3.6.0), where
    states that were loaded, in ``merge_attention_states``, did not. The arithmetic for all devices
    is right.
    """
    return OUTPUT.kind != NVFP4.value


@triton.jit
def store_rows(
    out,
    head,
    row,
    mask,
    first,
    target,
    padding,
    D: tl.constexpr,
    OUTPUT: tl.constexpr,
    FEATURES: tl.constexpr,
    PADDING_LANES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantise and store dimensions ``first``.. of heads that are D wide.

    ``out`` is [ROWS, WIDTH] float32, ``first`` a multiple of WIDTH; ``mask`` [ROWS, 1] says which
    rows to store. Their ``head`` and ``row``, the token in the range, an int64, are numbers or
    [ROWS, 1]. ``target`` is a `Target`, OUTPUT its compile-time part. FEATURES are those of a token
    where they end inside a row, else 0. NATIVE as in ``fp8_casts``.

    ``padding``, a `Padding`, is zeroed PADDING_LANES rows at a time; its lane and mask are numbers
    or [ROWS, 1].
    """
    ROWS: tl.constexpr = out.shape[0]
    WIDTH: tl.constexpr = out.shape[1]
    KIND: tl.constexpr = OUTPUT.kind
    GROUP: tl.constexpr = OUTPUT.group
    F: tl.constexpr = OUTPUT.features
    d = first + tl.arange(0, WIDTH)[None, :]  # [1, WIDTH]
    # [1, WIDTH] or, where heads differ, [ROWS, WIDTH], and so are group and position.
    columns = head * D + d < FEATURES if FEATURES else d >= 0
    group, position = _find_positions(head, d, F, OUTPUT.chunk32, D)
    data = _find_group(target, row, group)  # [ROWS, WIDTH]
    if KIND == BF16:
        dtype: tl.constexpr = target.data_ptr.dtype.element_ty
        tl.store(data + position, out.to(dtype), mask=mask & columns)
    elif KIND == FP8_TENSOR:
        inverse = tl.math.div_rn(1.0, tl.load(target.scale_ptr))
        tl.store(data + position, cast_to_fp8(out * inverse, False, NATIVE), mask=mask & columns)
    else:
        BLOCKS: tl.constexpr = WIDTH // GROUP
        if KIND == NVFP4:
            pairs, scales = _encode_nvfp4(out, tl.load(target.scale_ptr), NATIVE)
            # Bytes of two codes are numbered like the codes of heads half as wide.
            d = first // 2 + tl.arange(0, WIDTH // 2)[None, :]  # [1, WIDTH / 2]
            columns = head * (D // 2) + d < FEATURES // 2 if FEATURES else d >= 0
            group, position = _find_positions(head, d, F // 2, False, D // 2)
            data = _find_group(target, row, group)
            tl.store(data + position, pairs, mask=mask & columns)
        else:
            grouped = tl.reshape(out, (ROWS, BLOCKS, GROUP))  # [ROWS, BLOCKS, GROUP]
            codes, scales = _encode_fp8(grouped, KIND, OUTPUT.amax_floor, NATIVE)
            tl.store(data + position, tl.reshape(codes, (ROWS, WIDTH)), mask=mask & columns)
        block = first // GROUP + tl.arange(0, BLOCKS)[None, :]  # [1, BLOCKS]
        has_scale = block >= 0
        if FEATURES:
            # Columns that pad the swizzled layout hold the scales of nothing, which are zero.
            limit: tl.constexpr = OUTPUT.sf_column_tiles * 4 if KIND == NVFP4 else FEATURES // GROUP
            has_scale = head * (D // GROUP) + block < limit
        if KIND == NVFP4:
            # Columns of a token follow each other, and those of the padding them.
            scale_group = 0
            index = head * (D // GROUP) + block
        else:
            scale_group, scale_position = _find_positions(head, block * GROUP, F, OUTPUT.chunk32, D)
            index = scale_position // GROUP
        _store_scales(target, row, scale_group, index, scales, mask & has_scale, OUTPUT)
        for first_row in range(0, padding.rows, PADDING_LANES):
            lane = first_row + padding.lane
            _store_scales(
                target,
                padding.start + lane,
                scale_group,
                index,
                tl.zeros_like(scales),
                padding.mask & (lane < padding.rows) & has_scale,
                OUTPUT,
            )


@triton.jit
def store_output(
    out, head_start, num_heads, row, padding_rows, target, first, OUTPUT: tl.constexpr
):
    """Quantise and store dimensions ``first``.. of heads ``head_start``.. of token ``row``.

    ``out`` is [BLOCK_H, WIDTH] float32, ``first`` a multiple of WIDTH; heads are 512 wide, those at
    or past ``num_heads`` are not stored. ``row``, an int64, counts in the token range.
    ``padding_rows`` rows of scales after this one are zeroed: 0 except for the buffer's last token.
    ``target`` is a `Target`, OUTPUT its compile-time part.
    """
    head = head_start + tl.arange(0, out.shape[0])[:, None]  # [BLOCK_H, 1]
    in_range = head < num_heads
    padding = Padding(row + 1, padding_rows, 0, in_range)
    store_rows(out, head, row, in_range, first, target, padding, 512, OUTPUT, 0, 1, False)

"""Storing epilogue of Hopper kernels whose rows have a factor: accumulators to the buffers.

Same formats and bits as ``mlacast.kernels.common.store`` of the normalised output. Codes leave from
registers: staging them in the ring would hold a slot back, and with it the next tile's first keys.

What is the same for all of a quad is dealt out to its lanes: the next tile's products wait for
every instruction here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_division import (
    DIVISION_OPERANDS,
    division_program,
    normal_reciprocal,
    over_448,
    reciprocal,
)
from mlacast.kernels.common.sm90_nvfp4 import store_scale_bytes, to_nvfp4
from mlacast.kernels.common.sm90_pack import pack_bf16, pack_e4m3
from mlacast.kernels.common.sm90_quads import deal_max, max_of_neighbours, max_or_nan, undeal
from mlacast.kernels.common.sm90_rotation import aligned_offset, opaque, opaque_rows
from mlacast.kernels.common.sm90_store import (
    BF16,
    FLOAT32_MAX,
    FP8_FLOAT32,
    FP8_FLOAT32_POW2,
    FP8_TENSOR,
    FP8_UE8M0,
    NVFP4,
)

BLOCK_H = gl.constexpr(64)


@gluon.jit
def _paired(x, GROUP: gl.constexpr):
    """View [64, 128] as [64, groups, steps of 8, lane, 2]; groups of 64 as two of 32 each."""
    WIDTH: gl.constexpr = 32 if GROUP == 64 else GROUP
    return gl.reshape(x, (BLOCK_H, 128 // WIDTH, WIDTH // 8, 4, 2))


@gluon.jit
def _group_max(pairs, GROUP: gl.constexpr):
    """Largest magnitudes: [64, 1] of groups of 128, in all lanes of a quad.

    Of smaller groups [64, 4], dealt to the lanes: the n-th of 32 is in lane n, the n-th of 64 in
    lanes 2n and 2n + 1.
    """
    by_lane = gl.reduce(gl.reduce(gl.abs(pairs), 4, max_or_nan), 2, max_or_nan)
    if GROUP == 128:
        return gl.reduce(by_lane, 2, max_or_nan)
    else:
        dealt = deal_max(by_lane)
        return max_of_neighbours(dealt) if GROUP == 64 else dealt


@gluon.jit
def _spread(value, pairs, GROUP: gl.constexpr):
    """Repeat a number per head and group, placed as by ``_group_max``, over ``_paired`` columns."""
    BY_LANE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, pairs.type.layout))
    if GROUP == 128:
        of_groups = gl.convert_layout(value, gl.SliceLayout(2, BY_LANE), assert_trivial=True)
        of_lanes = gl.expand_dims(of_groups, 2)
    else:
        of_lanes = gl.convert_layout(undeal(value), BY_LANE, assert_trivial=True)
    wide = gl.expand_dims(gl.expand_dims(of_lanes, 2), 4)
    return gl.broadcast(wide, pairs)[0]


@gluon.jit
def _store_rows(
    values,
    data_ptr,
    stride_group,
    head_start,
    num_heads,
    FIRST: gl.constexpr,
    OUTPUT: gl.constexpr,
    FULL_TILES: gl.constexpr,
    PER_VALUE: gl.constexpr,
):
    """Store values of ``PER_VALUE`` dimensions each, from ``FIRST`` on, into the token's row.

    Codes leave as words of four bytes.
    """
    WORD: gl.constexpr = 1 if PER_VALUE == 1 else 4
    if WORD == 4:
        data_ptr = data_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    LAYOUT: gl.constexpr = values.type.layout
    COLUMNS: gl.constexpr = 128 // PER_VALUE
    HEADS: gl.constexpr = OUTPUT.features // 512
    CHUNK: gl.constexpr = 32 // PER_VALUE
    HEAD_STEP: gl.constexpr = CHUNK if OUTPUT.chunk32 else 512 // PER_VALUE
    head = head_start + opaque_rows(gl.SliceLayout(1, LAYOUT))
    column = FIRST // PER_VALUE + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    if OUTPUT.chunk32:
        column = (column // CHUNK) * (HEADS * CHUNK) + column % CHUNK
    rows = aligned_offset(head // HEADS, stride_group // WORD) + (head % HEADS) * HEAD_STEP
    pointers = data_ptr + rows[:, None] + column[None, :]
    if FULL_TILES:
        gl.store(pointers, values)
    else:
        gl.store(pointers, values, mask=(head < num_heads)[:, None])


@gluon.jit
def _store_scales(
    scales,
    sf_ptr,
    stride_token,
    stride_group,
    stride_word,
    row,
    head_start,
    num_heads,
    FIRST: gl.constexpr,
    FULL_TILES: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Store scales [64, n] of heads and blocks; those of blocks of 64 come, and leave, twice."""
    GROUP: gl.constexpr = OUTPUT.group
    HEADS: gl.constexpr = OUTPUT.features // 512
    LAYOUT: gl.constexpr = scales.type.layout
    COPIES: gl.constexpr = 2 if GROUP == 64 else 1
    head = head_start + opaque_rows(gl.SliceLayout(1, LAYOUT))
    place = opaque(gl.arange(0, scales.shape[1], gl.SliceLayout(0, LAYOUT)))
    block = FIRST // GROUP + place // COPIES
    within = head % HEADS
    group = (head // HEADS).to(gl.int64) * stride_group
    if OUTPUT.kind == FP8_UE8M0:
        # Scale ``index`` of a group is byte index % 4 of word index // 4.
        if not OUTPUT.chunk32:
            in_row = (group + within * (128 // GROUP) * stride_word) * 4
            in_column = (block // 4) * stride_word * 4 + block % 4
            offsets = in_row[:, None] + in_column[None, :]
        elif HEADS % 4 == 0:
            in_row = (group + (within // 4) * stride_word) * 4 + within % 4
            in_column = block * (HEADS // 4) * stride_word * 4
            offsets = in_row[:, None] + in_column[None, :]
        else:
            index = (block * HEADS)[None, :] + within[:, None]
            offsets = (group[:, None] + (index // 4) * stride_word) * 4 + index % 4
        pointers = sf_ptr.to(gl.pointer_type(gl.uint8), bitcast=True) + row * stride_token * 4
        stored = scales.to(gl.uint8)
    else:
        if OUTPUT.chunk32:
            offsets = (group + within * stride_word)[:, None]
            offsets += (block * HEADS * stride_word)[None, :]
        else:
            offsets = (group + within * (512 // GROUP) * stride_word)[:, None]
            offsets += (block * stride_word)[None, :]
        pointers = sf_ptr + row * stride_token
        stored = scales
    if FULL_TILES:
        gl.store(pointers + offsets, stored)
    else:
        gl.store(pointers + offsets, stored, mask=(head < num_heads)[:, None])


@gluon.jit
def _in_place(value, pairs):
    """Dealt numbers [64, 4] beside all ``_paired`` columns of the lane that has them."""
    LANES: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, pairs.type.layout))
    lanes = gl.convert_layout(value, gl.SliceLayout(1, LANES), assert_trivial=True)
    wide = gl.expand_dims(gl.expand_dims(gl.expand_dims(lanes, 1), 2), 4)
    return gl.broadcast(wide, pairs)[0]


@gluon.jit
def _divide(pairs, divisor, GROUP: gl.constexpr):
    """IEEE quotients: a reciprocal per group, and one correction per element.

    One element after the other, so that intermediate results do not fill the registers.
    """
    reciprocal = normal_reciprocal(divisor)
    if GROUP == 128:
        divisors = _spread(divisor, pairs, GROUP)
        reciprocals = _spread(reciprocal, pairs, GROUP)
    else:
        divisors = _in_place(divisor, pairs)
        reciprocals = _in_place(reciprocal, pairs)
    return gl.inline_asm_elementwise(
        division_program(GROUP),
        DIVISION_OPERANDS,
        [pairs, divisors, reciprocals],
        dtype=gl.float32,
        is_pure=False,
        pack=64,
    )


@gluon.jit
def group_scales(
    x,
    factor,
    alive,
    MASKED: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Scales of the groups of ``x * factor`` [64, 128].

    A group with a NaN has only NaN codes; an infinity takes the largest scale.

    Returns:
        what ``over_scales`` makes ``x * factor`` over scales from, columns and numbers of groups;
        and the scales as they are stored, placed as by ``_group_max``.
    """
    if OUTPUT.kind == FP8_FLOAT32:
        x = (
            x
            * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout), assert_trivial=True)[
                :, None
            ]
        )
    pairs = _paired(x, OUTPUT.group)
    amax = _group_max(pairs, OUTPUT.group)
    ROW: gl.constexpr = gl.SliceLayout(1, amax.type.layout)
    per_head = gl.convert_layout(factor, ROW, assert_trivial=True)[:, None]
    if OUTPUT.kind != FP8_FLOAT32:
        # Rounding keeps order, so this is the amax of the products.
        amax = amax * gl.abs(per_head)
    if MASKED:
        is_alive = gl.convert_layout(alive, ROW, assert_trivial=True)[:, None] != 0
        amax = gl.where(gl.broadcast(is_alive, amax)[0], amax, 0.0)
    has_nan = amax != amax
    floored = gl.maximum(amax, OUTPUT.amax_floor)
    if OUTPUT.kind == FP8_FLOAT32:
        scale = over_448(gl.minimum(floored, FLOAT32_MAX))
        scale = gl.where(has_nan, float("nan"), scale)
        stored = scale
    else:
        # The smallest power of two not below amax / 448: 448 is 1.75 * 2**8, so the exponent moves
        # up exactly where the mantissa exceeds 1.75.
        bits = floored.to(gl.int32, bitcast=True)
        exponent = gl.where(bits >= 0x7F800000, 254, ((bits + 0x1FFFFF) >> 23) - 8)
        exponent = gl.where(has_nan, 254, exponent)
        # Dividing by a power of two is exact as a product; 2**-127 is a subnormal.
        inverse = gl.where(exponent == 254, 0x400000, (254 - exponent) << 23)
        inverse = gl.where(has_nan, 0x7FC00000, inverse).to(gl.float32, bitcast=True)
        scale = inverse * per_head
        stored = exponent
        if OUTPUT.kind == FP8_FLOAT32_POW2:
            stored = (exponent << 23).to(gl.float32, bitcast=True)
    return pairs, scale, stored


@gluon.jit
def over_scales(pairs, scale, OUTPUT: gl.constexpr):
    """Numbers [64, 128] to be rounded to codes, from what ``group_scales`` returns."""
    if OUTPUT.kind == FP8_FLOAT32:
        ratio = _divide(pairs, scale, OUTPUT.group)
    else:
        ratio = pairs * _spread(scale, pairs, OUTPUT.group)
    return gl.reshape(ratio, (BLOCK_H, 128))


@gluon.jit
def store_scaled_block(
    x,
    factor,
    alive,
    data_ptr,
    stride_data_group,
    sf_ptr,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    scale_ptr,
    row,
    padding_rows,
    head_start,
    num_heads,
    FIRST: gl.constexpr,
    FULL_TILES: gl.constexpr,
    MASKED: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Quantise and store dimensions ``FIRST``.. of 64 heads of one token: ``x * factor``.

    ``x`` is [64, 128] float32, ``factor`` float32 [64]. With ``MASKED``, rows where ``alive``
    (int32 [64], all ones or zero) is zero are stored as zeros whatever they hold.
    ``data_ptr`` is the token's row of codes, ``row`` (int64) that of its scales. ``padding_rows``
    of scales after it are zeroed: 0 except for the buffer's last token. Of NVFP4, whose scales have
    no strides, ``stride_sf_word`` is the range's first row. OUTPUT is an `OutputConfig`.
    """
    COLUMN: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    if OUTPUT.kind == BF16:
        per_head = gl.convert_layout(factor, COLUMN, assert_trivial=True)[:, None]
        _store_rows(
            pack_bf16(x * per_head, alive, MASKED),
            data_ptr,
            stride_data_group,
            head_start,
            num_heads,
            FIRST,
            OUTPUT,
            FULL_TILES,
            1,
        )
    elif OUTPUT.kind == NVFP4:
        per_head = gl.convert_layout(factor, COLUMN, assert_trivial=True)[:, None]
        words, left, right = to_nvfp4(x * per_head, alive, gl.load(scale_ptr), MASKED)
        _store_rows(
            words,
            data_ptr,
            stride_data_group,
            head_start,
            num_heads,
            FIRST,
            OUTPUT,
            FULL_TILES,
            8,
        )
        for part in gl.static_range(2):
            store_scale_bytes(
                left if part == 0 else right,
                head_start + opaque_rows(gl.SliceLayout(1, left.type.layout)),
                sf_ptr,
                stride_sf_word + row,
                padding_rows,
                num_heads,
                FIRST + part * 64,
                FULL_TILES,
            )
    else:
        if OUTPUT.kind == FP8_TENSOR:
            per_head = gl.convert_layout(factor, COLUMN, assert_trivial=True)[:, None]
            ratio = x * per_head * reciprocal(gl.load(scale_ptr))
        else:
            pairs, scale, scales = group_scales(x, factor, alive, MASKED, OUTPUT)
            _store_scales(
                scales,
                sf_ptr,
                stride_sf_token,
                stride_sf_group,
                stride_sf_word,
                row,
                head_start,
                num_heads,
                FIRST,
                FULL_TILES,
                OUTPUT,
            )
            ratio = over_scales(pairs, scale, OUTPUT)
        _store_rows(
            pack_e4m3(ratio, alive, MASKED),
            data_ptr,
            stride_data_group,
            head_start,
            num_heads,
            FIRST,
            OUTPUT,
            FULL_TILES,
            4,
        )
        if OUTPUT.kind != FP8_TENSOR:
            # Last, where the registers of the block are free.
            for padding in range(padding_rows):
                _store_scales(
                    gl.zeros_like(scales),
                    sf_ptr,
                    stride_sf_token,
                    stride_sf_group,
                    stride_sf_word,
                    row + 1 + padding,
                    head_start,
                    num_heads,
                    FIRST,
                    FULL_TILES,
                    OUTPUT,
                )

"""Storing epilogue of Hopper kernels whose rows have a factor: accumulators to the buffers.

Same formats and bits as ``mlacast.kernels.common.store`` of the normalised output. Codes leave from
registers: staging them in the ring would hold a slot back, and with it the next tile's first keys.

A thread of an accumulator [64, 128] holds the column pairs ``8 * j + 2 * lane`` of two rows, where
``lane`` is its number in a quad. What is the same for all of a quad is dealt out to its lanes: the
next tile's products wait for every instruction here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_rotation import opaque
from mlacast.kernels.common.sm90_store import (
    BF16,
    FLOAT32_MAX,
    FP8_FLOAT32,
    FP8_FLOAT32_POW2,
    FP8_TENSOR,
    FP8_UE8M0,
    _max_or_nan,
    _to_rows,
)

BLOCK_H = gl.constexpr(64)

# $2..$9: the thread's pairs j = 0..3; $10 and $12: how this lane picks and sorts; $14: its lane.
# Pairs become codes and change places in the quad, so that lane j leaves with the 8 codes of j.
_PACK_E4M3 = gl.constexpr("""{
.reg .b16 pair0, pair1, pair2, pair3;
.reg .b32 low, high, keep, send, got, own, other, rest, flipped;
.reg .pred upper;
cvt.rn.satfinite.e4m3x2.f32 pair0, $3, $2;
cvt.rn.satfinite.e4m3x2.f32 pair1, $5, $4;
cvt.rn.satfinite.e4m3x2.f32 pair2, $7, $6;
cvt.rn.satfinite.e4m3x2.f32 pair3, $9, $8;
mov.b32 low, {pair0, pair1};
mov.b32 high, {pair2, pair3};
setp.gt.s32 upper, $14, 1;
selp.b32 keep, high, low, upper;
selp.b32 send, low, high, upper;
shfl.sync.bfly.b32 got, send, 2, 0x1f, 0xffffffff;
xor.b32 flipped, $10, 0x2222;
prmt.b32 own, keep, got, $10;
prmt.b32 other, keep, got, flipped;
shfl.sync.bfly.b32 rest, other, 1, 0x1f, 0xffffffff;
xor.b32 flipped, $12, 0x2222;
prmt.b32 $0, own, rest, $12;
prmt.b32 $1, own, rest, flipped;
}""")

# $0 = $1 / $2, where $3 is 1 / $2. An infinite $1 counts as the largest number. The remainder is
# negated twice because that keeps the sign of a zero.
_DIVIDE = gl.constexpr("""{
.reg .f32 finite, rest;
max.f32 finite, $1, 0fFF7FFFFF;
min.f32 finite, finite, 0f7F7FFFFF;
mul.rn.f32 $0, finite, $3;
neg.f32 rest, finite;
fma.rn.f32 rest, $0, $2, rest;
neg.f32 rest, rest;
fma.rn.f32 $0, rest, $3, $0;
}""")


@gluon.jit
def _from_lane(x, LANE: gl.constexpr):
    """Value of lane ``LANE`` of every quad."""
    return gl.inline_asm_elementwise(
        f"shfl.sync.idx.b32 $0, $1, {LANE}, 0x1c1f, 0xffffffff;",
        "=r,r",
        [x],
        dtype=x.dtype,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _from_partner(x, DISTANCE: gl.constexpr):
    """Value of the lane whose number differs by ``DISTANCE``, 1 or 2, in its quad."""
    return gl.inline_asm_elementwise(
        f"shfl.sync.bfly.b32 $0, $1, {DISTANCE}, 0x1f, 0xffffffff;",
        "=r,r",
        [x],
        dtype=x.dtype,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _deal_max(x):
    """Maxima over the lanes of [64, 4, lane]: [64, 4], the n-th of a row in lane n of its quad."""
    low, high = gl.split(gl.permute(gl.reshape(x, (BLOCK_H, 2, 2, 4)), (0, 2, 3, 1)))
    lane = opaque(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, low.type.layout))))
    upper = gl.broadcast((lane >= 2)[None, None, :], low)[0]
    other = _from_partner(gl.where(upper, low, high), 2)
    half = _max_or_nan(gl.where(upper, high, low), other)
    low, high = gl.split(gl.permute(half, (0, 2, 1)))
    lane = opaque(gl.arange(0, 4, gl.SliceLayout(0, low.type.layout)))
    odd = gl.broadcast(((lane & 1) == 1)[None, :], low)[0]
    other = _from_partner(gl.where(odd, low, high), 1)
    return _max_or_nan(gl.where(odd, high, low), other)


@gluon.jit
def _paired(x, GROUP: gl.constexpr):
    """View [64, 128] as [64, groups, steps of 8, lane, 2]."""
    return gl.reshape(x, (BLOCK_H, 128 // GROUP, GROUP // 8, 4, 2))


@gluon.jit
def _group_max(pairs, GROUP: gl.constexpr):
    """Largest magnitudes [64, 128 / GROUP]; with 4 groups, the n-th is in lane n of its quad."""
    by_lane = gl.reduce(gl.reduce(gl.abs(pairs), 4, _max_or_nan), 2, _max_or_nan)
    return _deal_max(by_lane) if GROUP == 32 else gl.reduce(by_lane, 2, _max_or_nan)


@gluon.jit
def _spread(value, pairs, GROUP: gl.constexpr):
    """Repeat a number per head and group, placed as by ``_group_max``, over ``_paired`` columns."""
    BY_LANE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, pairs.type.layout))
    if GROUP == 32:
        even = gl.join(_from_lane(value, 0), _from_lane(value, 2))
        odd = gl.join(_from_lane(value, 1), _from_lane(value, 3))
        of_lanes = gl.reshape(gl.permute(gl.join(even, odd), (0, 2, 3, 1)), (BLOCK_H, 4, 4))
        of_lanes = gl.convert_layout(of_lanes, BY_LANE, assert_trivial=True)
    else:
        of_groups = gl.convert_layout(value, gl.SliceLayout(2, BY_LANE), assert_trivial=True)
        of_lanes = gl.expand_dims(of_groups, 2)
    wide = gl.expand_dims(gl.expand_dims(of_lanes, 2), 4)
    return gl.broadcast(wide, pairs)[0]


@gluon.jit
def _pack_e4m3(x, alive, MASKED: gl.constexpr):
    """Codes of [64, 128] as words of 4 [64, 32], 8 neighbouring codes in a thread.

    ``alive`` (int32 [64]) is all ones, or zero in rows whose codes are zero whatever ``x`` holds.
    """
    steps = gl.permute(gl.reshape(x, (BLOCK_H, 4, 2, 2, 4, 2)), (0, 1, 4, 5, 3, 2))
    first, second = gl.split(steps)
    step0, step1 = gl.split(first)
    step2, step3 = gl.split(second)
    LAYOUT: gl.constexpr = step0.type.layout
    lane = opaque(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))))
    pick = gl.where((lane & 1) == 1, 0x7632, 0x5410)
    sort = gl.where((lane & 1) == 1, 0x1054, 0x5410) ^ gl.where(lane >= 2, 0x2222, 0)
    words = gl.inline_asm_elementwise(
        _PACK_E4M3,
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [
            step0,
            step1,
            step2,
            step3,
            pick[None, None, :, None],
            sort[None, None, :, None],
            lane[None, None, :, None],
        ],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )
    if MASKED:
        mask = gl.convert_layout(
            alive,
            gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, words.type.layout))),
            assert_trivial=True,
        )
        words = words & mask[:, None, None, None]
    return gl.reshape(words, (BLOCK_H, 32))


@gluon.jit
def _pack_bf16(x, alive, MASKED: gl.constexpr):
    """Values of [64, 128], 8 neighbouring ones in a thread; ``alive`` as in ``_pack_e4m3``."""
    if MASKED:
        mask = gl.convert_layout(alive, gl.SliceLayout(1, x.type.layout), assert_trivial=True)
        values = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1; and.b32 $0, $0, $3;",
            "=r,r,r,r,r",
            [x, mask[:, None]],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        values = x.to(gl.bfloat16)
    return _to_rows(values)


@gluon.jit
def _store_rows(
    values,
    data_ptr,
    stride_group,
    head_start,
    num_heads,
    FIRST: gl.constexpr,
    F: gl.constexpr,
    CHUNK32: gl.constexpr,
    FULL_TILES: gl.constexpr,
    PER_VALUE: gl.constexpr,
):
    """Store values of ``PER_VALUE`` dimensions each, from ``FIRST`` on, into the token's row."""
    LAYOUT: gl.constexpr = values.type.layout
    COLUMNS: gl.constexpr = 128 // PER_VALUE
    HEADS: gl.constexpr = F // 512
    CHUNK: gl.constexpr = 32 // PER_VALUE
    HEAD_STEP: gl.constexpr = CHUNK if CHUNK32 else 512 // PER_VALUE
    head = head_start + opaque(gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT)))
    column = FIRST // PER_VALUE + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    if CHUNK32:
        column = (column // CHUNK) * (HEADS * CHUNK) + column % CHUNK
    rows = (head // HEADS).to(gl.int64) * (stride_group // PER_VALUE) + (head % HEADS) * HEAD_STEP
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
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    F: gl.constexpr,
    CHUNK32: gl.constexpr,
):
    """Store one scale per head and block [64, 128 / GROUP]."""
    HEADS: gl.constexpr = F // 512
    LAYOUT: gl.constexpr = scales.type.layout
    head = head_start + opaque(gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT)))
    block = FIRST // GROUP + opaque(gl.arange(0, 128 // GROUP, gl.SliceLayout(0, LAYOUT)))
    within = head % HEADS
    group = (head // HEADS).to(gl.int64) * stride_group
    if KIND == FP8_UE8M0:
        # Scale ``index`` of a group is byte index % 4 of word index // 4.
        if not CHUNK32:
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
        if CHUNK32:
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
def _divide(pairs, divisor, GROUP: gl.constexpr):
    """IEEE quotients: a reciprocal per group, and one correction per element.

    One element after the other, so that intermediate results do not fill the registers.
    """
    return gl.inline_asm_elementwise(
        _DIVIDE,
        "=&f,f,f,f",
        [
            pairs,
            _spread(divisor, pairs, GROUP),
            _spread(gl.div_rn(1.0, divisor), pairs, GROUP),
        ],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _scale_to_e4m3(
    x,
    factor,
    alive,
    MASKED: gl.constexpr,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    AMAX_FLOOR: gl.constexpr,
):
    """``x * factor`` [64, 128] over the scales of its groups, and these scales [64, 128 / GROUP].

    A group with a NaN has only NaN codes; an infinity takes the largest scale.
    """
    if KIND == FP8_FLOAT32:
        x = (
            x
            * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout), assert_trivial=True)[
                :, None
            ]
        )
    pairs = _paired(x, GROUP)
    amax = _group_max(pairs, GROUP)
    ROW: gl.constexpr = gl.SliceLayout(1, amax.type.layout)
    per_head = gl.convert_layout(factor, ROW, assert_trivial=True)[:, None]
    if KIND != FP8_FLOAT32:
        # Rounding keeps order, so this is the amax of the products.
        amax = amax * gl.abs(per_head)
    if MASKED:
        is_alive = gl.convert_layout(alive, ROW, assert_trivial=True)[:, None] != 0
        amax = gl.where(gl.broadcast(is_alive, amax)[0], amax, 0.0)
    has_nan = amax != amax
    floored = gl.maximum(amax, AMAX_FLOOR)
    if KIND == FP8_FLOAT32:
        scale = gl.div_rn(gl.minimum(floored, FLOAT32_MAX), 448.0)
        scale = gl.where(has_nan, float("nan"), scale)
        ratio = _divide(pairs, scale, GROUP)
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
        ratio = pairs * _spread(inverse * per_head, pairs, GROUP)
        stored = exponent
        if KIND == FP8_FLOAT32_POW2:
            stored = (exponent << 23).to(gl.float32, bitcast=True)
    return gl.reshape(ratio, (BLOCK_H, 128)), stored


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
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    F: gl.constexpr,
    CHUNK32: gl.constexpr,
    AMAX_FLOOR: gl.constexpr,
):
    """Quantise and store dimensions ``FIRST``.. of 64 heads of one token: ``x * factor``.

    ``x`` is [64, 128] float32, ``factor`` float32 [64]. With ``MASKED``, rows where ``alive``
    (int32 [64], all ones or zero) is zero are stored as zeros whatever they hold.
    ``data_ptr`` is the token's row of codes, ``row`` (int64) that of its scales. ``padding_rows``
    of scales after it are zeroed: 0 except for the buffer's last token.
    """
    COLUMN: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    if KIND == BF16:
        per_head = gl.convert_layout(factor, COLUMN, assert_trivial=True)[:, None]
        _store_rows(
            _pack_bf16(x * per_head, alive, MASKED),
            data_ptr,
            stride_data_group,
            head_start,
            num_heads,
            FIRST,
            F,
            CHUNK32,
            FULL_TILES,
            1,
        )
    else:
        if KIND == FP8_TENSOR:
            per_head = gl.convert_layout(factor, COLUMN, assert_trivial=True)[:, None]
            ratio = x * per_head * gl.div_rn(1.0, gl.load(scale_ptr))
        else:
            ratio, scales = _scale_to_e4m3(x, factor, alive, MASKED, KIND, GROUP, AMAX_FLOOR)
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
                KIND,
                GROUP,
                F,
                CHUNK32,
            )
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
                    KIND,
                    GROUP,
                    F,
                    CHUNK32,
                )
        _store_rows(
            _pack_e4m3(ratio, alive, MASKED),
            data_ptr.to(gl.pointer_type(gl.int32), bitcast=True),
            stride_data_group,
            head_start,
            num_heads,
            FIRST,
            F,
            CHUNK32,
            FULL_TILES,
            4,
        )

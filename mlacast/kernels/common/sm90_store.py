"""Storing epilogue of the Hopper merge: float32 rows into the caller's buffers.

Same formats and bits as ``mlacast.kernels.common.store``; threads hold 8 neighbouring columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_nvfp4 import quantise_rows_to_nvfp4, store_scale_bytes
from mlacast.kernels.common.sm90_quads import choose_larger_or_nan
from mlacast.kernels.common.sm90_rotation import hide_value

BF16 = gl.constexpr(0)
FP8_TENSOR = gl.constexpr(1)
FP8_FLOAT32 = gl.constexpr(2)
FP8_FLOAT32_POW2 = gl.constexpr(3)
FP8_UE8M0 = gl.constexpr(4)
NVFP4 = gl.constexpr(5)
FLOAT32_MAX = gl.constexpr(3.4028234663852886e38)
_FOUR_TO_E4M3 = gl.constexpr("""{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
mov.b32 $0, {low, high};
}""")


@gluon.jit
def _store_codes(
    codes,
    data_ptr,
    stride_group,
    head_start,
    num_heads,
    FIRST: gl.constexpr,
    F: gl.constexpr,
    CHUNK32: gl.constexpr,
    FULL_TILES: gl.constexpr,
    PER_CODE: gl.constexpr,
):
    """Store codes or bfloat16 values [heads, n], dimensions ``FIRST``.., into the token's row.

    ``PER_CODE`` is 8 for words of as many codes, else 1.
    """
    LAYOUT: gl.constexpr = codes.type.layout
    HEADS: gl.constexpr = F // 512
    HEAD_STEP: gl.constexpr = 32 if CHUNK32 else 512 // PER_CODE
    if PER_CODE == 8:
        data_ptr = data_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        stride_group = stride_group // 4
    # [heads]
    head = head_start + hide_value(gl.arange(0, codes.shape[0], gl.SliceLayout(1, LAYOUT)))
    d = FIRST // PER_CODE + gl.arange(0, codes.shape[1], gl.SliceLayout(0, LAYOUT))  # [n]
    if CHUNK32:
        d = (d // 32) * (HEADS * 32) + d % 32
    rows = (head // HEADS).to(gl.int64) * stride_group + (head % HEADS) * HEAD_STEP  # [heads]
    pointers = data_ptr + rows[:, None] + d[None, :]  # [heads, n]
    if FULL_TILES:
        gl.store(pointers, codes)
    else:
        gl.store(pointers, codes, mask=(head < num_heads)[:, None])


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
    OUTPUT: gl.constexpr,
):
    """Store one scale per head and block [heads, n / group].

    Those of a token's group are less than 2**31 apart (``scales:far_apart`` in ``ops.layout``), so
    that within it 32 bits are enough.
    """
    GROUP: gl.constexpr = OUTPUT.group
    HEADS: gl.constexpr = OUTPUT.features // 512
    BLOCK_H: gl.constexpr = scales.shape[0]
    BLOCKS: gl.constexpr = scales.shape[1]
    LAYOUT: gl.constexpr = scales.type.layout
    # [heads]
    head = head_start + hide_value(gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT)))
    # [n / group]
    block = FIRST // GROUP + hide_value(gl.arange(0, BLOCKS, gl.SliceLayout(0, LAYOUT)))
    within = head % HEADS  # [heads]
    group = (head // HEADS).to(gl.int64) * stride_group  # [heads], int64
    mask = (head < num_heads)[:, None] & (block >= 0)[None, :]  # [heads, n / group]
    if OUTPUT.kind == FP8_UE8M0:
        # Scale ``index`` of a group is byte index % 4 of word index // 4.
        if not OUTPUT.chunk32:
            in_row = (group + within * (128 // GROUP) * stride_word) * 4
            in_column = (block // 4) * stride_word * 4 + block % 4
            offsets = in_row[:, None] + in_column[None, :]  # [heads, n / group]
        elif HEADS % 4 == 0:
            in_row = (group + (within // 4) * stride_word) * 4 + within % 4
            in_column = block * (HEADS // 4) * stride_word * 4
            offsets = in_row[:, None] + in_column[None, :]  # [heads, n / group]
        else:
            index = (block * HEADS)[None, :] + within[:, None]  # [heads, n / group]
            offsets = (group[:, None] + (index // 4) * stride_word) * 4 + index % 4
        bytes_ptr = sf_ptr.to(gl.pointer_type(gl.uint8), bitcast=True)
        bytes_ptr += row * stride_token * 4
        gl.store(bytes_ptr + offsets, scales.to(gl.uint8), mask=mask)
    else:
        if OUTPUT.chunk32:
            offsets = (group + within * stride_word)[:, None]
            offsets += (block * HEADS * stride_word)[None, :]
        else:
            offsets = (group + within * (512 // GROUP) * stride_word)[:, None]
            offsets += (block * stride_word)[None, :]
        gl.store(sf_ptr + row * stride_token + offsets, scales, mask=mask)


@gluon.jit
def _cast_to_e4m3(x):
    """Codes (uint8): saturating, NaN becomes 0x7F."""
    # Four neighbours leave as one register; byte by byte they would take five instructions.
    return gl.inline_asm_elementwise(
        _FOUR_TO_E4M3, "=r,r,r,r,r", [x], dtype=gl.uint8, is_pure=True, pack=4
    )


@gluon.jit
def _quantise_groups(x, KIND: gl.constexpr, GROUP: gl.constexpr, AMAX_FLOOR: gl.constexpr):
    """Codes [heads, n] and stored scales [heads, n / GROUP] of a float32 tile [heads, n].

    A group with a NaN has only NaN codes; an infinity takes the largest scale.
    """
    grouped = gl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))  # [heads, n / GROUP, GROUP]
    amax = gl.reduce(gl.abs(grouped), 2, choose_larger_or_nan)  # [heads, n / GROUP]
    has_nan = amax != amax  # [heads, n / GROUP]
    floored = gl.maximum(amax, AMAX_FLOOR)  # [heads, n / GROUP]
    if KIND == FP8_FLOAT32:
        scale = gl.div_rn(gl.minimum(floored, FLOAT32_MAX), 448.0)
        scale = gl.where(has_nan, float("nan"), scale)
        ROW: gl.constexpr = gl.SliceLayout(2, grouped.type.layout)
        divisor = gl.expand_dims(gl.convert_layout(scale, ROW), 2)  # [heads, n / GROUP, 1]
        # [heads, n / GROUP, 1]
        inverse = gl.expand_dims(gl.convert_layout(gl.div_rn(1.0, scale), ROW), 2)
        # The quotient and one correction are the IEEE division; infinity takes the largest number.
        finite = gl.minimum(gl.maximum(grouped, -FLOAT32_MAX), FLOAT32_MAX)
        quotient = finite * inverse  # [heads, n / GROUP, GROUP]
        # Negated twice, the remainder keeps the sign of a zero; -x would be 0 - x.
        opposite = gl.fma(quotient, gl.broadcast(divisor, quotient)[0], finite * -1.0)
        ratio = gl.fma(opposite * -1.0, gl.broadcast(inverse, quotient)[0], quotient)
        stored = scale
    else:
        # The smallest power of two not below amax / 448: 448 is 1.75 * 2**8, so the exponent moves
        # up exactly where the mantissa exceeds 1.75.
        bits = floored.to(gl.int32, bitcast=True)
        # [heads, n / GROUP]
        exponent = gl.where(bits >= 0x7F800000, 254, ((bits + 0x1FFFFF) >> 23) - 8)
        exponent = gl.where(has_nan, 254, exponent)
        # Dividing by a power of two is exact as a product; 2**-127 is a subnormal.
        inverse = gl.where(exponent == 254, 0x400000, (254 - exponent) << 23)
        inverse = gl.where(has_nan, 0x7FC00000, inverse).to(gl.float32, bitcast=True)
        wide = gl.convert_layout(inverse, gl.SliceLayout(2, grouped.type.layout))
        ratio = grouped * gl.expand_dims(wide, 2)
        stored = exponent
        if KIND == FP8_FLOAT32_POW2:
            stored = (exponent << 23).to(gl.float32, bitcast=True)
    ratio = gl.convert_layout(gl.reshape(ratio, x.shape), x.type.layout, assert_trivial=True)
    return _cast_to_e4m3(ratio), stored


@gluon.jit
def load_output_scale(scale_ptr, KIND: gl.constexpr):
    """What ``FP8_TENSOR`` or ``NVFP4`` multiplies by; 1 for other formats."""
    if KIND == FP8_TENSOR:
        return gl.div_rn(1.0, gl.load(scale_ptr))
    elif KIND == NVFP4:
        return gl.load(scale_ptr)
    else:
        return 1.0


@gluon.jit
def store_rows(
    x,
    data_ptr,
    stride_data_group,
    sf_ptr,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    scale,
    row,
    padding_rows,
    head_start,
    num_heads,
    FIRST: gl.constexpr,
    FULL_TILES: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Quantise and store dimensions ``FIRST``.. of heads of one token: ``x`` [heads, n] float32.

    ``data_ptr`` is the token's row of codes, ``row`` (int64) that of its scales, ``scale`` comes
    from ``load_output_scale``. ``padding_rows`` of scales after it are zeroed: 0 except for the
    buffer's last token. Of NVFP4, whose scales have no strides, ``stride_sf_word`` is the range's
    first row.
    """
    if OUTPUT.kind == BF16:
        codes = x.to(gl.bfloat16)
    elif OUTPUT.kind == NVFP4:
        codes, scales = quantise_rows_to_nvfp4(x, scale)  # [heads, n / 8] and [heads, n / 16]
        # [heads]
        heads = hide_value(gl.arange(0, scales.shape[0], gl.SliceLayout(1, scales.type.layout)))
        store_scale_bytes(
            scales,
            head_start + heads,
            sf_ptr,
            stride_sf_word + row,
            padding_rows,
            num_heads,
            FIRST,
            FULL_TILES,
        )
    elif OUTPUT.kind == FP8_TENSOR:
        codes = _cast_to_e4m3(x * scale)
    else:
        codes, scales = _quantise_groups(x, OUTPUT.kind, OUTPUT.group, OUTPUT.amax_floor)
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
            OUTPUT,
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
                OUTPUT,
            )
    _store_codes(
        codes,
        data_ptr,
        stride_data_group,
        head_start,
        num_heads,
        FIRST,
        OUTPUT.features,
        OUTPUT.chunk32,
        FULL_TILES,
        8 if OUTPUT.kind == NVFP4 else 1,
    )

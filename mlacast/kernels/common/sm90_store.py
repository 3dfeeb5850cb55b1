"""Storing epilogue of the Hopper kernels: float32 registers into the caller's buffers.

Same formats and bits as ``mlacast.kernels.common.store``. Codes leave from registers: staging them
in the ring would hold a slot back, and with it the first keys of the next tile.

``store_block`` takes what products leave, ``store_rows`` any rows whose threads hold neighbouring
columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from mlacast.kernels.common.sm90_rotation import opaque

BF16 = gl.constexpr(0)
FP8_TENSOR = gl.constexpr(1)
FP8_FLOAT32 = gl.constexpr(2)
FP8_FLOAT32_POW2 = gl.constexpr(3)
FP8_UE8M0 = gl.constexpr(4)
FLOAT32_MAX = gl.constexpr(3.4028234663852886e38)
_KEEP_NAN = gl.constexpr(PropagateNan.ALL)
_FOUR_TO_E4M3 = gl.constexpr("""{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
mov.b32 $0, {low, high};
}""")


@gluon.jit
def _to_rows(x):
    """Give every thread 8 neighbouring columns of [64, 128] registers, its quad 32.

    Two lane bits trade places with two register bits, one at a time: shuffles, no shared memory.
    """
    HALFWAY: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 16], [0, 32], [0, 64]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
    ROWS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
    return gl.convert_layout(gl.convert_layout(x, HALFWAY), ROWS)


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
):
    """Store [heads, n] codes or bfloat16 values, dimensions ``FIRST``.., into the token's row."""
    LAYOUT: gl.constexpr = codes.type.layout
    HEADS: gl.constexpr = F // 512
    HEAD_STEP: gl.constexpr = 32 if CHUNK32 else 512
    head = head_start + opaque(gl.arange(0, codes.shape[0], gl.SliceLayout(1, LAYOUT)))
    d = FIRST + gl.arange(0, codes.shape[1], gl.SliceLayout(0, LAYOUT))
    if CHUNK32:
        d = (d // 32) * (HEADS * 32) + d % 32
    rows = (head // HEADS).to(gl.int64) * stride_group + (head % HEADS) * HEAD_STEP
    pointers = data_ptr + rows[:, None] + d[None, :]
    if FULL_TILES:
        gl.store(pointers, codes)
    else:
        gl.store(pointers, codes, mask=(head < num_heads)[:, None])


@gluon.jit
def _max_or_nan(a, b):
    """Maximum that keeps a NaN."""
    return gl.maximum(a, b, propagate_nan=_KEEP_NAN)


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
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    F: gl.constexpr,
    CHUNK32: gl.constexpr,
):
    """Store one scale per head and block [heads, n / GROUP]."""
    HEADS: gl.constexpr = F // 512
    BLOCK_H: gl.constexpr = scales.shape[0]
    BLOCKS: gl.constexpr = scales.shape[1]
    LAYOUT: gl.constexpr = scales.type.layout
    if KIND == FP8_UE8M0 and GROUP == 32 and BLOCKS == 4 and not CHUNK32:
        # The four scales of a thread are the bytes of one word.
        shift = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT)) * 8
        words = gl.sum(scales << shift[None, :], 1)
        head = head_start + opaque(gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT)))
        offsets = (head // HEADS).to(gl.int64) * stride_group
        offsets += ((head % HEADS) * 4 + FIRST // 128) * stride_word
        mask = head < num_heads
        gl.store(sf_ptr + row * stride_token + offsets, words, mask=mask)
    else:
        head = head_start + opaque(gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT)))
        block = FIRST // GROUP + opaque(gl.arange(0, BLOCKS, gl.SliceLayout(0, LAYOUT)))
        within = head % HEADS
        group = (head // HEADS).to(gl.int64) * stride_group
        mask = (head < num_heads)[:, None] & (block >= 0)[None, :]
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
            bytes_ptr = sf_ptr.to(gl.pointer_type(gl.uint8), bitcast=True)
            bytes_ptr += row * stride_token * 4
            gl.store(bytes_ptr + offsets, scales.to(gl.uint8), mask=mask)
        else:
            if CHUNK32:
                offsets = (group + within * stride_word)[:, None]
                offsets += (block * HEADS * stride_word)[None, :]
            else:
                offsets = (group + within * (512 // GROUP) * stride_word)[:, None]
                offsets += (block * stride_word)[None, :]
            gl.store(sf_ptr + row * stride_token + offsets, scales, mask=mask)


@gluon.jit
def _to_e4m3(x, FROM_PRODUCTS: gl.constexpr):
    """Codes (uint8): saturating, NaN becomes 0x7F."""
    if FROM_PRODUCTS:
        return x.to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    else:
        # Four neighbours leave as one register; byte by byte they would take five instructions.
        return gl.inline_asm_elementwise(
            _FOUR_TO_E4M3, "=r,r,r,r,r", [x], dtype=gl.uint8, is_pure=True, pack=4
        )


@gluon.jit
def _quantise_groups(
    x,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    AMAX_FLOOR: gl.constexpr,
    FROM_PRODUCTS: gl.constexpr,
):
    """Codes [heads, n] and stored scales [heads, n / GROUP] of a float32 tile [heads, n].

    A group with a NaN has only NaN codes; an infinity takes the largest scale.
    """
    grouped = gl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))
    amax = gl.reduce(gl.abs(grouped), 2, _max_or_nan)
    has_nan = amax != amax
    floored = gl.maximum(amax, AMAX_FLOOR)
    if KIND == FP8_FLOAT32:
        scale = gl.div_rn(gl.minimum(floored, FLOAT32_MAX), 448.0)
        scale = gl.where(has_nan, float("nan"), scale)
        ROW: gl.constexpr = gl.SliceLayout(2, grouped.type.layout)
        divisor = gl.expand_dims(gl.convert_layout(scale, ROW), 2)
        inverse = gl.expand_dims(gl.convert_layout(gl.div_rn(1.0, scale), ROW), 2)
        # The quotient and one correction are the IEEE division; infinity takes the largest number.
        finite = gl.minimum(gl.maximum(grouped, -FLOAT32_MAX), FLOAT32_MAX)
        quotient = finite * inverse
        # Negated twice, the remainder keeps the sign of a zero; -x would be 0 - x.
        opposite = gl.fma(quotient, gl.broadcast(divisor, quotient)[0], finite * -1.0)
        ratio = gl.fma(opposite * -1.0, gl.broadcast(inverse, quotient)[0], quotient)
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
        wide = gl.convert_layout(inverse, gl.SliceLayout(2, grouped.type.layout))
        ratio = grouped * gl.expand_dims(wide, 2)
        stored = exponent
        if KIND == FP8_FLOAT32_POW2:
            stored = (exponent << 23).to(gl.float32, bitcast=True)
    ratio = gl.reshape(ratio, x.shape)
    if not FROM_PRODUCTS:
        ratio = gl.convert_layout(ratio, x.type.layout, assert_trivial=True)
    return _to_e4m3(ratio, FROM_PRODUCTS), stored


@gluon.jit
def inverse_scale(scale_ptr, KIND: gl.constexpr):
    """What ``FP8_TENSOR`` multiplies by; 1 for other formats."""
    return gl.div_rn(1.0, gl.load(scale_ptr)) if KIND == FP8_TENSOR else 1.0


@gluon.jit
def store_rows(
    x,
    data_ptr,
    stride_data_group,
    sf_ptr,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    inverse,
    row,
    padding_rows,
    head_start,
    num_heads,
    FIRST: gl.constexpr,
    FULL_TILES: gl.constexpr,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    F: gl.constexpr,
    CHUNK32: gl.constexpr,
    AMAX_FLOOR: gl.constexpr,
    FROM_PRODUCTS: gl.constexpr,
):
    """Quantise and store dimensions ``FIRST``.. of heads of one token: ``x`` [heads, n] float32.

    ``data_ptr`` is the token's row of codes, ``row`` (int64) that of its scales, ``inverse`` comes
    from ``inverse_scale``. ``padding_rows`` of scales after the row are zeroed: 0 except for the
    buffer's last token. FROM_PRODUCTS: a [64, 128] of which no thread holds enough neighbours.
    """
    if KIND == BF16:
        codes = x.to(gl.bfloat16)
    elif KIND == FP8_TENSOR:
        codes = _to_e4m3(x * inverse, FROM_PRODUCTS)
    else:
        codes, scales = _quantise_groups(x, KIND, GROUP, AMAX_FLOOR, FROM_PRODUCTS)
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
                KIND,
                GROUP,
                F,
                CHUNK32,
            )
    _store_codes(
        _to_rows(codes) if FROM_PRODUCTS else codes,
        data_ptr,
        stride_data_group,
        head_start,
        num_heads,
        FIRST,
        F,
        CHUNK32,
        FULL_TILES,
    )


@gluon.jit
def store_block(
    x,
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
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    F: gl.constexpr,
    CHUNK32: gl.constexpr,
    AMAX_FLOOR: gl.constexpr,
):
    """``store_rows`` of an accumulator of products, ``x`` [64, 128] float32."""
    store_rows(
        x,
        data_ptr,
        stride_data_group,
        sf_ptr,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        inverse_scale(scale_ptr, KIND),
        row,
        padding_rows,
        head_start,
        num_heads,
        FIRST,
        FULL_TILES,
        KIND,
        GROUP,
        F,
        CHUNK32,
        AMAX_FLOOR,
        True,
    )

"""Nvfp4 codes and scale bytes on Hopper: of an accumulator [64, 128], or of rows.

Same bits as ``mlacast.kernels.common.store``, places as in ``sm90_quads``. Hopper has no
conversion to e2m1, so codes are made by float32 additions, whose rounding is that of e2m1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_division import (
    divide_by_6,
    divide_by_6_in_float32,
    divide_by_short,
    divide_numbers,
)
from mlacast.kernels.common.sm90_quads import choose_larger_or_nan, deal_max, undeal
from mlacast.kernels.common.sm90_rotation import hide_value

# Word of the codes of the 8 elements $1..$8. $9 and $10 are minus the factors of the first and the
# last four; -0.0 is added unless that is zero, so that a scale of zero takes the signs.
#
# A code is the least of 2 x, x + 2 and x / 2 + 4, rounded to an integer, nearest even: each is
# right where it is the least, and rounding keeps order. The bits of x + 2**23 - 2 count halves up
# to 2**23 and ones from there, so one sum gives the lesser of the first two; those of x / 2 + 2**23
# are at the same distance from the bits of 2**23 - 2.
_WORD_OF_E2M1 = gl.constexpr(
    "{ .reg .f32 x, a, b, factor, added; .reg .b32 bits, signs; "
    "mov.b32 $0, 0; mov.b32 signs, 0; "
    + "".join(
        (
            ""
            if element % 4 != 3
            else f"mov.b32 bits, ${9 + element // 4}; and.b32 bits, bits, 0x80000000; "
            f"mov.b32 added, bits; neg.f32 factor, ${9 + element // 4}; "
        )
        + f"fma.rn.f32 x, ${1 + element}, factor, added; "
        "mov.b32 bits, x; shf.l.wrap.b32 signs, bits, signs, 4; "
        "abs.f32 x, x; min.f32 x, x, 0f40C00000; "
        "add.rn.f32 a, x, 0f4AFFFFFC; "
        "fma.rn.f32 b, x, 0f3F000000, 0f4B000000; min.f32 a, a, b; "
        "mov.b32 bits, a; mad.lo.u32 $0, $0, 16, bits; "
        for element in reversed(range(8))
    )
    # What is left of eight times 2**23 - 2.
    + "sub.u32 $0, $0, 0xB6BBBBBC; lop3.b32 $0, signs, 0x88888888, $0, 0xEA; }"
)

# The same without the unit that compares, which takes two cycles for an instruction. $9 is an
# eighth of the factor, or NaN for a scale of zero; $10 are the signs that count, and with $11 the
# codes are joined.
#
# What saturates stays from 0 to 1, and NaN becomes 0. So x / 8 clamps x to 8, and twice that to 4:
# its code is rounded as above. What x / 2 is above 2, up to one, is added to that number, and
# rounded to an integer by it, nearest even.
_WORD_OF_E2M1_BY_PRODUCTS = gl.constexpr(
    "{ .reg .f32 x, a, b; .reg .b32 bits, signs; mov.b32 $0, 0; mov.b32 signs, 0; "
    + "".join(
        f"mov.b32 bits, ${1 + element}; shf.l.wrap.b32 signs, bits, signs, 4; "
        f"abs.f32 x, ${1 + element}; mul.rn.sat.f32 x, x, $9; "
        "fma.rn.sat.f32 b, x, 0f40800000, 0fC0000000; "
        "mul.rn.sat.f32 a, x, 0f40000000; "
        "fma.rn.f32 a, a, 0f40800000, 0f4AFFFFFC; "
        "add.rn.f32 a, a, b; "
        "mov.b32 bits, a; mad.lo.u32 $0, $0, 16, bits; "
        for element in reversed(range(8))
    )
    + "sub.u32 $0, $0, 0xB6BBBBBC; lop3.b32 $0, signs, $10, $0, 0xEA; or.b32 $0, $0, $11; }"
)

# Bytes n of words $4..$7, which are those of lanes 0..3, become word n.
_TRANSPOSE_BYTES = gl.constexpr("""{
.reg .b32 left, right;
prmt.b32 left, $4, $5, 0x5140;
prmt.b32 right, $6, $7, 0x5140;
prmt.b32 $0, left, right, 0x5410;
prmt.b32 $1, left, right, 0x7632;
prmt.b32 left, $4, $5, 0x7362;
prmt.b32 right, $6, $7, 0x7362;
prmt.b32 $2, left, right, 0x5410;
prmt.b32 $3, left, right, 0x7632;
}""")


@gluon.jit
def _exchange_lanes(words):
    """Exchange the lanes of a quad with the second dimension of [64, 4, lane]."""
    WORDS_IN_REGISTERS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [8, 0, 0]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
    HALFWAY: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 2, 0], [8, 0, 0]],
        [[0, 1, 0], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
    LANES_IN_REGISTERS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
    words = gl.convert_layout(words, WORDS_IN_REGISTERS, assert_trivial=True)
    # One bit at a time: shuffles, no shared memory.
    return gl.convert_layout(gl.convert_layout(words, HALFWAY), LANES_IN_REGISTERS)


@gluon.jit
def _split_lanes(x):
    """Split the last dimension of [64, 4, lane] into its elements [64, 4]."""
    even, odd = gl.split(gl.reshape(x, (64, 4, 2, 2)))  # [64, 4, 2] each
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def _split_halves(x):
    """Split the last two dimensions of [64, 4, lane, 2, 2] into elements 00, 01, 10, 11."""
    first, second = gl.split(gl.permute(x, (0, 1, 2, 4, 3)))  # [64, 4, lane, 2] each
    a, b = gl.split(first)
    c, d = gl.split(second)
    return a, b, c, d


@gluon.jit
def _pack_codes(groups, negated):
    """Words of 8 codes [64, 16], four neighbours in a thread, of groups [64, 8, 2, lane, 2].

    ``negated`` [64, 8, lane] are minus the factors of the groups, NaN for one with a NaN.
    """
    by_word = gl.permute(gl.reshape(groups, (64, 4, 2, 2, 4, 2)), (0, 1, 4, 3, 5, 2))
    first, last = gl.split(by_word)  # [64, 4, lane, 2, 2] each
    # [64, 4, lane] each, like the words and the factors.
    zero, one, two, three = _split_halves(first)
    four, five, six, seven = _split_halves(last)
    of_first, of_last = gl.split(gl.permute(gl.reshape(negated, (64, 4, 2, 4)), (0, 1, 3, 2)))
    LAYOUT: gl.constexpr = zero.type.layout
    words = gl.inline_asm_elementwise(
        _WORD_OF_E2M1,
        "=&r,f,f,f,f,f,f,f,f,f,f",
        [
            zero,
            one,
            two,
            three,
            four,
            five,
            six,
            seven,
            gl.convert_layout(of_first, LAYOUT, assert_trivial=True),
            gl.convert_layout(of_last, LAYOUT, assert_trivial=True),
        ],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    # [64, 4] each, and so are the words of codes.
    zero, one, two, three = _split_lanes(_exchange_lanes(words))
    a, b, c, d = gl.inline_asm_elementwise(
        _TRANSPOSE_BYTES,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [zero, one, two, three],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), (64, 16))


@gluon.jit
def _encode_scales(amax, global_scale, dividend):
    """Scale bytes (int32) of groups with these largest magnitudes, and ``dividend`` over them.

    ``amax`` is [rows, groups], [64, 4] of an accumulator, and so are the results; the global scale
    and the dividend are numbers. The quotient is NaN for a group that has a NaN, and zero under
    the scale zero.
    """
    wanted = gl.minimum(global_scale * divide_by_6(amax), 448.0)
    byte = wanted.to(gl.float8e4nv).to(gl.uint8, bitcast=True).to(gl.int32)
    byte = gl.where(amax != amax, 0x7F, byte)
    # The codes match the stored scale. Moved up by seven bits it is the float16 of 2**-8 times its
    # value; the least but zero is 2**-9.
    decoded = (byte << 7).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32) * 256.0
    multiplier = divide_numbers(dividend, gl.maximum(decoded, 0.001953125))
    # By the byte, which is stored anyhow: conditions from before the division would be kept, and
    # spill.
    multiplier = gl.where(byte == 0, 0.0, multiplier)
    return byte, gl.where(byte == 0x7F, float("nan"), multiplier)


@gluon.jit
def quantise_to_nvfp4(x, alive, global_scale, MASKED: gl.constexpr):
    """Quantise an accumulator [64, 128] in groups of 16.

    With ``MASKED``, rows where ``alive`` (int32 [64]) is zero count as zeros whatever they hold.

    Returns:
        codes as words of 8 [64, 16], and the scale bytes of the first and the last four groups,
        each [64, 4]; int32.
    """
    groups = gl.reshape(x, (64, 8, 2, 4, 2))  # [64, groups, 2, lane, 2]
    # [64, groups, lane]
    by_lane = gl.reduce(gl.reduce(gl.abs(groups), 4, choose_larger_or_nan), 2, choose_larger_or_nan)
    # [64, 4, lane] each, and dealt, like bytes and factors, [64, 4].
    left, right = gl.split(gl.permute(gl.reshape(by_lane, (64, 2, 4, 4)), (0, 2, 3, 1)))
    left = deal_max(left)
    right = deal_max(right)
    if MASKED:
        ROW: gl.constexpr = gl.SliceLayout(1, left.type.layout)
        is_alive = gl.convert_layout(alive, ROW, assert_trivial=True)[:, None] != 0
        is_alive = gl.broadcast(is_alive, left)[0]
        left = gl.where(is_alive, left, 0.0)
        right = gl.where(is_alive, right, 0.0)
    left_byte, left = _encode_scales(left, global_scale, -global_scale)
    right_byte, right = _encode_scales(right, global_scale, -global_scale)
    negated = gl.permute(gl.join(undeal(left), undeal(right)), (0, 3, 1, 2))  # [64, 2, 4, lane]
    negated = gl.reshape(negated, (64, 8, 4))
    BY_LANE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, groups.type.layout))
    negated = gl.convert_layout(negated, BY_LANE, assert_trivial=True)
    words = _pack_codes(groups, negated)  # [64, 16]
    if MASKED:
        # A row that counts as zeros may hold NaN.
        mask = gl.convert_layout(alive, gl.SliceLayout(1, words.type.layout), assert_trivial=True)
        words = words & mask[:, None]
    return words, left_byte, right_byte


@gluon.jit
def find_row_scales(x, factor, global_scale, IN_FLOAT32: gl.constexpr):
    """Scales of groups of 16 of float32 rows [heads, n], 8 neighbours a thread.

    With ``factor`` (float32 [heads], not negative) of ``x * factor``, zeros where that is zero
    whatever ``x`` holds. With IN_FLOAT32 the global scale is from 2**-100 to 2**100.

    Returns:
        scale bytes (int32), and what ``encode_rows`` multiplies the groups by, each
        [heads, n / 16].
    """
    groups = gl.reshape(x, (x.shape[0], x.shape[1] // 16, 16))
    # [heads, n / 16], and so are bytes and factors.
    amax = gl.reduce(gl.abs(groups), 2, choose_larger_or_nan)
    if factor is not None:
        # Rounding keeps order, so this is the largest magnitude of the products.
        ROW: gl.constexpr = gl.SliceLayout(1, amax.type.layout)
        per_row = gl.convert_layout(factor, ROW, assert_trivial=True)[:, None]
        per_row = gl.broadcast(per_row, amax)[0]
        amax = gl.where(per_row == 0.0, 0.0, amax * per_row)
    if IN_FLOAT32:
        # An infinity over 6 is NaN here, which the minimum leaves out.
        wanted = gl.minimum(global_scale * divide_by_6_in_float32(amax), 448.0)
        byte = wanted.to(gl.float8e4nv).to(gl.uint8, bitcast=True).to(gl.int32)
        byte = gl.where(amax != amax, 0x7F, byte)
        # 2**-8 times the scale; an eighth of the factor, NaN for the scale zero.
        decoded = (byte << 7).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        return byte, divide_by_short(global_scale * 2.0**-11, decoded)
    else:
        return _encode_scales(amax, global_scale, -global_scale)


@gluon.jit
def _deal_to_words(x):
    """Elements 0..7 of the words [heads, n / 16, 2] of rows [heads, n]."""
    # [heads, n / 16, 2, 2, 2] each, then a dimension less.
    even, odd = gl.split(gl.reshape(x, (x.shape[0], x.shape[1] // 16, 2, 2, 2, 2)))
    even_first, even_last = gl.split(even)
    odd_first, odd_last = gl.split(odd)
    zero, four = gl.split(even_first)
    two, six = gl.split(even_last)
    one, five = gl.split(odd_first)
    three, seven = gl.split(odd_last)
    return zero, one, two, three, four, five, six, seven


@gluon.jit
def _put_beside_words(x, word):
    """Numbers of groups [heads, n / 16] beside their words [heads, n / 16, 2]."""
    BY_GROUP: gl.constexpr = gl.SliceLayout(2, word.type.layout)
    x = gl.expand_dims(gl.convert_layout(x, BY_GROUP, assert_trivial=True), 2)
    return gl.broadcast(x, word)[0]


@gluon.jit
def encode_rows(x, byte, multiplier, IN_FLOAT32: gl.constexpr):
    """Words of 8 codes [heads, n / 8] of ``x`` [heads, n], given its ``find_row_scales``."""
    # [heads, n / 16, 2] each, and so are words and what is beside them.
    zero, one, two, three, four, five, six, seven = _deal_to_words(x)
    multiplier = _put_beside_words(multiplier, zero)
    if IN_FLOAT32:
        # A group with a NaN has the largest code, without signs, and one of the scale zero none.
        has_nan = byte == 0x7F
        signs = gl.where(has_nan | (byte == 0), 0, -0x77777778)
        fill = gl.where(has_nan, 0x77777777, 0)
        words = gl.inline_asm_elementwise(
            _WORD_OF_E2M1_BY_PRODUCTS,
            "=&r,f,f,f,f,f,f,f,f,f,r,r",
            [
                zero,
                one,
                two,
                three,
                four,
                five,
                six,
                seven,
                multiplier,
                _put_beside_words(signs, zero),
                _put_beside_words(fill, zero),
            ],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        words = gl.inline_asm_elementwise(
            _WORD_OF_E2M1,
            "=&r,f,f,f,f,f,f,f,f,f,f",
            [zero, one, two, three, four, five, six, seven, multiplier, multiplier],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
    return gl.reshape(words, (x.shape[0], x.shape[1] // 8))


@gluon.jit
def quantise_rows_to_nvfp4(x, global_scale):
    """Quantise float32 rows [heads, n], 8 neighbours a thread, in groups of 16.

    Returns:
        codes as words of 8 [heads, n / 8], and scale bytes [heads, n / 16]; int32.
    """
    byte, multiplier = find_row_scales(x, None, global_scale, False)
    return encode_rows(x, byte, multiplier, False), byte


@gluon.jit
def find_swizzled_row(row, column_tiles):
    """Byte (int64) of a row's first scale in the 128x4 layout."""
    start = (row // 128).to(gl.int64) * (column_tiles * 512)
    return start + row % 32 * 16 + row % 128 // 32 * 4


@gluon.jit
def store_scale_bytes(
    scales,
    head,
    sf_ptr,
    row,
    padding_rows,
    num_heads,
    FIRST,
    FULL_TILES: gl.constexpr,
):
    """Store scales [heads, n] of groups of 16, from dimension ``FIRST`` of heads 512 wide on.

    ``head`` (int32) [heads] are the numbers of the heads. ``row`` (int64) counts in the whole
    buffer; scales of ``padding_rows`` rows after it are zeroed.
    """
    LAYOUT: gl.constexpr = scales.type.layout
    # [n]
    group = FIRST // 16 + hide_value(gl.arange(0, scales.shape[1], gl.SliceLayout(0, LAYOUT)))
    # The 32 scales of a head are 8 tiles of 512 bytes, the heads of a token follow each other.
    # [heads, n]
    places = (head * 4096)[:, None] + (group // 4 * 512 + group % 4)[None, :]
    mask = gl.broadcast((head < num_heads)[:, None], places)[0]
    pointers = sf_ptr + find_swizzled_row(row, num_heads * 8) + places
    if FULL_TILES:
        gl.store(pointers, scales.to(gl.uint8))
    else:
        gl.store(pointers, scales.to(gl.uint8), mask=mask)
    for padding in range(padding_rows):
        pointers = sf_ptr + find_swizzled_row(row + 1 + padding, num_heads * 8) + places
        zeros = gl.zeros_like(scales).to(gl.uint8)
        if FULL_TILES:
            gl.store(pointers, zeros)
        else:
            gl.store(pointers, zeros, mask=mask)

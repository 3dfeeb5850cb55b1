"""Two bfloat16 numbers an instruction, from compute capability 8.9 on: maxima, and codes of them.

Tensors are int16 bits. Elements are treated alike wherever they lie, so any arrangement of them
over threads gives the same codes; fewest instructions take arrangements in which a thread has eight
neighbours.
"""

import triton
import triton.language as tl

from mlacast.kernels.common.fp8_casts import cast_to_float32

_LARGER = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")

_LARGEST = tl.constexpr(
    """{
    .reg .b32 most;
    prmt.b32 most, $2, 0, 0x1032;
    max.NaN.xorsign.abs.bf16x2 most, most, $2;
    and.b32 most, most, 0x7FFF0000;
    mov.b32 $0, most;
    mov.b32 $1, most;
    }"""
)

_WIDENED = tl.constexpr(
    """{
    shl.b32 $0, $2, 16;
    and.b32 $1, $2, 0xFFFF0000;
    }"""
)

_CHOSEN = tl.constexpr("lop3.b32 $0, $1, $2, $3, 0xCA;")

# A conversion makes 0x7FFF of every NaN. Half of the last bit of 0x7F80 more carries into the sign
# of nothing else; six bits are cleared where it has.
_WITH_ONE_NAN = tl.constexpr(
    """{
    .reg .b32 more, flips, mask;
    add.u32 more, $1, 0x00400040;
    lop3.b32 flips, more, $1, $1, 0x30;
    prmt.b32 mask, flips, 0, 0xBB99;
    lop3.b32 $0, $1, mask, 0x003F003F, 0x70;
    }"""
)

_RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")

# A product with a power of two is exact, or so small that its code is zero.
_TO_E4M3 = tl.constexpr(
    """{
    .reg .b32 t<4>, lo<4>, hi<4>;
    .reg .b16 c<4>;
    mul.rn.bf16x2 t0, $2, $6;
    mul.rn.bf16x2 t1, $3, $7;
    mul.rn.bf16x2 t2, $4, $8;
    mul.rn.bf16x2 t3, $5, $9;
    shl.b32 lo0, t0, 16;
    shl.b32 lo1, t1, 16;
    shl.b32 lo2, t2, 16;
    shl.b32 lo3, t3, 16;
    and.b32 hi0, t0, 0xFFFF0000;
    and.b32 hi1, t1, 0xFFFF0000;
    and.b32 hi2, t2, 0xFFFF0000;
    and.b32 hi3, t3, 0xFFFF0000;
    cvt.rn.satfinite.e4m3x2.f32 c0, hi0, lo0;
    cvt.rn.satfinite.e4m3x2.f32 c1, hi1, lo1;
    cvt.rn.satfinite.e4m3x2.f32 c2, hi2, lo2;
    cvt.rn.satfinite.e4m3x2.f32 c3, hi3, lo3;
    mov.b32 $0, {c0, c1};
    mov.b32 $1, {c2, c3};
    }"""
)

# Codes of the numbers in $1 and $2, a byte each, by what runs beside integers. They are of one
# group, and of what is given for each of four numbers the first is taken. Numbers times the upper
# half of $3 (a power of two) are bfloat16 whose exponents have five bits: moved up by three bits
# they are float16, of the same mantissas. Their magnitudes are the upper half of $7 at most, six
# times the scale: as float16 they are in the same order, and what is NaN becomes the limit. $11 is
# two over what is left of the scale, $13 is added. Codes rise by steps of 0.5, of 1 from 2 on and
# of 2 from 4 on: a code is the least of twice a quotient, the quotient plus 2 and half of it plus
# 4, nearest even. Here all of that is 2**-9 as large, and the conversion makes the steps of its
# smallest numbers. $15 has the bits of signs that count.
_TO_E2M1 = tl.constexpr(
    """{
    .reg .b32 v<2>, b<2>, c<2>, sign, power, most, half, quarter, two, four;
    .reg .b16 low, high;
    mov.b32 half, 0x38003800;
    mov.b32 quarter, 0x34003400;
    mov.b32 two, 0x1C001C00;
    mov.b32 four, 0x20002000;
    prmt.b32 power, $3, 0, 0x3232;
    prmt.b32 most, $7, 0, 0x3232;
    mul.rn.bf16x2 v0, $1, power;
    abs.f16x2 v0, v0;
    min.f16x2 v0, v0, most;
    shl.b32 v0, v0, 3;
    mul.rn.bf16x2 v1, $2, power;
    abs.f16x2 v1, v1;
    min.f16x2 v1, v1, most;
    shl.b32 v1, v1, 3;
    fma.rn.relu.f16x2 v0, v0, $11, $13;
    fma.rn.f16x2 b0, v0, half, two;
    fma.rn.f16x2 c0, v0, quarter, four;
    fma.rn.relu.f16x2 v1, v1, $11, $13;
    fma.rn.f16x2 b1, v1, half, two;
    fma.rn.f16x2 c1, v1, quarter, four;
    min.u16x2 v0, v0, b0;
    min.u16x2 v0, v0, c0;
    min.u16x2 v1, v1, b1;
    min.u16x2 v1, v1, c1;
    cvt.rn.satfinite.e4m3x2.f16x2 low, v0;
    cvt.rn.satfinite.e4m3x2.f16x2 high, v1;
    mov.b32 v0, {low, high};
    prmt.b32 sign, $1, $2, 0xFDB9;
    and.b32 sign, sign, $15;
    or.b32 $0, v0, sign;
    }"""
)

_PAIRED = tl.constexpr("mad.lo.u32 $0, $2, 16, $1;")


@triton.jit
def choose_larger_bf16(x, y):
    """The larger magnitude of each two, with any sign; NaN is the largest."""
    return tl.inline_asm_elementwise(_LARGER, "=r,r,r", [x, y], tl.int16, is_pure=True, pack=2)


@triton.jit
def find_largest_of_pairs(x):
    """float32 bits (int32) of the larger magnitude of neighbours [.., 2], for both; NaN is it."""
    return tl.inline_asm_elementwise(_LARGEST, "=r,=r,r", [x], tl.int32, is_pure=True, pack=2)


@triton.jit
def widen(x, NATIVE: tl.constexpr):
    """Loaded values (float16, float32, or int16 bits of bfloat16) -> float32.

    NATIVE: two of a pair in two instructions, where the compiler takes four.
    """
    if NATIVE and x.dtype == tl.int16:
        return tl.inline_asm_elementwise(_WIDENED, "=f,=f,r", [x], tl.float32, is_pure=True, pack=2)
    else:
        return cast_to_float32(x)


@triton.jit
def choose_bits(mask, x, y):
    """Bits of ``x`` where ``mask`` has ones, else of ``y``; all of them int16."""
    return tl.inline_asm_elementwise(
        _CHOSEN, "=r,r,r,r", [mask, x, y], tl.int16, is_pure=True, pack=2
    )


@triton.jit
def replace_nans(x):
    """What a conversion to bfloat16 gives (int16), but 0x7FC0 for every NaN."""
    return tl.inline_asm_elementwise(_WITH_ONE_NAN, "=r,r", [x], tl.int16, is_pure=True, pack=2)


@triton.jit
def estimate_reciprocal(x):
    """1 / x of float32 within two units of the last place."""
    return tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def cast_bf16_to_e4m3(x, factor):
    """E4M3 codes (uint8) of ``x`` times ``factor``, bits of a power of two, 0 or NaN."""
    return tl.inline_asm_elementwise(
        _TO_E4M3, "=r,=r,r,r,r,r,r,r,r,r", [x, factor], tl.uint8, is_pure=True, pack=8
    )


@triton.jit
def cast_bf16_to_e2m1(x, power, most, inverse, nudge, signs):
    """E2M1 codes (uint8, one each) of bfloat16 bits ``x``, by what its scale is made of.

    Four neighbours are of one group, which has one number of each of the rest. ``power``, bits of
    float32, is 2**-112 over the power of two in the scale, and ``inverse``, bits of float16, 2**-8
    over the rest. Where ``power`` is 0 all numbers get the code 0, where it is NaN the largest.
    ``most``, bits of float32, is 2**-112 * 6 times the rest, or a little less. ``nudge``, bits of
    float16, is added to 2**-8 times a quotient. ``signs`` (int32) is 0x08080808, or 0 for codes
    without a sign.
    """
    return tl.inline_asm_elementwise(
        _TO_E2M1,
        "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [x, power, most, inverse, nudge, signs],
        tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def pair_codes(low, high):
    """Bytes of two codes of four bits each (uint8)."""
    return tl.inline_asm_elementwise(_PAIRED, "=r,r,r", [low, high], tl.uint8, is_pure=True, pack=4)

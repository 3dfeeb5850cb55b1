"""E2M1 codes of float32 in few instructions, half of them of the units that multiply.

For compute capability 8.9 and above, where they run; ``numbers`` has the arithmetic for all others,
which gives the same codes.
"""

import triton
import triton.language as tl

# Of $1..$4, which become low halves of the four bytes, and $5..$8; $9..$12 are their factors and
# $13..$16 masks of the bits that they keep: the sign, or none.
#
# A sum with b, the number times a little less than 2**22 and at least 2**22, has steps of half the
# number's power of two, and of 0.5 below 1: those of e2m1. Rounding to nearest even ends on even
# codes, because a number half way between two has so few bits that its b is even. Times 2**-14 the
# result is a float16 whose exponent, and the first bit of whose mantissa, are the code.
_TO_E2M1 = tl.constexpr(
    """{
    .reg .f32 x<8>, b<8>;
    .reg .b32 h<4>, low, high, u, v, down;
    mov.b32 down, 0x04000400;
"""
    + "".join(
        f"""
    abs.f32 x{at}, ${source};
    mul.rn.f32 x{at}, x{at}, ${9 + at % 4};
    min.f32 x{at}, x{at}, 0f40C00000;
    mul.rn.f32 b{at}, x{at}, 0f4A7FFFF0;
    max.f32 b{at}, b{at}, 0f4A800000;
    add.rn.f32 x{at}, x{at}, b{at};
    sub.rn.f32 x{at}, x{at}, b{at};
    lop3.b32 x{at}, x{at}, ${source}, ${13 + at % 4}, 0xF8;
"""
        for at, source in enumerate(range(1, 9))
    )
    + """
    cvt.rn.f16x2.f32 h0, x1, x0;
    cvt.rn.f16x2.f32 h1, x3, x2;
    cvt.rn.f16x2.f32 h2, x5, x4;
    cvt.rn.f16x2.f32 h3, x7, x6;
    mul.rn.f16x2 h0, h0, down;
    mul.rn.f16x2 h1, h1, down;
    mul.rn.f16x2 h2, h2, down;
    mul.rn.f16x2 h3, h3, down;
    prmt.b32 low, h0, h1, 0x7531;
    prmt.b32 high, h2, h3, 0x7531;
    shr.u32 u, low, 1;
    shr.u32 v, low, 4;
    and.b32 u, u, 0x07070707;
    and.b32 v, v, 0x08080808;
    or.b32 u, u, v;
    shl.b32 v, high, 3;
    and.b32 v, v, 0x70707070;
    and.b32 high, high, 0x80808080;
    or.b32 v, v, high;
    or.b32 $0, u, v;
    }"""
)


@triton.jit
def cast_to_e2m1_pairs(low, high, factor, kept):
    """Bytes of two E2M1 codes each: of ``low`` and ``high`` times ``factor``.

    Args:
        low: float32 of the low halves of the bytes.
        high: float32 of the high halves.
        factor: float32, at least 0; NaN gives the largest code.
        kept: int32, -0x80000000 to keep the sign, 0 for codes without.
    """
    return tl.inline_asm_elementwise(
        _TO_E2M1,
        "=r,f,f,f,f,f,f,f,f,f,f,f,f,r,r,r,r",
        [low, high, factor, kept],
        tl.uint8,
        is_pure=True,
        pack=4,
    )

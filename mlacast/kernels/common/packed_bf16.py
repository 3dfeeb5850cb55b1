"""Two bfloat16 numbers an instruction, from compute capability 8.9 on: maxima, and codes of them.

Tensors are int16 bits. Elements are treated alike wherever they lie, so any arrangement of them
over threads gives the same codes; fewest instructions take arrangements in which a thread has eight
neighbours.
"""

import triton
import triton.language as tl

from mlacast.kernels.common.fp8_casts import as_float32

_LARGER = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")

_WIDENED = tl.constexpr(
    """{
    shl.b32 $0, $2, 16;
    and.b32 $1, $2, 0xFFFF0000;
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

# Four bytes of two codes. A quotient times 2**-14 is a float16 whose exponent, and the first bit of
# whose mantissa, are the code: 0.5 and 0 are where float16 has its subnormal numbers. What follows
# is rounded away, nearest even, and codes above 7 are clamped before. Of $1, $2 (elements that
# become low halves of bytes) and $3, $4 (high halves) each word has two elements, $5 to $8 are
# their factors and $9 to $12 what is added.
_TO_E2M1 = tl.constexpr(
    """{
    .reg .b32 lo<4>, hi<4>, h<4>, t<4>, low, high, u, v, six;
    mov.b32 six, 0x0E000E00;
    shl.b32 lo0, $1, 16;
    and.b32 hi0, $1, 0xFFFF0000;
    shl.b32 lo1, $2, 16;
    and.b32 hi1, $2, 0xFFFF0000;
    shl.b32 lo2, $3, 16;
    and.b32 hi2, $3, 0xFFFF0000;
    shl.b32 lo3, $4, 16;
    and.b32 hi3, $4, 0xFFFF0000;
    fma.rn.f32 lo0, lo0, $5, $9;
    fma.rn.f32 hi0, hi0, $6, $10;
    fma.rn.f32 lo1, lo1, $7, $11;
    fma.rn.f32 hi1, hi1, $8, $12;
    fma.rn.f32 lo2, lo2, $5, $9;
    fma.rn.f32 hi2, hi2, $6, $10;
    fma.rn.f32 lo3, lo3, $7, $11;
    fma.rn.f32 hi3, hi3, $8, $12;
    cvt.rn.f16x2.f32 h0, hi0, lo0;
    cvt.rn.f16x2.f32 h1, hi1, lo1;
    cvt.rn.f16x2.f32 h2, hi2, lo2;
    cvt.rn.f16x2.f32 h3, hi3, lo3;
    min.xorsign.abs.f16x2 h0, h0, six;
    min.xorsign.abs.f16x2 h1, h1, six;
    min.xorsign.abs.f16x2 h2, h2, six;
    min.xorsign.abs.f16x2 h3, h3, six;
    shr.u32 t0, h0, 9;
    and.b32 t0, t0, 0x00010001;
    add.u32 h0, h0, t0;
    add.u32 h0, h0, 0x00FF00FF;
    shr.u32 t1, h1, 9;
    and.b32 t1, t1, 0x00010001;
    add.u32 h1, h1, t1;
    add.u32 h1, h1, 0x00FF00FF;
    shr.u32 t2, h2, 9;
    and.b32 t2, t2, 0x00010001;
    add.u32 h2, h2, t2;
    add.u32 h2, h2, 0x00FF00FF;
    shr.u32 t3, h3, 9;
    and.b32 t3, t3, 0x00010001;
    add.u32 h3, h3, t3;
    add.u32 h3, h3, 0x00FF00FF;
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
def larger_bf16(x, y):
    """The larger magnitude of each two, with any sign; NaN is the largest."""
    return tl.inline_asm_elementwise(_LARGER, "=r,r,r", [x, y], tl.int16, is_pure=True, pack=2)


@triton.jit
def widened(x, NATIVE: tl.constexpr):
    """Loaded values (float16, float32, or int16 bits of bfloat16) -> float32.

    NATIVE: two of a pair in two instructions, where the compiler takes four.
    """
    if NATIVE and x.dtype == tl.int16:
        return tl.inline_asm_elementwise(_WIDENED, "=f,=f,r", [x], tl.float32, is_pure=True, pack=2)
    else:
        return as_float32(x)


@triton.jit
def reciprocal(x):
    """1 / x of float32 within two units of the last place."""
    return tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def bf16_to_e4m3(x, factor):
    """E4M3 codes (uint8) of ``x`` times ``factor``, bits of a power of two, 0 or NaN."""
    return tl.inline_asm_elementwise(
        _TO_E4M3, "=r,=r,r,r,r,r,r,r,r,r", [x, factor], tl.uint8, is_pure=True, pack=8
    )


@triton.jit
def bf16_to_e2m1(low, high, factor, added):
    """Bytes of two E2M1 codes each: of ``low`` and ``high`` times ``factor`` plus ``added``.

    ``factor`` (float32) is 2**-14 over the scale, or NaN for the largest code; ``added`` is -0.0,
    or 0.0 for what shall lose its sign.
    """
    return tl.inline_asm_elementwise(
        _TO_E2M1,
        "=r,r,r,r,r,f,f,f,f,f,f,f,f",
        [low, high, factor, added],
        tl.uint8,
        is_pure=True,
        pack=4,
    )

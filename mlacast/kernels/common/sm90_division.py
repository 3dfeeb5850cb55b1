"""Divisions of float32 numbers without the division instruction, and with its bits.

Its slow path is a call, and a call spills what is kept around it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# $0 = $1 / 6 for $1 from 2**-120 on; below it is smaller than 2**-122. Infinity gives NaN. No
# float32 number is six times a number halfway between two, so that nothing is a tie.
_OVER_6_IN_FLOAT32 = gl.constexpr("""{
.reg .f32 rest;
mul.rn.f32 $0, $1, 0f3E2AAAAB;
fma.rn.f32 rest, $0, 0fC0C00000, $1;
fma.rn.f32 $0, rest, 0f3E2AAAAB, $0;
}""")

# $0 = $1 / $2 for $2 of at most 8 significant bits, where numbers, quotient and remainder are far
# from the ends of float32. The quotient is no nearer than 2**-33 of its size to a number halfway
# between two float32 ones, so that an approximate reciprocal corrects it.
_OVER_SHORT = gl.constexpr("""{
.reg .f32 inverse, negative, rest;
rcp.approx.ftz.f32 inverse, $2;
neg.f32 negative, $2;
mul.rn.f32 $0, $1, inverse;
fma.rn.f32 rest, negative, $0, $1;
fma.rn.f32 $0, rest, inverse, $0;
}""")

# $0 = $1 / 448 for $1 from 1e-10 on: its product with the rounded 1 / 448, and one correction.
# Correctly rounded for every mantissa.
_OVER_448 = gl.constexpr("""{
.reg .f32 rest;
mul.rn.f32 $0, $1, 0f3B124925;
fma.rn.f32 rest, $0, 0fC3E00000, $1;
fma.rn.f32 $0, rest, 0f3B124925, $0;
}""")

# The largest float32 number over 448.
_LARGEST_SCALE = gl.constexpr("0f7B124924")

# $0 = 1 / $1 where neither is subnormal or infinite; NaN stays NaN. If the approximation is off by
# one, 32 mantissas can be wrong after one step, and only that of all ones after two. There it is
# not off: the division instruction, which is right, has no other start and no better steps.
_NORMAL_RECIPROCAL = gl.constexpr("""{
.reg .f32 negative, rest;
rcp.approx.ftz.f32 $0, $1;
neg.f32 negative, $1;
fma.rn.f32 rest, negative, $0, 0f3F800000;
fma.rn.f32 $0, $0, rest, $0;
fma.rn.f32 rest, negative, $0, 0f3F800000;
fma.rn.f32 $0, $0, rest, $0;
}""")

# $0 = 1 / $1 for every float32. An approximation of 20 bits has 40 after one step and 52 after two.
# Rounded to float32 that is right: 1 / x is no nearer than 2**-49 of its size to a number between
# two float32 ones. Zero and infinity have no steps.
_RECIPROCAL = gl.constexpr("""{
.reg .f32 size;
.reg .f64 wide, start, near, rest;
.reg .pred steps;
abs.f32 size, $1;
setp.gt.f32 steps, size, 0f00000000;
setp.lt.and.f32 steps, size, 0f7F800000, steps;
cvt.f64.f32 wide, $1;
rcp.approx.ftz.f64 start, wide;
neg.f64 wide, wide;
fma.rn.f64 rest, wide, start, 0d3FF0000000000000;
fma.rn.f64 near, start, rest, start;
fma.rn.f64 rest, wide, near, 0d3FF0000000000000;
fma.rn.f64 near, near, rest, near;
selp.f64 near, near, start, steps;
cvt.rn.f32.f64 $0, near;
}""")

# $0 = $1 / 6 for every float32. The float64 product is off by 2**-53 of its size, and as near as
# that to a number between two float32 ones only where it is that number.
_OVER_6 = gl.constexpr("""{
.reg .f64 wide;
cvt.f64.f32 wide, $1;
mul.rn.f64 wide, wide, 0d3FC5555555555555;
cvt.rn.f32.f64 $0, wide;
}""")

# $0 = $1 / $2 for every float32 $1, where 1 / $2 is neither subnormal nor infinite: the nearest
# float64 number, and the nearest float32 one. Numbers between two float32 ones are float64 numbers,
# or too far away. A step would take the sign of a zero.
_QUOTIENT = gl.constexpr("""{
.reg .f32 size;
.reg .f64 dividend, divisor, inverse, near, rest;
.reg .pred steps;
abs.f32 size, $1;
setp.gt.f32 steps, size, 0f00000000;
setp.lt.and.f32 steps, size, 0f7F800000, steps;
cvt.f64.f32 dividend, $1;
cvt.f64.f32 divisor, $2;
rcp.approx.ftz.f64 inverse, divisor;
neg.f64 divisor, divisor;
fma.rn.f64 rest, divisor, inverse, 0d3FF0000000000000;
fma.rn.f64 inverse, inverse, rest, inverse;
mul.rn.f64 near, dividend, inverse;
fma.rn.f64 rest, divisor, near, dividend;
fma.rn.f64 rest, rest, inverse, near;
selp.f64 near, rest, near, steps;
cvt.rn.f32.f64 $0, near;
}""")


@gluon.jit
def divide_by_448(x):
    """``x / 448`` of float32 numbers from 1e-10 on."""
    return gl.inline_asm_elementwise(
        _OVER_448, "=&f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def divide_by_6(x):
    """``x / 6`` of any float32 numbers."""
    return gl.inline_asm_elementwise(_OVER_6, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def divide_by_6_in_float32(x):
    """``x / 6`` of finite float32 numbers from 2**-120 on, and something as small of smaller ones.

    NaN of an infinity.
    """
    return gl.inline_asm_elementwise(
        _OVER_6_IN_FLOAT32, "=&f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def divide_by_short(x, y):
    """``x / y`` where ``y`` has at most 8 significant bits, far from the ends of float32."""
    return gl.inline_asm_elementwise(
        _OVER_SHORT, "=&f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def divide_numbers(x, y):
    """``x / y`` of any float32 numbers over such as have a reciprocal that is a normal number."""
    return gl.inline_asm_elementwise(
        _QUOTIENT, "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def invert_normal(x):
    """``1 / x`` of float32 numbers where neither is subnormal or infinite; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        _NORMAL_RECIPROCAL, "=&f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def invert(x):
    """``1 / x`` of any float32 numbers."""
    return gl.inline_asm_elementwise(
        _RECIPROCAL, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _divide_in_place(value, divisor, inverse):
    """Instructions that divide ``value``, which is finite, given the reciprocal.

    The remainder is negated twice because that keeps the sign of a zero.
    """
    return (
        f"neg.f32 rest, {value}; mul.rn.f32 {value}, {value}, {inverse}; "
        f"fma.rn.f32 rest, {value}, {divisor}, rest; neg.f32 rest, rest; "
        f"fma.rn.f32 {value}, rest, {inverse}, {value}; "
    )


@gluon.constexpr_function
def _make_finite():
    """Instructions that make infinite accumulators the largest number.

    Nearly always there are none: only the largest scale, that of the largest number, is one of a
    group with an infinity. A scale without a number is not compared, and codes of its group are
    the same whatever the elements are.
    """
    clamps = "".join(
        f"max.f32 ${place}, ${place}, 0fFF7FFFFF; min.f32 ${place}, ${place}, 0f7F7FFFFF; "
        for place in range(64)
    )
    return (
        f"setp.ge.f32 some, $128, {_LARGEST_SCALE.value}; "
        f"setp.ge.or.f32 some, $130, {_LARGEST_SCALE.value}, some; "
        f"vote.sync.any.pred some, some, 0xffffffff; @!some bra FINITE; {clamps} FINITE: "
    )


@gluon.constexpr_function
def write_division(GROUP):
    """Divide a thread's 64 accumulators in place, one after the other.

    Infinite ones count as the largest number. Divisors are scales: their groups' largest
    magnitudes, or the largest number, over 448.

    ``$64``.. are the accumulators again, ``$128``.. their divisors, ``$192``.. the reciprocals. Of
    smaller groups than 128 these are those that a lane was dealt, of two rows, and go to the quad
    when they are needed: spread beforehand they would take 16 registers.
    """
    lines = _make_finite()
    for first in range(0, 64, 16):
        for row in (0, 2):
            divisor, inverse = f"${128 + first + row}", f"${192 + first + row}"
            if GROUP != 128:
                for name, source in (("divisor", divisor), ("inverse", inverse)):
                    lines += f"shfl.sync.idx.b32 {name}, {source}, {first // 16}, 0x1c1f, -1; "
                divisor, inverse = "divisor", "inverse"
            for step in range(0, 16, 4):
                for place in (first + row + step, first + row + step + 1):
                    lines += _divide_in_place(f"${place}", divisor, inverse)
    return f"{{ .reg .f32 rest, divisor, inverse; .reg .pred some; {lines}}}"


DIVISION_OPERANDS = gl.constexpr(",".join(["=f"] * 64 + [str(i) for i in range(64)] + ["f"] * 128))

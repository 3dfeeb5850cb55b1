"""Scales of the groups of an accumulator of a Hopper kernel, and its numbers over them.

Same bits as ``mlacast.kernels.common.store`` of the normalised output. What is the same for all of
a quad is dealt out to its lanes: the next tile's products wait for every instruction here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_division import (
    DIVISION_OPERANDS,
    divide_by_448,
    invert_normal,
    write_division,
)
from mlacast.kernels.common.sm90_quads import (
    choose_larger_or_nan,
    deal_max,
    join_max_of_neighbours,
    undeal,
)
from mlacast.kernels.common.sm90_store import (
    FLOAT32_MAX,
    FP8_FLOAT32,
    FP8_FLOAT32_POW2,
)

BLOCK_H = gl.constexpr(64)


@gluon.jit
def _view_pairs(x, GROUP: gl.constexpr):
    """View [64, 128] as [64, groups, steps of 8, lane, 2]; groups of 64 as two of 32 each."""
    WIDTH: gl.constexpr = 32 if GROUP == 64 else GROUP
    return gl.reshape(x, (BLOCK_H, 128 // WIDTH, WIDTH // 8, 4, 2))


@gluon.jit
def _find_group_max(pairs, GROUP: gl.constexpr):
    """Largest magnitudes: [64, 1] of groups of 128, in all lanes of a quad.

    Of smaller groups [64, 4], dealt to the lanes: the n-th of 32 is in lane n, the n-th of 64 in
    lanes 2n and 2n + 1.
    """
    by_lane = gl.reduce(gl.reduce(gl.abs(pairs), 4, choose_larger_or_nan), 2, choose_larger_or_nan)
    if GROUP == 128:
        return gl.reduce(by_lane, 2, choose_larger_or_nan)
    else:
        dealt = deal_max(by_lane)
        return join_max_of_neighbours(dealt) if GROUP == 64 else dealt


@gluon.jit
def _spread(value, pairs, GROUP: gl.constexpr):
    """Repeat a number per head and group, as ``_find_group_max`` has them, over ``_view_pairs``."""
    BY_LANE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, pairs.type.layout))
    if GROUP == 128:
        # [64, 1]
        of_groups = gl.convert_layout(value, gl.SliceLayout(2, BY_LANE), assert_trivial=True)
        of_lanes = gl.expand_dims(of_groups, 2)
    else:
        of_lanes = gl.convert_layout(undeal(value), BY_LANE, assert_trivial=True)  # [64, 4, 4]
    wide = gl.expand_dims(gl.expand_dims(of_lanes, 2), 4)
    return gl.broadcast(wide, pairs)[0]


@gluon.jit
def _put_beside(value, pairs):
    """Dealt numbers [64, 4] beside all ``_view_pairs`` columns of the lane that has them."""
    LANES: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, pairs.type.layout))
    lanes = gl.convert_layout(value, gl.SliceLayout(1, LANES), assert_trivial=True)  # [64, 4]
    wide = gl.expand_dims(gl.expand_dims(gl.expand_dims(lanes, 1), 2), 4)
    return gl.broadcast(wide, pairs)[0]


@gluon.jit
def _divide(pairs, divisor, GROUP: gl.constexpr):
    """IEEE quotients, like ``pairs``: a reciprocal per group, and one correction per element.

    ``divisor`` is as ``_find_group_max`` has it.

    One element after the other, so that intermediate results do not fill the registers.
    """
    reciprocal = invert_normal(divisor)
    if GROUP == 128:
        divisors = _spread(divisor, pairs, GROUP)
        reciprocals = _spread(reciprocal, pairs, GROUP)
    else:
        divisors = _put_beside(divisor, pairs)
        reciprocals = _put_beside(reciprocal, pairs)
    return gl.inline_asm_elementwise(
        write_division(GROUP),
        DIVISION_OPERANDS,
        [pairs, divisors, reciprocals],
        dtype=gl.float32,
        is_pure=False,
        pack=64,
    )


@gluon.jit
def find_group_scales(
    x,
    factor,
    alive,
    MASKED: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Scales of the groups of ``x * factor`` [64, 128].

    A group with a NaN has only NaN codes; an infinity takes the largest scale.

    Returns:
        what ``divide_by_scales`` makes ``x * factor`` over scales from, columns and numbers of
        groups; and the scales as they are stored, placed as by ``_find_group_max``.
    """
    if OUTPUT.kind == FP8_FLOAT32:
        x = (
            x
            * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout), assert_trivial=True)[
                :, None
            ]
        )
    pairs = _view_pairs(x, OUTPUT.group)  # [64, groups, steps, 4, 2]
    amax = _find_group_max(pairs, OUTPUT.group)  # [64, 1] or [64, 4]
    ROW: gl.constexpr = gl.SliceLayout(1, amax.type.layout)
    per_head = gl.convert_layout(factor, ROW, assert_trivial=True)[:, None]  # [64, 1]
    if OUTPUT.kind != FP8_FLOAT32:
        # Rounding keeps order, so this is the amax of the products.
        amax = amax * gl.abs(per_head)
    if MASKED:
        is_alive = gl.convert_layout(alive, ROW, assert_trivial=True)[:, None] != 0
        amax = gl.where(gl.broadcast(is_alive, amax)[0], amax, 0.0)
    # Like ``amax`` from here on: floors, exponents, scales.
    has_nan = amax != amax
    floored = gl.maximum(amax, OUTPUT.amax_floor)
    if OUTPUT.kind == FP8_FLOAT32:
        scale = divide_by_448(gl.minimum(floored, FLOAT32_MAX))
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
def divide_by_scales(pairs, scale, OUTPUT: gl.constexpr):
    """Numbers [64, 128] to be rounded to codes, from what ``find_group_scales`` returns."""
    if OUTPUT.kind == FP8_FLOAT32:
        ratio = _divide(pairs, scale, OUTPUT.group)
    else:
        ratio = pairs * _spread(scale, pairs, OUTPUT.group)
    return gl.reshape(ratio, (BLOCK_H, 128))

"""Columns of latents before they are encoded: parts of a row, the norm, the rotation.

A row's first 512 dimensions are parts, one behind the other, and a part is two tiles ``a`` and
``b`` [ROWS, C]: RUN columns of each in turn. With RUN = 8 a thread that loads 16 bytes of each has
16 neighbours: whole groups, and what is computed for a group is computed once.
"""

import triton
import triton.language as tl

from mlacast.kernels.common.fp8_casts import cast_to_bf16_bits, cast_to_float32
from mlacast.kernels.common.packed_bf16 import choose_bits, replace_nans, widen


@triton.jit
def load_parts(places, PARTS: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr):
    """Tiles ``a`` and ``b`` [ROWS, C] of each part: at ``places`` [ROWS, C] and RUN further.

    A part is STEP further than the one before.
    """
    a, b = (), ()
    for part in tl.static_range(PARTS):
        a = a + (tl.load(places + part * STEP),)
        b = b + (tl.load(places + (part * STEP + RUN)),)
    return a, b


@triton.jit
def _sum_neighbours(x, ROWS: tl.constexpr, N: tl.constexpr, LEVELS: tl.constexpr):
    """Sums of 2**LEVELS neighbours of [ROWS, N], two at a time."""
    for level in tl.static_range(LEVELS):
        # A sum of two is the same in either order; one of more is what the compiler makes of it.
        x = tl.sum(tl.reshape(x, (ROWS, (N // 2) >> level, 2)), 2)
    return x


@triton.jit
def _square_pairs(x, ROWS: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr):
    """Sums of the squares of two neighbours each of [ROWS, N]."""
    if EXACT:
        one, other = tl.split(tl.reshape(x, (ROWS, N // 2, 2)))  # [ROWS, N / 2] each
        # No product is rounded: the same sum, in an instruction less.
        return tl.fma(one, one, other * other)
    else:
        return tl.sum(tl.reshape(x * x, (ROWS, N // 2, 2)), 2)


@triton.jit
def _sum_part(
    a,
    b,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    RUN: tl.constexpr,
    EXACT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Sums over the squares of 2 * C neighbours, RUN of ``a`` and ``b`` [ROWS, C] in turn."""
    # ``left`` and ``right`` are [ROWS, C / RUN].
    LEVELS: tl.constexpr = 7 if C == 256 else (6 if C == 128 else 5)
    IN_RUN: tl.constexpr = 2 if RUN == 8 else LEVELS
    left = _sum_neighbours(_square_pairs(widen(a, NATIVE), ROWS, C, EXACT), ROWS, C // 2, IN_RUN)
    right = _sum_neighbours(_square_pairs(widen(b, NATIVE), ROWS, C, EXACT), ROWS, C // 2, IN_RUN)
    total = _sum_neighbours(left + right, ROWS, C // RUN, LEVELS - IN_RUN)  # [ROWS, 1]
    return tl.reshape(total, (ROWS,))


@triton.jit
def sum_squares(
    a,
    b,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    RUN: tl.constexpr,
    EXACT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Sum over the squares of 512 columns, parts of RUN of ``a`` and ``b`` [ROWS, C] in turn.

    float32 [ROWS], neighbours first: the same additions on every device. EXACT: squares are numbers
    of float32.
    """
    sums = ()
    for part in tl.static_range(len(a)):
        sums = sums + (_sum_part(a[part], b[part], ROWS, C, RUN, EXACT, NATIVE),)
    if len(sums) == 1:
        return sums[0]
    elif len(sums) == 2:
        return sums[0] + sums[1]
    else:
        return (sums[0] + sums[1]) + (sums[2] + sums[3])


@triton.jit
def round_to_bfloat16(x, KEEPS_NAN: tl.constexpr, NATIVE: tl.constexpr):
    """float32 -> bfloat16 bits (int16); which bits a NaN has matters with KEEPS_NAN only."""
    if NATIVE:
        bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
        return replace_nans(bits) if KEEPS_NAN else bits
    else:
        return cast_to_bf16_bits(x, NATIVE)


@triton.jit
def norm_columns(
    x,
    factor,
    weight,
    KEEPS_NAN: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Columns of normed rows [ROWS, C], rounded to bfloat16: bits.

    ``weight`` [n, C] is the same for all of n rows, or None for ones. Which bits a NaN has does not
    matter unless KEEPS_NAN.
    """
    x = x * factor[:, None]
    if weight is not None:
        ROWS: tl.constexpr = x.shape[0]
        C: tl.constexpr = x.shape[1]
        N: tl.constexpr = weight.shape[0]
        # [ROWS / N, N, C]
        by_pass = tl.reshape(x, (ROWS // N, N, C)) * widen(weight, NATIVE)[None, :, :]
        x = tl.reshape(by_pass, (ROWS, C))
    return round_to_bfloat16(x, KEEPS_NAN, NATIVE)


@triton.jit
def rotate_neighbours(x, cos, sin, ROWS: tl.constexpr, C: tl.constexpr):
    """Rotate neighbours of [ROWS, C] by ``cos``, ``sin`` [ROWS, C / 2]: float32."""
    even, odd = tl.split(tl.reshape(x, (ROWS, C // 2, 2)))  # [ROWS, C / 2] each
    both = tl.join(even * cos - odd * sin, odd * cos + even * sin)  # [ROWS, C / 2, 2]
    return tl.reshape(both, (ROWS, C))


@triton.jit
def rotate_pairs(first, second, cos, sin, KEEPS_NAN: tl.constexpr, NATIVE: tl.constexpr):
    """Rotate pairs by ``cos``, ``sin``, float32 of one shape: bfloat16 bits (int16) of both."""
    rotated = round_to_bfloat16(first * cos - second * sin, KEEPS_NAN, NATIVE)
    return rotated, round_to_bfloat16(second * cos + first * sin, KEEPS_NAN, NATIVE)


@triton.jit
def find_turned_pairs(C: tl.constexpr, HALF_PAIRING: tl.constexpr):
    """Pairs of the last 32 columns of a tile ``a`` [ROWS, C] of the last part.

    One number a column with HALF_PAIRING, else one for two; columns before get the same numbers.
    """
    if HALF_PAIRING:
        i = tl.arange(0, C)  # [C]
        return (i // 8) % 2 * 16 + i % 8
    else:
        i = tl.arange(0, C // 2)  # [C / 2]
        return (i // 4) % 4 * 8 + i % 4


@triton.jit
def turn(x, cos, sin, HALF_PAIRING: tl.constexpr, NATIVE: tl.constexpr):
    """Rotate the last 32 columns of a tile ``x`` [ROWS, C] of the last part.

    ``cos`` and ``sin`` are [ROWS, C] with HALF_PAIRING, else [ROWS, C / 2].
    """
    ROWS: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    group = tl.arange(0, C) // 8  # [C]
    if HALF_PAIRING:
        # Columns 16 apart are 32 dimensions apart. Of the bits of two, either is what the other
        # leaves of their exclusive or.
        bits = x
        if x.dtype != tl.int16:
            BITS: tl.constexpr = tl.int32 if x.dtype == tl.float32 else tl.int16
            bits = x.to(BITS, bitcast=True)
        pairs = tl.reshape(bits, (ROWS, C // 32, 2, 16))  # [ROWS, C / 32, 2, 16]
        # [ROWS, C]
        partner = tl.reshape(pairs ^ tl.xor_sum(pairs, 2, keep_dims=True), (ROWS, C)).to(bits.dtype)
        if x.dtype != tl.int16:
            partner = partner.to(x.dtype, bitcast=True)
        sin = tl.where((group // 2 % 2 == 0)[None, :], -sin, sin)
        out = widen(x, NATIVE) * cos + widen(partner, NATIVE) * sin
    else:
        out = rotate_neighbours(widen(x, NATIVE), cos, sin, ROWS, C)
    out = round_to_bfloat16(out, False, NATIVE)
    is_turned = (group >= C // 8 - 4)[None, :]  # [1, C]
    if NATIVE and x.dtype == tl.int16:
        return choose_bits(
            tl.broadcast_to(tl.where(is_turned, -1, 0).to(tl.int16), (ROWS, C)), out, x
        )
    elif x.dtype == tl.int16:
        return tl.where(is_turned, out, x)
    else:
        return tl.where(is_turned, widen(out, NATIVE), cast_to_float32(x))

"""Tiles of latent dimensions as codes and scales: the encoders of ``kv_cache_append``.

A tile of N = 2 * C columns comes as two, ``a`` and ``b`` [ROWS, C]: of every 16 columns the first
eight are in ``a`` and the others in ``b`` (see ``kv_cache_append_columns``). Tiles are int16, bits
of bfloat16, or numbers.

A group that is not finite costs its elements nothing: the factor that they are multiplied with is
chosen so that the cast gives the codes it must have (a NaN makes every code 0x7F; 0.0 makes
infinities NaN and the rest signed zeros).
"""

import triton
import triton.language as tl

from mlacast.kernels.common.fp8_casts import cast_from_e4m3, cast_to_float32, cast_to_fp8
from mlacast.kernels.common.numbers import encode_e2m1_numbers
from mlacast.kernels.common.packed_bf16 import (
    cast_bf16_to_e2m1,
    cast_bf16_to_e4m3,
    choose_larger_bf16,
    estimate_reciprocal,
    find_largest_of_pairs,
    pair_codes,
    widen,
)

_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _merge_runs(a, b, ROWS: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr):
    """[ROWS, 2 * C] of ``a`` and ``b`` [ROWS, C], RUN columns of each in turn."""
    # [ROWS, C / RUN, RUN] both.
    one = tl.reshape(a, (ROWS, C // RUN, RUN))
    other = tl.reshape(b, (ROWS, C // RUN, RUN))
    return tl.reshape(tl.permute(tl.join(one, other), (0, 1, 3, 2)), (ROWS, 2 * C))


@triton.jit
def _repeat_per_column(group, ROWS: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr):
    """A value of each of GROUPS groups, ``group`` [ROWS, GROUPS], for every column [ROWS, C]."""
    wide = tl.broadcast_to(tl.expand_dims(group, 2), (ROWS, GROUPS, C // GROUPS))
    return tl.reshape(wide, (ROWS, C))


@triton.jit
def _find_largest(
    a, b, ROWS: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr, NATIVE: tl.constexpr
):
    """float32 bits of the largest magnitude of each group, int32 [ROWS, GROUPS].

    NaN is above infinity.
    """
    if NATIVE and a.dtype == tl.int16:
        # Halves of what a thread has meet, so that pairs stay pairs as long as possible.
        halves = tl.permute(
            tl.reshape(choose_larger_bf16(a, b), (ROWS, C // 8, 2, 4)), (0, 1, 3, 2)
        )
        left, right = tl.split(halves)  # [ROWS, C / 8, 4] each
        halves = tl.permute(
            tl.reshape(choose_larger_bf16(left, right), (ROWS, C // 8, 2, 2)), (0, 1, 3, 2)
        )
        left, right = tl.split(halves)  # [ROWS, C / 8, 2] each
        # [ROWS, C / 8]
        bits, _ = tl.split(find_largest_of_pairs(choose_larger_bf16(left, right)))
        return tl.max(tl.reshape(bits, (ROWS, GROUPS, C // 8 // GROUPS)), 2)
    else:
        # [ROWS, C]
        bits = cast_to_float32(a).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        bits = tl.maximum(bits, cast_to_float32(b).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        return tl.max(tl.reshape(bits, (ROWS, GROUPS, C // GROUPS)), 2)


@triton.jit
def _encode_pow2_codes(x, inverse, NATIVE: tl.constexpr):
    """E4M3 codes (uint8) of ``x`` times ``inverse``, float32 of the same shape."""
    if NATIVE and x.dtype == tl.int16:
        return cast_bf16_to_e4m3(x, (inverse.to(tl.int32, bitcast=True) >> 16).to(tl.int16))
    else:
        return cast_to_fp8(cast_to_float32(x) * inverse, False, NATIVE)


@triton.jit
def encode_fp8(a, b, ROWS: tl.constexpr, C: tl.constexpr, NATIVE: tl.constexpr):
    """E4M3 codes (uint8 [ROWS, N]) without scales."""
    codes = cast_to_fp8(widen(a, NATIVE), False, NATIVE)
    return _merge_runs(codes, cast_to_fp8(widen(b, NATIVE), False, NATIVE), ROWS, C, 8)


@triton.jit
def encode_pow2(
    a,
    b,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    VEC: tl.constexpr,
    V32: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """E4M3 codes (uint8 [ROWS, N]) with power-of-two scales, and those [ROWS, N / VEC].

    The scales are UE8M0 bytes (int32), for V32 the bits of their float32 values.
    """
    GROUPS: tl.constexpr = 2 * C // VEC
    # [ROWS, GROUPS], and so is what comes of it up to ``wide``.
    largest = _find_largest(a, b, ROWS, C, GROUPS, NATIVE)
    # The smallest power of two not below largest / 448, and not below 1e-4: 448 is 1.75 * 2**8, so
    # a mantissa above 1.75 carries into the exponent. No quotient is so near a power of two that
    # rounding it to float32 would decide.
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 114)
    # Dividing by a power of two is exact as a product.
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    if V32:
        inverse = tl.where(largest >= _INFINITY, float("nan"), inverse)
        scales = tl.where(largest >= _INFINITY, 0x7FC00000, exponent << 23)
    else:
        special = tl.where(largest == _INFINITY, 0.0, float("nan"))
        inverse = tl.where(largest >= _INFINITY, special, inverse)
        scales = tl.where(largest >= _INFINITY, 0xFF, exponent)
    wide = _repeat_per_column(inverse, ROWS, GROUPS, C)  # [ROWS, C]
    codes = _merge_runs(
        _encode_pow2_codes(a, wide, NATIVE), _encode_pow2_codes(b, wide, NATIVE), ROWS, C, 8
    )
    return codes, scales


@triton.jit
def _encode_e2m1_over(x, scale):
    """Codes 0..15 (int32) of ``x / scale``, in their common shape, without dividing every element.

    A boundary times a scale of four bits is exact, and a float32 lies above the product exactly if
    its rounded quotient lies above the boundary.
    """
    a = tl.abs(x)
    # One bit after the other: boundaries that round up to an even code belong to it.
    high = a >= 1.75 * scale
    middle = a >= tl.where(high, 3.5 * scale, 0.75 * scale)
    below = tl.where(high, 2.5 * scale, 0.25 * scale)
    low = a > tl.where(middle, tl.where(high, 5.0 * scale, 1.25 * scale), below)
    code = tl.where(high, 4, 0) | tl.where(middle, 2, 0) | low.to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 0x8)


@triton.jit
def _encode_fp4_pairs(
    x,
    decoded,
    forced,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    GROUPS: tl.constexpr,
    NVFP4: tl.constexpr,
):
    """E2M1 codes, two a byte (uint8 [ROWS, C / 2]), of ``x`` [ROWS, C] by scales ``decoded``.

    ``forced`` replaces bytes unless negative; it and the scales are [ROWS, GROUPS].
    """
    # [ROWS, GROUPS, C / GROUPS], and so are the codes; halves of bytes are half as many.
    grouped = tl.reshape(cast_to_float32(x), (ROWS, GROUPS, C // GROUPS))
    if NVFP4:
        inverse = tl.math.div_rn(1.0, tl.where(decoded == 0.0, 1.0, decoded))
        codes = encode_e2m1_numbers(grouped * tl.expand_dims(inverse, 2))
    else:
        codes = _encode_e2m1_over(grouped, tl.expand_dims(decoded, 2))
    low, high = tl.split(tl.reshape(codes, (ROWS, GROUPS, C // GROUPS // 2, 2)))
    forced = tl.expand_dims(forced, 2)
    packed = tl.where(forced >= 0, forced, low | (high << 4)).to(tl.uint8)
    return tl.reshape(packed, (ROWS, C // 2))


@triton.jit
def _find_pair_factors(decoded, finite, NVFP4: tl.constexpr):
    """What ``cast_bf16_to_e2m1`` takes of a scale ``decoded`` (float32) of a group.

    Arguments and results are [ROWS, GROUPS].
    """
    bits = decoded.to(tl.int32, bitcast=True)
    mantissa = bits & 0x7FFFFF
    # A group without a scale has codes of zeros, one that is not finite the largest.
    counts = finite & (decoded != 0.0) if NVFP4 else finite
    power = tl.where(finite, 0x47000000 - (bits & 0x7F800000), 0x7FC00000)
    if NVFP4:
        power = tl.where(decoded == 0.0, 0, power)
    signs = tl.where(counts, 0x08080808, 0)
    # 2**8 times the rest, and 2**-6 less: rounded to float16, what is left of a tie would be below
    # it for one of eight mantissas.
    rest = 0x43800000 - 0x200
    nudge = tl.zeros(bits.shape, tl.int16)
    if NVFP4:
        # The float32 reciprocal of 1.875 times a power of two is too large: what it makes of a
        # number in the middle of two codes goes up, not to the even code, but for that in the
        # middle of 0 and 0.5, where it is rounded away.
        is_large = mantissa == 0x700000
        rest = tl.where(is_large, 0x43800000 - 0xB000, rest)
        nudge = tl.where(is_large, -0x7FDC, 0).to(tl.int16)
    rest = (mantissa + rest).to(tl.float32, bitcast=True)
    # Times 2**-120 * 6.
    most = (rest * 4.513898307157584e-36).to(tl.int32, bitcast=True)
    inverse = estimate_reciprocal(rest).to(tl.float16).to(tl.int16, bitcast=True)
    return power, most, inverse, nudge, signs


@triton.jit
def _encode_packed_fp4_pairs(
    x,
    power,
    most,
    inverse,
    nudge,
    signs,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """E2M1 codes, two a byte (uint8 [ROWS, C / 2]), of bfloat16 bits ``x`` [ROWS, C].

    The rest, of ``_find_pair_factors``, is [ROWS, GROUPS].
    """
    codes = cast_bf16_to_e2m1(  # [ROWS, C]
        x,
        _repeat_per_column(power, ROWS, GROUPS, C),
        _repeat_per_column(most, ROWS, GROUPS, C),
        _repeat_per_column(inverse, ROWS, GROUPS, C),
        _repeat_per_column(nudge, ROWS, GROUPS, C),
        _repeat_per_column(signs, ROWS, GROUPS, C),
    )
    low, high = tl.split(tl.reshape(codes, (ROWS, C // 2, 2)))
    return pair_codes(low, high)


@triton.jit
def encode_fp4(
    a, b, ROWS: tl.constexpr, C: tl.constexpr, NVFP4: tl.constexpr, NATIVE: tl.constexpr
):
    """E2M1 codes, two a byte (uint8 [ROWS, N / 2]), and E4M3 scales (uint8 [ROWS, N / 16]).

    NVFP4: a scale may be 0, and codes come from a product with the reciprocal. Otherwise the scale
    is at least 2**-9 and codes come from the quotient.
    """
    GROUPS: tl.constexpr = C // 8
    # [ROWS, GROUPS], and so are scales; codes of ``a`` and of ``b`` are [ROWS, C / 2].
    largest = _find_largest(a, b, ROWS, C, GROUPS, NATIVE)
    finite = largest < _INFINITY
    value = largest.to(tl.float32, bitcast=True)
    PACKED: tl.constexpr = NATIVE and a.dtype == tl.int16
    # A number of eight bits is no nearer to six times the middle of two scales than a rounding,
    # unless it is that, and then a product with the reciprocal of 6 is exact too.
    ratio = value * 0.16666667163372040 if PACKED else tl.math.div_rn(value, 6.0)
    if not NVFP4:
        ratio = tl.maximum(ratio, 0.001953125)
    if not PACKED:
        ratio = tl.where(finite, ratio, 0.0)
    scales = cast_to_fp8(ratio, False, NATIVE)
    decoded = cast_from_e4m3(scales, NATIVE)
    if PACKED:
        power, most, inverse, nudge, signs = _find_pair_factors(decoded, finite, NVFP4)
        codes = _encode_packed_fp4_pairs(a, power, most, inverse, nudge, signs, ROWS, C, GROUPS)
        other = _encode_packed_fp4_pairs(b, power, most, inverse, nudge, signs, ROWS, C, GROUPS)
    else:
        # What becomes of the bytes of a group whose elements do not matter.
        forced = tl.where(finite, -1, 0x77)
        if NVFP4:
            forced = tl.where(finite & (scales == 0), 0, forced)
        codes = _encode_fp4_pairs(a, decoded, forced, ROWS, C, GROUPS, NVFP4)
        other = _encode_fp4_pairs(b, decoded, forced, ROWS, C, GROUPS, NVFP4)
    scales = tl.where(finite, scales, 0x7F).to(tl.uint8)
    return _merge_runs(codes, other, ROWS, C // 2, 4), scales

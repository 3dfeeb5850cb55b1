"""Tiles of latent dimensions as codes and scales: the encoders of ``kv_cache_append``.

``x`` is float32 [ROWS, C]. A group that is not finite costs its elements nothing: the factor that
they are multiplied with is chosen so that the cast gives the codes it must have (a NaN makes every
code 0x7F; 0.0 makes infinities NaN and the rest signed zeros).
"""

import triton
import triton.language as tl

from mlacast.kernels.common.fp8_casts import from_bf16_bits, from_e4m3, to_bf16_bits, to_fp8
from mlacast.kernels.common.numbers import encode_e2m1_numbers, encode_ue8m0

_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _largest(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, VEC: tl.constexpr):
    """Bits of the largest magnitude of a group, int32 [ROWS, GROUPS]; NaN is above infinity."""
    bits = tl.reshape(x, (ROWS, GROUPS, VEC)).to(tl.int32, bitcast=True)
    return tl.max(bits & 0x7FFFFFFF, 2)


@triton.jit
def encode_pow2(
    x,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    VEC: tl.constexpr,
    V32: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """E4M3 codes (uint8 [ROWS, C]) with power-of-two scales, and those scales [ROWS, C / VEC].

    The scales are UE8M0 bytes (int32), for V32 the bits of their float32 values.
    """
    largest = _largest(x, ROWS, C // VEC, VEC)
    ratio = tl.math.div_rn(largest.to(tl.float32, bitcast=True), 448.0)
    exponent = encode_ue8m0(tl.maximum(ratio, 1e-4))
    # Dividing by a power of two is exact as a product.
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(largest == _INFINITY, float("nan") if V32 else 0.0, inverse)
    inverse = tl.where(largest > _INFINITY, float("nan"), inverse)
    grouped = tl.reshape(x, (ROWS, C // VEC, VEC)) * tl.expand_dims(inverse, 2)
    codes = tl.reshape(to_fp8(grouped, False, NATIVE), (ROWS, C))
    if V32:
        scales = tl.where(largest >= _INFINITY, 0x7FC00000, exponent << 23)
    else:
        scales = tl.where(largest >= _INFINITY, 0xFF, exponent)
    return codes, scales


@triton.jit
def _encode_e2m1_over(x, scale):
    """Codes 0..15 (int32) of ``x / scale``, without dividing every element.

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
def encode_fp4(x, ROWS: tl.constexpr, C: tl.constexpr, NVFP4: tl.constexpr, NATIVE: tl.constexpr):
    """E2M1 codes, two a byte (uint8 [ROWS, C / 2]), and E4M3 scales (uint8 [ROWS, C / 16]).

    NVFP4: a scale may be 0, and codes come from a product with the reciprocal. Otherwise the scale
    is at least 2**-9 and codes come from the quotient.
    """
    GROUPS: tl.constexpr = C // 16
    largest = _largest(x, ROWS, GROUPS, 16)
    finite = largest < _INFINITY
    ratio = tl.math.div_rn(largest.to(tl.float32, bitcast=True), 6.0)
    if not NVFP4:
        ratio = tl.maximum(ratio, 0.001953125)
    scales = to_fp8(tl.where(finite, tl.minimum(ratio, 448.0), 0.0), False, NATIVE)
    decoded = from_e4m3(scales, NATIVE)
    grouped = tl.reshape(x, (ROWS, GROUPS, 16))
    # What becomes of the bytes of a group whose elements do not matter.
    forced = tl.where(finite, -1, 0x77)
    if NVFP4:
        is_zero = scales == 0
        forced = tl.where(finite & is_zero, 0, forced)
        inverse = tl.math.div_rn(1.0, tl.where(is_zero, 1.0, decoded))
        codes = encode_e2m1_numbers(grouped * tl.expand_dims(inverse, 2))
    else:
        codes = _encode_e2m1_over(grouped, tl.expand_dims(decoded, 2))
    low, high = tl.split(tl.reshape(codes, (ROWS, GROUPS, 8, 2)))
    forced = tl.expand_dims(forced, 2)
    packed = tl.where(forced >= 0, forced, low | (high << 4)).to(tl.uint8)
    scales = tl.where(finite, scales, 0x7F).to(tl.uint8)
    return tl.reshape(packed, (ROWS, C // 2)), scales


@triton.jit
def bf16_bytes(bits, ROWS: tl.constexpr, C: tl.constexpr):
    """int16 [ROWS, C] -> its bytes, uint8 [ROWS, 2 * C]: a record may start at any address."""
    wide = bits.to(tl.int32)
    pairs = tl.join((wide & 0xFF).to(tl.uint8), ((wide >> 8) & 0xFF).to(tl.uint8))
    return tl.reshape(pairs, (ROWS, 2 * C))


@triton.jit
def word_bytes(words, ROWS: tl.constexpr, C: tl.constexpr):
    """int32 [ROWS, C] -> its bytes, uint8 [ROWS, 4 * C]."""
    shifted = tl.expand_dims(words, 2) >> (tl.arange(0, 4) * 8)[None, None, :]
    return tl.reshape((shifted & 0xFF).to(tl.uint8), (ROWS, 4 * C))


@triton.jit
def round_to_bf16(x, NATIVE: tl.constexpr):
    """float32 -> the nearest bfloat16, as float32; every NaN becomes 0x7FC0."""
    return from_bf16_bits(to_bf16_bits(x, NATIVE))


@triton.jit
def bits_of(x, IS_BF16: tl.constexpr, NATIVE: tl.constexpr):
    """bfloat16 bits (int16) of float32 values; IS_BF16 says that they have no other bits."""
    if IS_BF16:
        return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    else:
        return to_bf16_bits(x, NATIVE)


@triton.jit
def sum_of_squares(x):
    """Sum over 256 squares, [ROWS], neighbours first: the same additions on every device."""
    ROWS: tl.constexpr = x.shape[0]
    partial = x * x
    for level in tl.static_range(8):
        # A sum of two is the same in either order; one of more is what the compiler makes of it.
        partial = tl.sum(tl.reshape(partial, (ROWS, 128 >> level, 2)), 2)
    return tl.reshape(partial, (ROWS,))


@triton.jit
def rotate_pairs(x, cos, sin, ROWS: tl.constexpr, HALF_PAIRING: tl.constexpr, NATIVE: tl.constexpr):
    """Rotate 64 columns by ``cos``, ``sin`` [ROWS, 32]; the result is rounded to bfloat16."""
    if HALF_PAIRING:
        first, second = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, 32)), (0, 2, 1)))
    else:
        first, second = tl.split(tl.reshape(x, (ROWS, 32, 2)))
    rotated = tl.join(first * cos - second * sin, second * cos + first * sin)
    if HALF_PAIRING:
        rotated = tl.permute(rotated, (0, 2, 1))
    return round_to_bf16(tl.reshape(rotated, (ROWS, 64)), NATIVE)

"""Number formats inside kernels, by integer arithmetic: the same bits on every device.

No FP8 type is used, so the code also runs where the hardware has none, and under the interpreter.
"""

import triton
import triton.language as tl


@triton.jit
def make_negative_zero():
    """-0.0, which the language takes for 0.0 where it is written as a number."""
    return tl.full((), -0x80000000, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def decode_e4m3(codes):
    """Codes (uint8, any shape) -> float32.

    Moved up by seven bits, a code is the float16 of 2**-8 times its value.
    """
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def encode_e4m3(x):
    """float32 -> codes (int32): clamped to +-448, nearest even, NaN -> 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    raw = magnitude.to(tl.int32, bitcast=True)
    # Normal codes: round the mantissa to three bits, move the exponent bias from 127 to 7.
    rounded = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal codes count steps of 2**-9; adding 1.5 * 2**23 rounds to an integer, nearest even.
    steps = (magnitude * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, steps, rounded) | sign
    return tl.where(x != x, 0x7F, code)


@triton.jit
def encode_e2m1_numbers(x):
    """float32 -> codes 0..15 (int32): nearest even, saturating at +-6; NaN gets any code."""
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 0x8
    a = tl.minimum(tl.abs(x), 6.0)
    # Numbers of 1.5 * 2**23 steps round what is added to them to a whole step, nearest even. Steps
    # are 0.5 below 2, 1 below 4, then 2; the few steps more count the codes below, two at a time.
    steps = tl.where(a < 2.0, 6291456.0, tl.where(a < 4.0, 12582914.0, 25165832.0))
    return ((a + steps).to(tl.int32, bitcast=True) & 0x7) | sign


@triton.jit
def encode_e2m1(x):
    """float32 -> codes 0..15 (int32): nearest even, saturating at +-6, NaN -> 0x7."""
    return tl.where(x != x, 0x7, encode_e2m1_numbers(x))


@triton.jit
def decode_e2m1(codes):
    """Codes 0..15 (int32) -> float32."""
    magnitude = codes & 0x7
    exponent = magnitude >> 1
    mantissa = (magnitude & 1).to(tl.float32)
    normal = (1.0 + 0.5 * mantissa) * ((exponent + 126) << 23).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, 0.5 * mantissa, normal)
    return tl.where((codes & 0x8) != 0, -value, value)


@triton.jit
def decode_ue8m0(codes):
    """Codes 0..255 (int32) -> float32; 0 is 2**-127, a subnormal, and 255 is NaN."""
    value = (codes << 23).to(tl.float32, bitcast=True)
    smallest = tl.full(codes.shape, 0x400000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(codes == 0, smallest, tl.where(codes == 255, float("nan"), value))


@triton.jit
def encode_ue8m0(ratio):
    """float32 >= 0 -> code (int32) of the smallest power of two not below it, in 1..254."""
    bits = ratio.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, 1), 254)

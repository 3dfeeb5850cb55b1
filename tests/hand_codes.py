"""Number formats by hand: plain Python floats and loops, the independent side of the format tests.

Nothing here imports the package under test. A code is decoded by the written-out formula and
encoded by a search for the nearest neighbour, ties to the even code. float32 arithmetic is done in
float64 and rounded once, which is exact for one multiplication or division of float32 values.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import torch

NAN = math.nan
INF = math.inf
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127


def f32(value: float) -> float:
    """Round to the nearest float32, overflow to infinity."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(INF, value)


def f32_bits(value: float) -> int:
    """Bit pattern of a float32 value."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def f32_from_bits(bits: int) -> float:
    """float32 value of a bit pattern."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def f32_up(value: float) -> float:
    """The float32 after a non-negative float32."""
    return f32_from_bits(f32_bits(value) + 1)


def f32_down(value: float) -> float:
    """The float32 before a positive float32."""
    return f32_from_bits(f32_bits(value) - 1)


def bf16_bits(value: float) -> int:
    """Round a float32 value to bfloat16, nearest even, and return the 16 bits. NaN is 0x7FC0."""
    if math.isnan(value):
        return 0x7FC0
    bits = f32_bits(value)
    low, high = bits & 0xFFFF, bits >> 16
    return high + int(low > 0x8000 or (low == 0x8000 and high & 1 == 1))


def bf16_value(bits: int) -> float:
    """Value of 16 bfloat16 bits."""
    return f32_from_bits(bits << 16)


def is_negative(value: float) -> bool:
    """Sign bit, of zeros too."""
    return math.copysign(1.0, value) < 0.0


def e4m3_value(code: int) -> float:
    """1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, 0x7F and 0xFF are NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return NAN
    if exponent == 0:
        magnitude = mantissa * 2.0**-9
    else:
        magnitude = (1.0 + mantissa / 8.0) * 2.0 ** (exponent - 7)
    return -magnitude if code & 0x80 else magnitude


def e5m2_value(code: int) -> float:
    """1 sign, 5 exponent (bias 15), 2 mantissa bits; exponent 31 is infinity or NaN."""
    exponent, mantissa = code >> 2 & 31, code & 3
    if exponent == 31:
        magnitude = INF if mantissa == 0 else NAN
    elif exponent == 0:
        magnitude = mantissa * 2.0**-16
    else:
        magnitude = (1.0 + mantissa / 4.0) * 2.0 ** (exponent - 15)
    return -magnitude if code & 0x80 else magnitude


E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_value(code: int) -> float:
    """Three bits pick the magnitude, bit 3 is the sign."""
    magnitude = E2M1_MAGNITUDES[code & 7]
    return -magnitude if code & 8 else magnitude


def ue8m0_value(byte: int) -> float:
    """2 ** (byte - 127), 255 is NaN."""
    return NAN if byte == 255 else math.ldexp(1.0, byte - 127)


E4M3_MAGNITUDES = tuple(e4m3_value(code) for code in range(0x7F))
E5M2_MAGNITUDES = tuple(e5m2_value(code) for code in range(0x7C))


def nearest_code(magnitude: float, magnitudes: Sequence[float]) -> int:
    """Index of the nearest entry of an ascending list, ties to the even index, saturating."""
    above = bisect_left(magnitudes, magnitude)
    candidates = [code for code in (above - 1, above) if 0 <= code < len(magnitudes)]
    return min(candidates, key=lambda code: (abs(magnitudes[code] - magnitude), code & 1))


def e4m3_code(value: float) -> int:
    """Nearest e4m3 code: saturates at 448, keeps the sign of zero, any NaN is 0x7F."""
    if math.isnan(value):
        return 0x7F
    return nearest_code(abs(value), E4M3_MAGNITUDES) | (0x80 if is_negative(value) else 0)


def e5m2_code(value: float) -> int:
    """Nearest e5m2 code: saturates at 57344, keeps the sign of zero, any NaN is 0x7F."""
    if math.isnan(value):
        return 0x7F
    return nearest_code(abs(value), E5M2_MAGNITUDES) | (0x80 if is_negative(value) else 0)


def e2m1_code(value: float) -> int:
    """Nearest e2m1 code: saturates at 6, keeps the sign of zero, any NaN is 7."""
    if math.isnan(value):
        return 7
    return nearest_code(abs(value), E2M1_MAGNITUDES) | (8 if is_negative(value) else 0)


def ue8m0_byte(value: float) -> int:
    """Byte of the smallest power of two not below a non-negative float32, clamped to 1..254."""
    if math.isnan(value) or value > 2.0**127:
        return 254
    return next(byte for byte in range(1, 255) if ue8m0_value(byte) >= value)


def boundary_inputs(magnitudes: Sequence[float]) -> list[float]:
    """Every value and rounding boundary of a format with its float32 neighbours, both signs."""
    middles = [(low + high) / 2.0 for low, high in zip(magnitudes, magnitudes[1:], strict=False)]
    points = [value for value in (*magnitudes, *middles) if value > 0.0]
    around = [near for value in points for near in (f32_down(value), value, f32_up(value))]
    return [sign * value for value in around for sign in (1.0, -1.0)]


def decode_table(decode: Callable[[int], float], count: int) -> torch.Tensor:
    """float32 [count] of the decoded values of codes 0..count-1."""
    return torch.tensor([decode(code) for code in range(count)], dtype=torch.float32)


def floats(values: Iterable[float]) -> torch.Tensor:
    """float32 tensor of Python floats."""
    return torch.tensor(list(values), dtype=torch.float32)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal shape, dtype and float32 bits, where any NaN equals any NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype == torch.float32:
        equal = left.contiguous().view(torch.int32) == right.contiguous().view(torch.int32)
    elif left.dtype == torch.bfloat16:
        equal = left.contiguous().view(torch.int16) == right.contiguous().view(torch.int16)
    else:
        raise TypeError(f"same_bits compares float32 or bfloat16, got {left.dtype}")
    return bool((equal | (left.isnan() & right.isnan())).all())

"""Small floating-point formats by arithmetic in float64, on any device; no tables, no library.

Codes go to numbers and numbers to the nearest number of a format, ties to even, so that bounds of
a code are rounded bounds of what it stands for.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT32_MAX = float(torch.finfo(torch.float32).max)


def power_of_two(exponents: Tensor) -> Tensor:
    """2**exponents in float64 by its bits: pow() need not be exact on every device."""
    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)


def _round(values: Tensor, mantissa_bits: int, least_exponent: int, largest: float) -> Tensor:
    """Nearest number with ``mantissa_bits`` behind the point, saturating at ``largest``."""
    _, exponent = torch.frexp(values)
    step = power_of_two((exponent - 1).clamp_min(least_exponent) - mantissa_bits)
    return (torch.round(values / step) * step).clamp(-largest, largest)


def round_e4m3(values: Tensor) -> Tensor:
    """Nearest e4m3 number of float64 values without NaN, clamped to 448."""
    return _round(values.clamp(-448.0, 448.0), 3, -6, 448.0)


def round_e2m1(values: Tensor) -> Tensor:
    """Nearest e2m1 number of float64 values without NaN, clamped to 6."""
    return _round(values.clamp(-6.0, 6.0), 1, 0, 6.0)


def round_bf16(values: Tensor) -> Tensor:
    """Nearest bfloat16 of finite float64 values of moderate size, as float64."""
    return _round(values, 7, -126, 3.4e38)


def e4m3_numbers(codes: Tensor) -> Tensor:
    """uint8 codes to float64; 0x7F and 0xFF are NaN."""
    bits = codes.to(torch.int64)
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).double()
    fraction = torch.where(exponent == 0, mantissa / 8, 1 + mantissa / 8)
    size = fraction * power_of_two(exponent.clamp_min(1) - 7)
    size = torch.where((bits & 127) == 127, torch.full_like(size, torch.nan), size)
    return torch.where(bits >= 128, -size, size)


def e2m1_numbers(packed: Tensor) -> Tensor:
    """uint8 [..., n] of two codes each to float64 [..., 2 n], the low nibble first."""
    bits = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int64)
    exponent, mantissa = (bits >> 1) & 3, (bits & 1).double()
    fraction = torch.where(exponent == 0, mantissa / 2, 1 + mantissa / 2)
    size = fraction * power_of_two(exponent.clamp_min(1) - 1)
    return torch.where(bits >= 8, -size, size)


def ue8m0_numbers(codes: Tensor) -> Tensor:
    """uint8 exponents to float64; 255 is NaN."""
    exponent = codes.to(torch.int64)
    size = power_of_two(exponent - 127)
    return torch.where(exponent == 255, torch.full_like(size, torch.nan), size)


def power_of_two_above(ratio: Tensor) -> Tensor:
    """Smallest power of two not below positive float64 ratios, from 2**-126 to 2**127."""
    mantissa, exponent = torch.frexp(ratio)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    return power_of_two(exponent)


def float32(values: Tensor) -> Tensor:
    """Rounded to float32, as float64."""
    return values.float().double()

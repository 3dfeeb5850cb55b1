"""The number grids of Mxfp8 by table and exact float64 arithmetic: e4m3 ranks, ue8m0 exponents.

A rank counts steps on the e4m3 grid, negative below zero and 0 for both zeros, so "one code apart"
is a difference of one rank whatever the sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
# Mxfp8 takes no smaller maximum; 1e-4 / 448 lies between 2**-23 and 2**-22: byte 127 - 22.
AMAX_FLOOR = 1e-4
FLOOR_BYTE = 105


def _magnitude(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return mantissa * 2.0**-9
    return float((8 + mantissa) * 2.0 ** (exponent - 10))


_MAGNITUDES = torch.tensor([_magnitude(code) for code in range(E4M3_NAN)], dtype=torch.float64)


def _midpoints() -> Tensor:
    """Upper ends of the interval that rounds to each code; a tie belongs to the even code."""
    middle = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2
    below = torch.nextafter(middle, torch.zeros_like(middle))
    tie_goes_up = torch.arange(len(middle)) % 2 == 1
    return torch.where(tie_goes_up, below, middle)


_MIDPOINTS = _midpoints()


def e4m3_values(codes: Tensor) -> Tensor:
    """Codes uint8 -> float64 of the same shape; the two NaN codes give NaN."""
    table = torch.cat([_MAGNITUDES, torch.tensor([float("nan")], dtype=torch.float64)])
    signed = torch.cat([table, -table])
    return signed[codes.long()]


def e4m3_rank(values: Tensor) -> Tensor:
    """Signed rank of the e4m3 number nearest to each float64 value, saturating at 448."""
    rank = torch.bucketize(values.abs(), _MIDPOINTS)
    return torch.where(values < 0, -rank, rank)


def code_rank(codes: Tensor) -> Tensor:
    """Signed rank of each code; a NaN code has rank +-127, which no value has."""
    magnitude = (codes & 0x7F).long()
    return torch.where(codes >= 0x80, -magnitude, magnitude)


def e4m3_codes(values: Tensor) -> Tensor:
    """Nearest code (uint8) of each float64 value; a negative zero loses its sign."""
    rank = e4m3_rank(values)
    return (rank.abs() + torch.where(rank < 0, 0x80, 0)).to(torch.uint8)


def ue8m0_byte(amax: Tensor) -> Tensor:
    """Byte of the smallest power of two not below max(amax, 1e-4) / 448, float64 -> int64."""
    mantissa, exponent = torch.frexp(amax.clamp(min=AMAX_FLOOR) / E4M3_MAX)
    return 127 + exponent.long() - (mantissa == 0.5).long()


def power_of_two(byte: Tensor) -> Tensor:
    """2 ** (byte - 127) as float64."""
    return torch.ldexp(torch.ones_like(byte, dtype=torch.float64), byte - 127)

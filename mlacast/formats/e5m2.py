"""E5M2 (``float8_e5m2``): 1 sign, 5 exponent (bias 15) and 2 mantissa bits.

Infinity is 0x7C, NaN is 0x7D to 0x7F. Largest value 57344 (0x7B), smallest normal 2**-14, smallest
subnormal 2**-16. The encoder saturates: it never writes an infinity, which a GEMM would spread over
a whole row.
"""

from __future__ import annotations

import torch

from mlacast.formats.inputs import as_codes, as_float32

__all__ = ["E5M2_MAX", "E5M2_NAN", "decode_e5m2", "encode_e5m2"]

E5M2_MAX = 57344.0
E5M2_NAN = 0x7F


def encode_e5m2(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E5M2 value, ties to even, saturating.

    Magnitudes above 57344 (infinity included) become 57344, zero keeps its sign, every NaN becomes
    0x7F.

    Args:
        x: Floating-point tensor of any shape, also empty; other dtypes than float32 are converted
            to float32 first.

    Returns:
        uint8 codes, same shape and device.

    Raises:
        TypeError: ``x`` is not a tensor.
        ValueError: ``x`` is not floating point.
    """
    values = as_float32("encode_e5m2", "x", x)
    codes = values.clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2).view(torch.uint8)
    return codes.masked_fill(values.isnan(), E5M2_NAN)


def decode_e5m2(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 value of every code, exactly, infinities and NaN included.

    Args:
        codes: uint8 or float8_e5m2 tensor of any shape.

    Returns:
        float32 values, same shape and device.

    Raises:
        TypeError: ``codes`` is not a tensor.
        ValueError: ``codes`` has another dtype.
    """
    raw = as_codes("decode_e5m2", "codes", codes, torch.float8_e5m2)
    return raw.view(torch.float8_e5m2).to(torch.float32)

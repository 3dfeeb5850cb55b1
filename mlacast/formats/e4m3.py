"""E4M3 (``float8_e4m3fn``): 1 sign, 4 exponent (bias 7) and 3 mantissa bits.

There is no infinity; NaN is 0x7F or 0xFF. Largest value 448 (0x7E), smallest normal 2**-6, smallest
subnormal 2**-9. The encoder saturates by itself before the cast, because PyTorch builds differ in
what they make of values above 448.
"""

from __future__ import annotations

import torch

from mlacast.formats.inputs import as_codes, as_float32

__all__ = ["E4M3_MAX", "E4M3_NAN", "decode_e4m3", "encode_e4m3"]

E4M3_MAX = 448.0
E4M3_NAN = 0x7F


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E4M3 value, ties to even, saturating.

    Magnitudes above 448 (infinity included) become 448, zero keeps its sign, every NaN becomes
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
    values = as_float32("encode_e4m3", "x", x)
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    # The cast keeps the sign of a NaN; one canonical code keeps bytes equal across devices.
    return codes.masked_fill(values.isnan(), E4M3_NAN)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 value of every code, exactly; 0x7F and 0xFF give NaN, 0x80 gives -0.

    Args:
        codes: uint8 or float8_e4m3fn tensor of any shape.

    Returns:
        float32 values, same shape and device.

    Raises:
        TypeError: ``codes`` is not a tensor.
        ValueError: ``codes`` has another dtype.
    """
    raw = as_codes("decode_e4m3", "codes", codes, torch.float8_e4m3fn)
    return raw.view(torch.float8_e4m3fn).to(torch.float32)

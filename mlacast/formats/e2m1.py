"""E2M1, four bits: codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign.

There is no infinity and no NaN. Two codes share a byte, the element with the even index in the low
nibble.
"""

from __future__ import annotations

import torch

from mlacast.errors import fail
from mlacast.formats.inputs import as_codes, as_float32

__all__ = ["E2M1_MAX", "E2M1_NAN", "decode_e2m1", "encode_e2m1", "pack_e2m1", "unpack_e2m1"]

E2M1_MAX = 6.0
# What a NaN is encoded as. The format cannot say NaN: it is 6, and a NaN scale beside it carries
# the message.
E2M1_NAN = 0x7


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E2M1 value, ties to the even code, saturating at 6.

    The ties are 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4. The sign is
    kept also where the magnitude is or becomes zero (-0.1 -> 0x8). NaN becomes 0x7, infinity
    becomes 6 with its sign.

    Args:
        x: Floating-point tensor of any shape, also empty; other dtypes than float32 are converted
            to float32 first.

    Returns:
        uint8 codes 0 to 15, one per element, same shape and device.

    Raises:
        TypeError: ``x`` is not a tensor.
        ValueError: ``x`` is not floating point.
    """
    values = as_float32("encode_e2m1", "x", x)
    magnitude = values.abs()
    # Seven rounding boundaries. A tie goes up where the upper code is even, hence ">=" at every
    # second one.
    codes = (magnitude > 0.25).to(torch.uint8)
    codes = codes + (magnitude >= 0.75)
    codes = codes + (magnitude > 1.25)
    codes = codes + (magnitude >= 1.75)
    codes = codes + (magnitude > 2.5)
    codes = codes + (magnitude >= 3.5)
    codes = codes + (magnitude > 5.0)
    codes = codes | (values.signbit().to(torch.uint8) << 3)
    return codes.masked_fill(values.isnan(), E2M1_NAN)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 value of every code, exactly; 0x8 gives -0. The high nibble is ignored.

    Args:
        codes: uint8 tensor of any shape, one code per element (see ``unpack_e2m1`` for packed
            bytes).

    Returns:
        float32 values, same shape and device.

    Raises:
        TypeError: ``codes`` is not a tensor.
        ValueError: ``codes`` is not uint8.
    """
    raw = as_codes("decode_e2m1", "codes", codes).to(torch.int32)
    exponent = (raw >> 1) & 3
    mantissa = raw & 1
    # Arithmetic instead of a table: a table would be copied to the device, which a CUDA graph
    # capture refuses.
    halves = torch.where(exponent == 0, mantissa, (mantissa + 2) << (exponent - 1).clamp(min=0))
    magnitude = halves.to(torch.float32) * 0.5
    return torch.where((raw & 8) != 0, -magnitude, magnitude)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Pack two codes per byte, even element in the low nibble: [..., 2n] -> [..., n].

    Args:
        codes: uint8 codes [..., 2n]; only the low nibble of each counts. n may be 0.

    Returns:
        uint8 bytes [..., n].

    Raises:
        TypeError: ``codes`` is not a tensor.
        ValueError: ``codes`` is not uint8, has no dimension or an odd last one.
    """
    raw = as_codes("pack_e2m1", "codes", codes)
    if raw.dim() == 0 or raw.shape[-1] % 2 != 0:
        fail("pack_e2m1", "codes", "have an even last dimension", list(raw.shape))
    return (raw[..., 0::2] & 0xF) | (raw[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Undo ``pack_e2m1``: [..., n] bytes -> [..., 2n] codes 0 to 15.

    Args:
        packed: uint8 bytes [..., n]; n may be 0.

    Returns:
        uint8 codes [..., 2n].

    Raises:
        TypeError: ``packed`` is not a tensor.
        ValueError: ``packed`` is not uint8 or has no dimension.
    """
    raw = as_codes("unpack_e2m1", "packed", packed)
    if raw.dim() == 0:
        fail("unpack_e2m1", "packed", "have at least one dimension", list(raw.shape))
    return torch.stack((raw & 0xF, raw >> 4), dim=-1).flatten(-2)

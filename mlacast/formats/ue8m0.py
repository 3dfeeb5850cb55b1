"""UE8M0, the scale of microscaling formats: ``2 ** (byte - 127)``, byte 255 is NaN.

A byte is the exponent field of the float32 with the same value, except at the ends: byte 0 is the
float32 subnormal 2**-127 and byte 255 would read as infinity. Everything here works on bits; no
logarithm can be one off.
"""

from __future__ import annotations

import torch

from mlacast.errors import dtype_name, fail
from mlacast.formats.inputs import as_codes, as_float32

__all__ = ["decode_ue8m0", "encode_ue8m0", "pack_ue8m0_words", "unpack_ue8m0_words"]

_MANTISSA_BITS = 23
_MANTISSA_MASK = 0x7FFFFF
_EXPONENT_MASK = 0xFF
_BITS_OF_TWO_TO_MINUS_127 = 0x400000
_BITS_OF_NAN = 0x7FC00000


def encode_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """Return the byte of the smallest power of two that is not below ``x``.

    The byte is the exponent field of the float32 plus one if any mantissa bit is set, kept within 1
    to 254: exact powers of two stay, zero and subnormals give 1 (2**-126), infinity and NaN give
    254. The sign bit is ignored.

    Args:
        x: Non-negative floating-point tensor of any shape; other dtypes than float32 are converted
            first.

    Returns:
        uint8 bytes, same shape and device.

    Raises:
        TypeError: ``x`` is not a tensor.
        ValueError: ``x`` is not floating point.
    """
    bits = as_float32("encode_ue8m0", "x", x).view(torch.int32)
    exponent = (bits >> _MANTISSA_BITS) & _EXPONENT_MASK
    rounded_up = exponent + ((bits & _MANTISSA_MASK) != 0).to(torch.int32)
    return rounded_up.clamp(1, 254).to(torch.uint8)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return ``2 ** (byte - 127)`` as float32, exact for every byte; 255 gives NaN.

    Byte 0 is the subnormal 2**-127. It is built from bits, so it is right even while denormals are
    flushed; arithmetic on it then sees zero.

    Args:
        codes: uint8 or float8_e8m0fnu tensor of any shape.

    Returns:
        float32 scales, same shape and device.

    Raises:
        TypeError: ``codes`` is not a tensor.
        ValueError: ``codes`` has another dtype.
    """
    raw = as_codes("decode_ue8m0", "codes", codes, torch.float8_e8m0fnu).to(torch.int32)
    bits = raw << _MANTISSA_BITS
    bits = bits.masked_fill(raw == 0, _BITS_OF_TWO_TO_MINUS_127)
    bits = bits.masked_fill(raw == 255, _BITS_OF_NAN)
    return bits.view(torch.float32)


def pack_ue8m0_words(codes: torch.Tensor) -> torch.Tensor:
    """Pack four bytes per int32 word: byte j of word w (little endian) is scale 4w + j.

    Args:
        codes: uint8 bytes [..., k]; k may be 0 and need not be a multiple of 4.

    Returns:
        int32 words [..., ceil(k / 4)]; bytes past k are 0.

    Raises:
        TypeError: ``codes`` is not a tensor.
        ValueError: ``codes`` is not uint8 or has no dimension.
    """
    raw = as_codes("pack_ue8m0_words", "codes", codes)
    if raw.dim() == 0:
        fail("pack_ue8m0_words", "codes", "have at least one dimension", list(raw.shape))
    k = raw.shape[-1]
    words = (k + 3) // 4
    padded = torch.nn.functional.pad(raw, (0, 4 * words - k)).to(torch.int32)
    lanes = padded.reshape(*raw.shape[:-1], words, 4)
    # Shifts, not a reinterpretation of memory: independent of the byte order of the host.
    return lanes[..., 0] | (lanes[..., 1] << 8) | (lanes[..., 2] << 16) | (lanes[..., 3] << 24)


def unpack_ue8m0_words(words: torch.Tensor, k: int) -> torch.Tensor:
    """Undo ``pack_ue8m0_words``: [..., w] int32 words -> the first ``k`` bytes.

    Args:
        words: int32 words [..., w].
        k: Number of scales, at most 4 * w.

    Returns:
        uint8 bytes [..., k].

    Raises:
        TypeError: ``words`` is not a tensor.
        ValueError: ``words`` is not int32, has no dimension, or holds fewer than ``k`` scales.
    """
    op = "unpack_ue8m0_words"
    if not isinstance(words, torch.Tensor):
        raise TypeError(f"{op}: words must be a torch.Tensor, got {type(words).__name__}")
    if words.dtype != torch.int32:
        fail(op, "words", "have dtype int32", dtype_name(words.dtype))
    if words.dim() == 0:
        fail(op, "words", "have at least one dimension", list(words.shape))
    if k < 0 or k > 4 * words.shape[-1]:
        fail(op, "k", f"be between 0 and {4 * words.shape[-1]}", k)
    lanes = [(words >> shift) & 0xFF for shift in (0, 8, 16, 24)]
    return torch.stack(lanes, dim=-1).flatten(-2)[..., :k].to(torch.uint8)

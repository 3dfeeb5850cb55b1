"""Casts between float32 and one- or two-byte codes: by instructions where the device has them.

Kernels of a few instructions per byte would be bound by the integer arithmetic of ``numbers``. With
NATIVE the conversion instructions of compute capability 8.9 do the work: they round to nearest
even, saturate, and give the same codes, also for NaN. Without, as on older devices and in the
interpreter, integers do.

bfloat16 travels as int16 bits, which both worlds read and write alike.
"""

import torch
import triton
import triton.language as tl

from mlacast.kernels.common.numbers import decode_e4m3, encode_e4m3

_FIRST_WITH_FP8 = (8, 9)


def has_fp8_casts(device: torch.device) -> bool:
    """Whether kernels on ``device`` may be compiled with NATIVE."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View bfloat16 as int16 for a kernel; other dtypes as they are."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


@triton.jit
def encode_e5m2(x):
    """float32 -> codes (int32): clamped to +-57344, nearest even, NaN -> 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 57344.0)
    raw = magnitude.to(tl.int32, bitcast=True)
    # Normal codes: round the mantissa to two bits, move the exponent bias from 127 to 15.
    rounded = ((raw + 0xFFFFF + ((raw >> 21) & 1)) >> 21) - (112 << 2)
    # Subnormal codes count steps of 2**-16; adding 1.5 * 2**23 rounds to an integer, nearest even.
    steps = (magnitude * 65536.0 + 12582912.0).to(tl.int32, bitcast=True) & 0x7
    code = tl.where(magnitude < 6.103515625e-05, steps, rounded) | sign
    return tl.where(x != x, 0x7F, code)


@triton.jit
def cast_to_fp8(x, IS_E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """float32 -> FP8 codes (uint8): nearest even, saturating, NaN -> 0x7F."""
    if NATIVE:
        if IS_E5M2:
            return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        if IS_E5M2:
            return encode_e5m2(x).to(tl.uint8)
        else:
            return encode_e4m3(x).to(tl.uint8)


@triton.jit
def cast_from_e4m3(codes, NATIVE: tl.constexpr):
    """E4M3 codes (uint8) -> float32."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return decode_e4m3(codes)


@triton.jit
def cast_to_bf16_bits(x, NATIVE: tl.constexpr):
    """float32 -> bfloat16 bits (int16): nearest even, every NaN 0x7FC0."""
    if NATIVE:
        rounded = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        raw = x.to(tl.int32, bitcast=True)
        rounded = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).to(tl.int16)
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def cast_from_bf16_bits(bits):
    """bfloat16 bits (int16) -> float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def cast_to_float32(values):
    """Loaded values (float16, float32, or int16 bits of bfloat16) -> float32."""
    if values.dtype == tl.int16:
        return cast_from_bf16_bits(values)
    else:
        return values.to(tl.float32)

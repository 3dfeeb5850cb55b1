"""Scaled quantisers: E4M3 with a scale per tensor or group, E2M1 with an E4M3 scale per 16.

These functions are the normative arithmetic of every quantising epilogue: float32, IEEE division,
the largest magnitude taken on float32 values. They know nothing of where codes and scales are
stored; see ``mlacast.layouts``.

Non-finite input. A NaN makes all codes of its group NaN codes. Infinity saturates: its code is the
largest one with its sign, its neighbours in the group keep the ordinary rule with the (then very
large) scale.
"""

from __future__ import annotations

import torch

from mlacast.errors import check_choice, check_type, fail
from mlacast.formats.e2m1 import E2M1_MAX, E2M1_NAN, decode_e2m1, encode_e2m1
from mlacast.formats.e4m3 import E4M3_MAX, E4M3_NAN, decode_e4m3, encode_e4m3
from mlacast.formats.inputs import as_codes, as_float32, divide_by
from mlacast.formats.ue8m0 import decode_ue8m0, encode_ue8m0

__all__ = [
    "AMAX_FLOOR",
    "MXFP8_AMAX_FLOOR",
    "NVFP4_GROUP_SIZE",
    "SF_KINDS",
    "dequantize_fp8_group",
    "dequantize_fp8_tensor",
    "dequantize_nvfp4",
    "quantize_fp8_group",
    "quantize_fp8_tensor",
    "quantize_nvfp4",
]

SF_KINDS = ("float32", "float32_pow2", "ue8m0")
AMAX_FLOOR = 1e-10
MXFP8_AMAX_FLOOR = 1e-4
NVFP4_GROUP_SIZE = 16

_FLOAT32_MAX = torch.finfo(torch.float32).max


def quantize_fp8_tensor(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Quantise with one given scale: ``code = e4m3(clamp(x * (1 / scale)))``, ``x ~ code * scale``.

    Args:
        x: Floating-point tensor of any shape.
        scale: Positive number or 1-element tensor, read on the device.

    Returns:
        uint8 E4M3 codes, same shape. NaN gives 0x7F, infinity +-448.

    Raises:
        TypeError: ``x`` is not a tensor or ``scale`` neither number nor tensor.
        ValueError: ``x`` is not floating point or ``scale`` has more than one element.
    """
    op = "quantize_fp8_tensor"
    values = as_float32(op, "x", x)
    divisor = _scalar(op, "scale", scale, values.device)
    return encode_e4m3(values * (torch.ones_like(divisor) / divisor))


def dequantize_fp8_tensor(codes: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Return ``code * scale`` as float32.

    Args:
        codes: uint8 or float8_e4m3fn tensor of any shape.
        scale: Number or 1-element tensor.

    Returns:
        float32 values, same shape.
    """
    values = decode_e4m3(codes)
    return values * _scalar("dequantize_fp8_tensor", "scale", scale, values.device)


def quantize_fp8_group(
    x: torch.Tensor, group_size: int, sf: str, *, amax_floor: float = AMAX_FLOOR
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise groups of ``group_size`` neighbours along the last dimension to E4M3.

    With ``a = max(amax of the group, amax_floor)`` and ``s = a / 448``, the scale is ``s`` itself
    ("float32") or the smallest power of two not below it ("float32_pow2", "ue8m0"), and ``code =
    e4m3(clamp(x / scale))``.

    Args:
        x: [..., K] floating-point, K a multiple of ``group_size``; any dimension may be 0.
        group_size: Elements per scale.
        sf: "float32", "float32_pow2" or "ue8m0": how the scale is chosen and returned.
        amax_floor: Lower bound of the group's largest magnitude; 1e-10, or 1e-4 for Mxfp8.

    Returns:
        (codes, scales): uint8 E4M3 codes [..., K] and scales [..., K / group_size], float32, or
        uint8 bytes for "ue8m0". A group with a NaN has codes 0x7F and scale NaN, 2**127 or byte
        254. A group with an infinity and no NaN has the scale of the largest finite float32
        ("float32") or 2**127 (byte 254).

    Raises:
        TypeError: ``x`` is not a tensor or ``group_size`` not an int.
        ValueError: ``x`` is not floating point, K is no multiple of ``group_size``, or ``sf`` is
            unknown.
    """
    op = "quantize_fp8_group"
    check_choice(op, "sf", sf, SF_KINDS)
    groups = _split_groups(op, "x", as_float32(op, "x", x), group_size)
    amax = groups.abs().amax(dim=-1)
    has_nan = amax.isnan()
    amax = amax.clamp(min=amax_floor)
    if sf == "float32":
        scale = divide_by(amax.clamp(max=_FLOAT32_MAX), E4M3_MAX)
        # One NaN for every NaN of the input: its payload would survive the arithmetic.
        stored = scale.masked_fill(has_nan, float("nan"))
    else:
        exponent = encode_ue8m0(divide_by(amax, E4M3_MAX))
        scale = decode_ue8m0(exponent)
        stored = exponent if sf == "ue8m0" else scale
    codes = encode_e4m3(groups / scale.unsqueeze(-1)).masked_fill(has_nan.unsqueeze(-1), E4M3_NAN)
    return codes.flatten(-2).contiguous(), stored.contiguous()


def dequantize_fp8_group(
    codes: torch.Tensor, scales: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Return ``code * scale`` as float32.

    Args:
        codes: [..., K] uint8 or float8_e4m3fn.
        scales: [..., K / group_size] float32, or UE8M0 bytes (uint8 or float8_e8m0fnu).
        group_size: Elements per scale.

    Returns:
        float32 [..., K]. A NaN code or scale gives NaN.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Shapes or dtypes do not fit together.
    """
    op = "dequantize_fp8_group"
    values = _split_groups(op, "codes", decode_e4m3(codes), group_size)
    if isinstance(scales, torch.Tensor) and scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        factors = decode_ue8m0(scales)
    else:
        factors = as_float32(op, "scales", scales)
    _check_scales(op, "scales", factors, values)
    return (values * factors.unsqueeze(-1)).flatten(-2)


def quantize_nvfp4(
    x: torch.Tensor, global_scale: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise groups of 16 neighbours along the last dimension to E2M1 with an E4M3 scale each.

    With the encode-side multiplier ``gs = global_scale`` (2688 / largest magnitude of the tensor)::

        sf   = e4m3(min(gs * (amax / 6), 448))
        code = e2m1(x * (gs / sf)),  0 where sf = 0
        x    ~ code * sf / gs

    Args:
        x: [..., K] floating-point, K a multiple of 16; any dimension may be 0.
        global_scale: Positive number or 1-element tensor, read on the device.

    Returns:
        (codes, sf): uint8 E2M1 codes 0 to 15 [..., K], unpacked, and uint8 E4M3 bytes [..., K /
        16]. A group with a NaN has sf 0x7F and codes 0x7. A group with an infinity and no NaN has
        sf 0x7E and +-6 at the infinities. A group whose scale rounds to 0 has codes 0x0 throughout.

    Raises:
        TypeError: ``x`` is not a tensor or ``global_scale`` neither number nor tensor.
        ValueError: ``x`` is not floating point, K is no multiple of 16, ``global_scale`` has more
            than one element.
    """
    op = "quantize_nvfp4"
    groups = _split_groups(op, "x", as_float32(op, "x", x), NVFP4_GROUP_SIZE)
    multiplier = _scalar(op, "global_scale", global_scale, groups.device)
    amax = groups.abs().amax(dim=-1)
    has_nan = amax.isnan()
    sf = encode_e4m3(multiplier * divide_by(amax, E2M1_MAX)).masked_fill(has_nan, E4M3_NAN)
    # The codes must fit the scale that was stored, so the multiplier comes from the rounded one.
    factor = multiplier / decode_e4m3(sf)
    codes = encode_e2m1(groups * factor.unsqueeze(-1))
    codes = codes.masked_fill((sf == 0).unsqueeze(-1), 0).masked_fill(
        has_nan.unsqueeze(-1), E2M1_NAN
    )
    return codes.flatten(-2).contiguous(), sf.contiguous()


def dequantize_nvfp4(
    codes: torch.Tensor, sf: torch.Tensor, global_scale: float | torch.Tensor
) -> torch.Tensor:
    """Return ``e2m1(code) * e4m3(sf) / global_scale`` as float32.

    Args:
        codes: [..., K] uint8 codes 0 to 15, unpacked.
        sf: [..., K / 16] uint8 or float8_e4m3fn.
        global_scale: The multiplier that was given to ``quantize_nvfp4``.

    Returns:
        float32 [..., K]. A NaN scale gives NaN.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Shapes or dtypes do not fit together.
    """
    op = "dequantize_nvfp4"
    values = _split_groups(op, "codes", decode_e2m1(as_codes(op, "codes", codes)), NVFP4_GROUP_SIZE)
    factors = decode_e4m3(sf)
    _check_scales(op, "sf", factors, values)
    divisor = _scalar(op, "global_scale", global_scale, values.device)
    return (values * factors.unsqueeze(-1) / divisor).flatten(-2)


def _scalar(op: str, argument: str, value: object, device: torch.device) -> torch.Tensor:
    """Return a 0-dimensional float32 tensor on ``device``; no value is read on the host."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            fail(op, argument, "have 1 element", list(value.shape))
        return value.detach().to(device=device, dtype=torch.float32).reshape(())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        kind = type(value).__name__
        raise TypeError(f"{op}: {argument} must be a number or a 1-element tensor, got {kind}")
    return torch.full((), float(value), dtype=torch.float32, device=device)


def _split_groups(op: str, argument: str, values: torch.Tensor, group_size: int) -> torch.Tensor:
    """View [..., K] as [..., K / group_size, group_size]."""
    check_type(op, "group_size", group_size, int, "an int")
    if group_size < 1:
        fail(op, "group_size", "be at least 1", group_size)
    if values.dim() == 0 or values.shape[-1] % group_size != 0:
        fail(
            op,
            argument,
            f"have a last dimension that is a multiple of {group_size}",
            list(values.shape),
        )
    return values.reshape(*values.shape[:-1], values.shape[-1] // group_size, group_size)


def _check_scales(op: str, argument: str, scales: torch.Tensor, groups: torch.Tensor) -> None:
    """Require one scale per group of ``groups`` [..., G, g]."""
    if scales.shape != groups.shape[:-1]:
        fail(op, argument, f"have shape {list(groups.shape[:-1])}", list(scales.shape))

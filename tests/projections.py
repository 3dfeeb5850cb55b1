"""Weights for the consumers of quantised outputs, and what their products must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mlacast


@dataclass(frozen=True)
class Weights:
    """Weights as a consumer takes them, and their values in float64.

    Attributes:
        weight: [g, d_out, f], or [d_out, K].
        weight_sf: Their scales, None for plain ones.
        values: float64, same shape as ``weight``.
    """

    weight: Tensor
    weight_sf: Tensor | None
    values: Tensor


def draw_weights(kind: str, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Weights:
    """Random weights of about 1 / sqrt(f).

    Args:
        kind: A dtype's name; "blocks_128" for e4m3 with a float32 scale per 128x128; "bytes_32" or
            "words_32" for e4m3 with a power of two per 32.
        shape: [..., rows, columns].
        device: Where they go.
    """
    lead, (rows, columns) = shape[:-2], shape[-2:]
    if kind in ("bfloat16", "float16", "float32"):
        plain = (torch.randn(shape) / columns**0.5).to(getattr(torch, kind))
        return Weights(plain.to(device), None, plain.double().to(device))
    codes = torch.randn(shape).mul(40).clamp(-448, 448).to(torch.float8_e4m3fn)
    if kind == "blocks_128":
        size = (*lead, -(-rows // 128), -(-columns // 128))
        scale = torch.rand(size) * 0.05 / columns**0.5 + 1e-5
        spread = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
        values = codes.double() * spread[..., :rows, :columns].double()
        return Weights(codes.to(device), scale.to(device), values.to(device))
    exponent = torch.randint(113, 123, (*lead, rows, columns // 32), dtype=torch.uint8)
    values = codes.double() * torch.exp2(exponent.double() - 127).repeat_interleave(32, -1)
    if kind == "bytes_32":
        return Weights(codes.to(device), exponent.to(device), values.to(device))
    # Physically [..., columns / 128, rows].
    words = exponent.view(torch.int32).transpose(-1, -2).contiguous().transpose(-1, -2)
    # Moving to another device would keep these strides; it is said here that they matter.
    assert words.stride(-2) == 1 or rows == 1
    return Weights(codes.to(device), words.to(device), values.to(device))


def multiply(
    launch: Callable[..., object],
    out: mlacast.QuantizedTensor,
    weights: Weights,
    dtype: torch.dtype | None = None,
    **more: Any,
) -> Tensor:
    """Let a launcher fill a new tensor, of the type of plain weights or bfloat16 unless given."""
    weight = weights.weight
    if dtype is None:
        dtype = weight.dtype if weights.weight_sf is None else torch.bfloat16
    shape = (out.num_tokens, *weight.shape[:-1])
    projected = torch.full(shape, torch.nan, dtype=dtype, device=weight.device)
    launch(out, weight, weights.weight_sf, projected=projected, **more)
    return projected


def expect(out: mlacast.QuantizedTensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """The float64 product and the sum of the magnitudes of its terms."""
    values = out.dequantize().double()
    if weights.values.dim() == 3:
        product = torch.einsum("tgf,gof->tgo", values, weights.values)
        return product, torch.einsum("tgf,gof->tgo", values.abs(), weights.values.abs())
    flat = values.flatten(1)
    return flat @ weights.values.t(), flat.abs() @ weights.values.abs().t()

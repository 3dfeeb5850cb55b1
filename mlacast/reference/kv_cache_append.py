"""Reference of ``kv_cache_append``: what a latent goes through before it is encoded."""

from __future__ import annotations

import torch

from mlacast.descriptors.rope import Rope
from mlacast.reference.rotation import D_ROPE, cos_sin_rows, rotate

D_LATENT = 512


def _round(values: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16; every NaN gets the same bits, also where the cast keeps a sign."""
    return values.to(torch.bfloat16).masked_fill(values.isnan(), float("nan"))


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Sum ``x [n, 512]`` squared to [n, 1], neighbours first, an order every device can follow."""
    partial = x * x
    while partial.shape[-1] > 1:
        partial = partial[:, 0::2] + partial[:, 1::2]
    return partial


def prepare_latent(
    latent: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_eps: float | None,
    rope: Rope | None,
) -> torch.Tensor:
    """Norm the first 512 dimensions and rotate the last 64, each rounded to bfloat16.

    Args:
        latent: [n, 512] or [n, 576] bfloat16, float16 or float32.
        norm_weight: [512] or None for ones.
        norm_eps: None for no norm.
        rope: None for no rotation.

    Returns:
        [n, d_qk]: ``latent`` itself if there is nothing to do, else bfloat16 for a bfloat16 latent
        and float32 for others, whose untouched dimensions keep their bits.
    """
    if norm_eps is None and rope is None:
        return latent
    is_bf16 = latent.dtype == torch.bfloat16
    rows = latent.detach().to(torch.bfloat16 if is_bf16 else torch.float32, copy=True)
    if norm_eps is not None:
        x = rows[:, :D_LATENT].float()
        root = torch.sqrt(_sum_of_squares(x) * 2.0**-9 + norm_eps)
        x = x * (torch.ones_like(root) / root)
        rows[:, :D_LATENT] = _round(x if norm_weight is None else x * norm_weight.float())
    if rope is not None:
        cos, sin = cos_sin_rows(rope, torch.float32)
        tail = rows[:, -D_ROPE:].float()
        rows[:, -D_ROPE:] = _round(rotate(tail, cos[:, 0], sin[:, 0], rope.pairing))
    return rows

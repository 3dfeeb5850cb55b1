"""The up-projection of latents as matrices of each head, for attention in absorbed form."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mlacast.errors import UnsupportedError
from mlacast.integrations.transformers.out_projection import reads_plain_weight

LATENT = 512
NOPE = 128


def up_weights(kv_b_proj: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return W_UK [N, 128, 512] and W_UV [N, 512, 128] of a ``kv_b_proj``.

    A plain linear layer gives its weight. Anything else that stands there (FP8 or 4-bit weights, an
    adapter) is called on the identity, which gives the matrix that it multiplies with.

    Args:
        kv_b_proj: From [..., 512] to [..., N * 256], keys and then values of each head.
        like: Activations; the identity is made like them.

    Raises:
        UnsupportedError: The module adds a bias, which no matrix can stand for.
    """
    if getattr(kv_b_proj, "bias", None) is not None:
        raise UnsupportedError(
            "fuse: kv_b_proj must have no bias on a fused model, got one; "
            "attention in absorbed form multiplies with its weight alone",
            op="fuse",
            missing=("kv_b_proj.bias",),
        )
    if reads_plain_weight(kv_b_proj, nn.Linear):
        weight = kv_b_proj.weight
    else:
        weight = kv_b_proj(torch.eye(LATENT, dtype=like.dtype, device=like.device)).T.contiguous()
    heads = weight.view(-1, 2 * NOPE, LATENT)
    return heads[:, :NOPE], heads[:, NOPE:].transpose(1, 2)

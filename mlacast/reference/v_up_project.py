"""Reference of ``v_up_project``: from the latent output of absorbed attention to value heads."""

from __future__ import annotations

import torch


def v_up_project(
    latent_out: torch.Tensor, w_uv: torch.Tensor, *, compute_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Multiply each head's latent with its own matrix, one token at a time: ``thl,hlv->thv``.

    Args:
        latent_out: [T, h, 512].
        w_uv: [h, 512, 128].
        compute_dtype: torch.float32, or torch.float64 on request.

    Returns:
        [T, h, 128] in ``compute_dtype``. A token's bits do not depend on the tokens beside it.
    """
    shape = (latent_out.shape[0], w_uv.shape[0], w_uv.shape[2])
    out = torch.empty(shape, dtype=compute_dtype, device=latent_out.device)
    weight = w_uv.to(compute_dtype)
    for token, latent in enumerate(latent_out):
        out[token] = (latent.to(compute_dtype)[:, None] @ weight)[:, 0]
    return out

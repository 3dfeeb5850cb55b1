"""What happens to a query before attention: element order, weightless RMSNorm, RoPE."""

from __future__ import annotations

import torch

from mlacast.descriptors.rope import Rope
from mlacast.layouts.element_order import from_chunk16
from mlacast.reference.rotation import D_ROPE, cos_sin_rows, rotate


def prologue(
    q: torch.Tensor,
    *,
    q_norm_eps: float | None = None,
    rope: Rope | None = None,
    q_order: str = "head",
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepare queries for scoring.

    The norm is weightless, so it is one factor per head and joins the score scale instead of the
    query: ``r = rsqrt(mean(q ** 2) + eps)``, taken over the un-rotated query. RoPE rotates the
    un-normed last 64 dimensions and rounds the result to ``q.dtype`` (the point where a fused
    kernel holds the query as a bf16 matrix operand).

    Args:
        q: [s_q, h_q, d_qk]; with ``q_order="chunk16"`` the elements of a token are in that order.
        q_norm_eps: Epsilon of the norm, or None for no norm.
        rope: Rotation of the last 64 dimensions, or None.
        q_order: "head" (natural) or "chunk16".
        compute_dtype: torch.float32 or torch.float64.

    Returns:
        The query [s_q, h_q, d_qk] in natural order and ``compute_dtype``, and r [s_q, h_q] (ones
        without norm).
    """
    if q_order == "chunk16":
        q = from_chunk16(q)
    values = q.to(compute_dtype)
    if q_norm_eps is None:
        norm = torch.ones(q.shape[:2], dtype=compute_dtype, device=q.device)
    else:
        norm = torch.rsqrt(values.square().mean(-1) + q_norm_eps)
    if rope is not None and q.shape[0] > 0:
        cos, sin = cos_sin_rows(rope, compute_dtype)
        rotated = (
            rotate(values[..., -D_ROPE:], cos, sin, rope.pairing).to(q.dtype).to(compute_dtype)
        )
        values = torch.cat((values[..., :-D_ROPE], rotated), dim=-1)
    return values, norm

"""What happens to an attention output before it is stored: the sink and the inverse RoPE."""

from __future__ import annotations

import torch

from mlacast.descriptors.rope import Rope
from mlacast.reference.rotation import D_ROPE, cos_sin_rows, rotate


def apply_sink(
    out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None
) -> torch.Tensor:
    """Let a sink logit per head join the softmax denominator.

    Args:
        out: [..., h_q, d_v], normalised without the sink.
        lse: [..., h_q], natural log, without the sink.
        attn_sink: [h_q] or None. -inf changes nothing, +inf gives exact zeros.

    Returns:
        ``out / (1 + exp(sink - lse))``; a row without keys (lse = -inf) stays as it is, zero.
    """
    if attn_sink is None:
        return out
    sink = attn_sink.to(out.dtype)
    # -inf - (-inf) is NaN: an empty row takes the factor 1 and keeps its zeros.
    shifted = torch.where(torch.isneginf(lse), torch.full_like(lse, -torch.inf), sink - lse)
    factor = 1.0 / (1.0 + torch.exp(shifted))
    closed = torch.isposinf(sink).expand_as(factor)
    return torch.where(closed[..., None], torch.zeros_like(out), out * factor[..., None])


def epilogue(
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    attn_sink: torch.Tensor | None = None,
    rope: Rope | None = None,
) -> torch.Tensor:
    """Apply the sink, then rotate the last 64 output dimensions back.

    Args:
        out: [s_q, h_q, 512] attention output, normalised without the sink.
        lse: [s_q, h_q].
        attn_sink: [h_q] float32 or None.
        rope: The rotation the queries got, or None when the output carries none (always None for
            d_qk = 576).

    Returns:
        [s_q, h_q, 512] in the dtype of ``out``. A row with lse = -inf is zero and reads no table
        row.
    """
    out = apply_sink(out, lse, attn_sink)
    if rope is not None and out.shape[0] > 0:
        cos, sin = cos_sin_rows(rope, out.dtype)
        rotated = rotate(out[..., -D_ROPE:], cos, sin, rope.pairing, inverse=True)
        out = torch.cat((out[..., :-D_ROPE], rotated), dim=-1)
    # 0 * NaN is NaN: whatever the table holds at the position of an empty row, its output is zero.
    return torch.where(torch.isneginf(lse)[..., None], torch.zeros_like(out), out)

"""RoPE on the last 64 dimensions, forward for queries and inverse for outputs."""

from __future__ import annotations

import torch

from mlacast.descriptors.rope import Rope

D_ROPE = 64
_NUM_PAIRS = D_ROPE // 2


def cos_sin_rows(rope: Rope, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Look up the table rows of every token.

    Positions outside the table are clamped to its ends, so no read leaves it.

    Args:
        rope: The table [max_pos, 64] and the positions [s_q].
        dtype: Compute dtype of the result.

    Returns:
        cos and sin, both [s_q, 1, 32], ready to broadcast over heads.
    """
    last = rope.cos_sin_cache.shape[0] - 1
    rows = rope.cos_sin_cache[rope.positions.long().clamp(0, max(last, 0))].to(dtype)
    return rows[:, None, :_NUM_PAIRS], rows[:, None, _NUM_PAIRS:]


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: str, *, inverse: bool = False
) -> torch.Tensor:
    """Rotate the pairs of ``x [..., 64]``.

    Args:
        x: [..., 64] in the compute dtype.
        cos: Broadcastable to [..., 32].
        sin: Broadcastable to [..., 32].
        pairing: "interleaved" pairs (x[2i], x[2i+1]); "half" pairs (x[i], x[i+32]).
        inverse: Rotate by the negative angle.

    Returns:
        [..., 64], a new tensor.
    """
    if pairing == "interleaved":
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :_NUM_PAIRS], x[..., _NUM_PAIRS:]
    if inverse:
        sin = -sin
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    if pairing == "interleaved":
        return torch.stack((rotated_first, rotated_second), dim=-1).flatten(-2)
    return torch.cat((rotated_first, rotated_second), dim=-1)

"""Softmax attention of one query token, and the merge of partial results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

D_V = 512


class AttentionState(NamedTuple):
    """A normalised attention result that can be merged with others.

    Attributes:
        out: [h, d_v], zero where nothing was attended.
        max_logits: [h], largest scaled logit, -inf where nothing was attended.
        lse: [h], natural log of the sum of exp(logit), -inf where nothing was attended.
    """

    out: torch.Tensor
    max_logits: torch.Tensor
    lse: torch.Tensor


def weigh(logits: torch.Tensor, values: torch.Tensor) -> AttentionState:
    """Weigh ``values`` by the softmax of ``logits``.

    Args:
        logits: [..., h, n], scaled; n may be 0.
        values: [..., n, d_v], one set for the h rows of logits, in their dtype.

    Returns:
        The state, with the leading dimensions of ``logits`` before those of `AttentionState`.
    """
    if logits.shape[-1] == 0:
        empty = torch.full(logits.shape[:-1], -torch.inf, dtype=logits.dtype, device=logits.device)
        shape = (*logits.shape[:-1], values.shape[-1])
        return AttentionState(
            torch.zeros(shape, dtype=logits.dtype, device=logits.device), empty, empty.clone()
        )
    max_logits = logits.amax(dim=-1)
    # -inf - (-inf) is NaN: a row whose logits are all -inf is shifted by 0 and sums to 0, like an
    # empty one.
    shift = torch.where(torch.isneginf(max_logits), torch.zeros_like(max_logits), max_logits)
    weights = torch.exp(logits - shift[..., None])
    total = weights.sum(dim=-1)
    out = (weights @ values) / total[..., None]
    out = torch.where((total == 0)[..., None], torch.zeros_like(out), out)
    return AttentionState(out, max_logits, shift + torch.log(total))


def attend(q: torch.Tensor, rows: torch.Tensor, score_scale: torch.Tensor) -> AttentionState:
    """Attend one token to ``rows``; every row counts, repeats included.

    Args:
        q: [h, d_qk] in the compute dtype.
        rows: [n, d_qk], the selected keys; their first 512 dimensions are the values. n may be 0.
        score_scale: [h], multiplies q.k.

    Returns:
        The state of the token.
    """
    rows = rows.to(q.dtype)
    return weigh((q @ rows.T) * score_scale[:, None], rows[:, :D_V])


def merge_states(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results over disjoint keys, in the order given.

    A part is empty where its lse is -inf or +inf (both markers are in use); its output is then
    never read, so it may hold NaN. One live part among empties comes back bit for bit.

    Args:
        outs: Parts [..., d], normalised, one dtype.
        lses: Natural-log sums [...] of the parts.

    Returns:
        The merged output [..., d] and lse [...]; zeros and -inf where every part is empty.
    """
    lses = [torch.where(torch.isposinf(lse), torch.full_like(lse, -torch.inf), lse) for lse in lses]
    largest = lses[0]
    for lse in lses[1:]:
        largest = torch.maximum(largest, lse)
    shift = torch.where(torch.isneginf(largest), torch.zeros_like(largest), largest)
    total = torch.zeros_like(shift)
    # The identity of addition is -0.0: a lone part keeps the sign of its zeros.
    nothing = torch.full_like(outs[0], -0.0)
    merged = nothing
    for out, lse in zip(outs, lses, strict=True):
        weight = torch.exp(lse - shift)
        total = total + weight
        merged = merged + torch.where(
            torch.isneginf(lse)[..., None], nothing, out * weight[..., None]
        )
    merged = torch.where(
        (total == 0)[..., None], torch.zeros_like(merged), merged / total[..., None]
    )
    return merged, shift + torch.log(total)

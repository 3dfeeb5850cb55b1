"""Float64 oracle of the fused step with the error budget of a float32 implementation.

It works on one query token at a time and shares no code with the library. A row's keys are the
valid entries alone, gathered by a Python loop. Beside each result stands how far correct float32
arithmetic may be from it:

* A float32 dot product of n random terms rounds n times, each time by at most u = 2**-24 of a
  partial sum, and the partial sums are of the size of the root of the sum of squared products. Such
  a random walk stays within ``4 * sqrt(n) * u`` of that root (four standard deviations), with
  sqrt(576) = 24: ``DOT``.
* The sum of squares behind the norm has positive terms, so it is off by 4 * 24 * u relative and its
  root by half of that; scaling, shift and exponent take 16 roundings: ``LOGIT`` of each logit.
* The rotated query is rounded to bf16. Where its exact value lies within float32 error of a
  rounding boundary both neighbours are right, so the row's logits may move by that one step.
* A logit error of delta moves a softmax weight by at most 2 * delta relative; summing n weighted
  values, the division and the inverse rotation add (n + 32) * u of the sum of absolute products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

UNIT = 2.0**-24
DOT = 4 * 24 * UNIT
LOGIT = (2 * 24 + 16) * UNIT
# Below the normal float32 numbers relative bounds end.
TINY = 2.0**-126
D_V = 512
D_ROPE = 64


@dataclass(frozen=True)
class Rotation:
    """Rotary table [max_pos, 64] (cos 32 | sin 32), a position per query token, and the pairing."""

    table: Tensor
    positions: Tensor
    neox: bool

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Indices of the first and the second element of the 32 pairs."""
        i = torch.arange(D_ROPE // 2)
        return (i, i + 32) if self.neox else (2 * i, 2 * i + 1)

    def cos_sin(self, token: int) -> tuple[Tensor, Tensor]:
        """cos and sin [32] float64 of a token; positions outside the table take the nearest row."""
        position = min(max(int(self.positions[token]), 0), len(self.table) - 1)
        row = self.table[position].double()
        return row[:32], row[32:]


@dataclass(frozen=True)
class Attended:
    """One call's exact result with the float32 budgets.

    out and its budget are [s_q, h, 512]; lse, max_logits and theirs [s_q, h]. ``open_rounding``
    [s_q, h] is true where some element of the rotated query may round to either bf16 neighbour.
    """

    out: Tensor
    out_budget: Tensor
    lse: Tensor
    lse_budget: Tensor
    max_logits: Tensor
    logit_budget: Tensor
    open_rounding: Tensor

    def reshaped(self, *lead: int) -> Attended:
        """The same numbers with the token dimension split into ``lead``."""
        return Attended(
            *(torch.unflatten(getattr(self, field.name), 0, lead) for field in fields(self))
        )


def valid_entries(indices: Tensor, length: int | None, rows: int) -> list[int]:
    """The entries of an index row that count: column below ``length``, value inside [0, rows)."""
    columns = indices.tolist()
    if length is not None:
        columns = columns[: max(length, 0)]
    return [entry for entry in columns if 0 <= entry < rows]


def select_keys(table: Tensor, indices: Tensor, lengths: Tensor | None) -> list[Tensor]:
    """Per query token the valid rows of ``table`` [rows, d], repeats kept, float64 [n, d]."""
    limits: list[int] | list[None] = [None] * len(indices) if lengths is None else lengths.tolist()
    return [
        table[torch.tensor(valid_entries(row, limit, len(table)), dtype=torch.long)].double()
        for row, limit in zip(indices, limits, strict=True)
    ]


def join_keys(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    """Two segments under one softmax: per query token the keys of both."""
    return [torch.cat(pair) for pair in zip(first, second, strict=True)]


def _rotated_query(
    q: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor]:
    """Rotate the last 64 dims of q [h, d], round to bf16; also the step where that is open."""
    first, second = (index + q.shape[-1] - D_ROPE for index in rotation.pairs())
    a, b = q[:, first], q[:, second]
    exact, spread = q.clone(), torch.zeros_like(q)
    exact[:, first], exact[:, second] = a * cos - b * sin, b * cos + a * sin
    spread[:, first] = (a * cos).abs() + (b * sin).abs()
    spread[:, second] = (b * cos).abs() + (a * sin).abs()
    # Two products and a sum round in float32: at most 2 u of the absolute products, one to spare.
    slack = 3 * UNIT * spread
    low, high = (exact - slack).bfloat16().double(), (exact + slack).bfloat16().double()
    return exact.bfloat16().double(), high - low


def _rotated_back(x: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation) -> Tensor:
    """Inverse rotation of the last 64 dims of x [h, 512]."""
    first, second = (index + D_V - D_ROPE for index in rotation.pairs())
    a, b = x[:, first], x[:, second]
    turned = x.clone()
    turned[:, first], turned[:, second] = a * cos + b * sin, b * cos - a * sin
    return turned


def _rotated_spread(x: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation) -> Tensor:
    """What the inverse rotation makes of the absolute sums x [h, 512]."""
    first, second = (index + D_V - D_ROPE for index in rotation.pairs())
    a, b = x[:, first], x[:, second]
    turned = x.clone()
    turned[:, first] = a * cos.abs() + b * sin.abs()
    turned[:, second] = b * cos.abs() + a * sin.abs()
    return turned


def _empty_row(h_q: int) -> tuple[Tensor, ...]:
    """A row with nothing to attend: zeros, lse +inf, max_logits -inf, all exact."""
    zeros, none = torch.zeros(h_q, D_V).double(), torch.zeros(h_q).double()
    infinite = torch.full((h_q,), float("inf")).double()
    return zeros, zeros, infinite, none, -infinite, none, none.bool()


def attend(
    q: Tensor,
    keys: Sequence[Tensor],
    *,
    sm_scale: float,
    norm_eps: float | None = None,
    rotation: Rotation | None = None,
    sink: Tensor | None = None,
) -> Attended:
    """Attend q [s_q, h, d] (natural order) to each token's keys; values: their first 512 dims."""
    rows = []
    for token, row_keys in enumerate(keys):
        query = q[token].double()
        heads = query.shape[0]
        if len(row_keys) == 0:
            rows.append(_empty_row(heads))
            continue
        scale = torch.full((heads, 1), sm_scale, dtype=torch.float64)
        if norm_eps is not None:
            scale = scale / ((query**2).sum(-1, keepdim=True) / D_V + norm_eps).sqrt()
        blur = torch.zeros_like(query)
        if rotation is not None:
            cos, sin = rotation.cos_sin(token)
            query, blur = _rotated_query(query, cos, sin, rotation)
        logits = scale * (query @ row_keys.T)
        walk = scale * (query**2 @ row_keys.T**2).sqrt()
        step = scale * (blur @ row_keys.abs().T)
        delta = (DOT * walk + LOGIT * logits.abs() + step).amax(-1)

        top = logits.amax(-1)
        weights = (logits - top[:, None]).exp()
        total = weights.sum(-1)
        extra = 0.0 if sink is None else (sink.double() - top).exp()
        weights = weights / (total + extra)[:, None]
        values = row_keys[:, :D_V]
        out, out_spread = weights @ values, weights @ values.abs()
        if rotation is not None:
            out = _rotated_back(out, cos, sin, rotation)
            out_spread = _rotated_spread(out_spread, cos, sin, rotation)
        relative = 2 * delta + (len(row_keys) + 32) * UNIT
        lse = top + total.log()
        lse_budget = delta + (len(row_keys) + 8) * UNIT + 2 * UNIT * lse.abs()
        out_budget = relative[:, None] * out_spread + TINY
        logit_budget = delta + 2 * UNIT * top.abs()
        is_open = (blur > 0).any(-1)
        rows.append((out, out_budget, lse, lse_budget, top, logit_budget, is_open))
    return Attended(*(torch.stack(column) for column in zip(*rows, strict=True)))

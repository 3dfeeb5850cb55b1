"""States of decode splits: drawn, merged in float64, and merged into a buffer by a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import mlacast
from mlacast.kernels.common.attention_arguments import rope_arguments
from mlacast.kernels.common.combine_splits import split_scratch
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.attention import end_config
from tests import oracles

Merge = Callable[..., None]
"""``merge_splits`` or the portable ``combine_splits``."""
TABLE_ROWS = 60
EMPTY_TOKEN = 1


@dataclass(frozen=True)
class States:
    """Split states and what else a merge reads, on one device.

    Attributes:
        outputs: [splits, s_q, h, 512] float32, un-normalised.
        maxima: [splits, s_q, h], base 2.
        sums: [splits, s_q, h].
        sink: [h] or None.
        rope: Table and positions of all tokens, or None.
    """

    outputs: Tensor
    maxima: Tensor
    sums: Tensor
    sink: Tensor | None = None
    rope: mlacast.Rope | None = None

    def on(self, device: str) -> States:
        """The same states on another device."""
        rope = self.rope
        if rope is not None:
            table, positions = rope.cos_sin_cache.to(device), rope.positions.to(device)
            rope = mlacast.Rope(table, positions, rope.pairing)
        sink = None if self.sink is None else self.sink.to(device)
        return States(
            self.outputs.to(device), self.maxima.to(device), self.sums.to(device), sink, rope
        )


def draw_states(
    tokens: int, heads: int, splits: int, pairing: str | None, has_sink: bool
) -> States:
    """Splits of all sizes, some of them empty, and a token whose splits all are."""
    sizes = 2.0 ** torch.randint(-12, 13, (splits, tokens, heads, 16, 1))
    outputs = (torch.randn(splits, tokens, heads, 16, 32) * sizes).flatten(3)
    maxima = torch.randn(splits, tokens, heads) * 8
    sums = torch.rand(splits, tokens, heads) * 60 + 1
    empty = torch.rand(splits, tokens, heads) < 0.2
    empty[:, EMPTY_TOKEN:][:, :1] = True
    outputs[empty] = 0.0
    maxima[empty] = -torch.inf
    sums[empty] = 0.0
    rope = None
    if pairing is not None:
        positions = torch.randint(-5, TABLE_ROWS + 5, (tokens,))
        rope = mlacast.Rope(oracles.exact_rope_table(TABLE_ROWS), positions, pairing)
    sink = None
    if has_sink:
        sink = torch.randn(heads) * 4
        sink[1:2] = -torch.inf
    return States(outputs, maxima, sums, sink, rope)


def merge_into(
    merge: Merge, states: States, out: mlacast.QuantizedTensor, lse: Tensor, d_qk: int = 512
) -> None:
    """Let a kernel write the states into a scratch, and launch ``merge`` right behind."""
    splits, tokens, heads, _ = states.outputs.shape
    rows = splits * tokens * heads
    launches = Launches(lse.device)
    partials = split_scratch(rows, None, launches)
    flat = (states.outputs.flatten(), states.maxima.flatten(), states.sums.flatten())
    for part, values in zip(partials, flat, strict=True):
        # Not a copy, which is no kernel: nothing is launched ahead of its end.
        torch.mul(values, 1.0, out=part[: len(values)])
    rope, sink = states.rope, states.sink
    merge(
        launches,
        partials,
        rope_arguments(sink, rope, lse, lse),
        lse,
        store_target(out),
        tokens,
        heads,
        splits,
        end_config(d_qk, sink, rope),
    )


def merge_in_float64(states: States, d_qk: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """Exact results on the CPU.

    Returns:
        out [s_q, h, 512], lse [s_q, h], and the magnitudes that were added up for each element of
        the output.
    """
    states = states.on("cpu")
    maxima, sums, outputs = states.maxima.double(), states.sums.double(), states.outputs.double()
    peak = maxima.amax(0)
    empty = peak.isneginf()
    shares = torch.exp2(maxima - torch.where(empty, 0.0, peak))
    total = torch.where(empty, 1.0, (shares * sums).sum(0))
    factor = 1 / total
    lse = torch.where(empty, -torch.inf, (peak + torch.log2(total)) * torch.log(torch.tensor(2.0)))
    if states.sink is not None:
        # A sink is one more summand of the denominator.
        beside = torch.exp(states.sink.double() - torch.where(empty, 0.0, lse))
        factor = factor / (1 + beside)
    weights = (shares * torch.where(empty, 0.0, factor))[..., None]
    out, size = (outputs * weights).sum(0), (outputs.abs() * weights).sum(0)
    rope = states.rope
    if rope is not None and d_qk == 512:
        rows = rope.positions.clamp(0, len(rope.cos_sin_cache) - 1)
        for token, head in torch.nonzero(~empty).tolist():
            angles = rope.cos_sin_cache[rows[token]]
            tail = out[token, head, -64:].clone()
            out[token, head, -64:] = oracles.rotate(tail, angles, rope.pairing, inverse=True)
        tails = size[..., -64:]
        if rope.pairing == "interleaved":
            both = (tails[..., 0::2] + tails[..., 1::2]).repeat_interleave(2, 2)
        else:
            both = (tails[..., :32] + tails[..., 32:]).repeat(1, 1, 2)
        size[..., -64:] = both
    return out, lse, size

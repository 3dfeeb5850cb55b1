"""The float64 answer that ``mlacast check`` compares fused calls with, and the error allowed.

Plain loops over tokens and heads. The rotation of the test case is by quarter turns, whose sines
and cosines are 0 and 1, so rotating adds no rounding and the only errors left are those of the call
under test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mlacast import Rope

D_V = 512
ROPE_START = 448
EPS = 1e-6
SM_SCALE = 512**-0.5


@dataclass(frozen=True)
class Case:
    """Inputs of a small call with norm, rotation, sink, lengths, bad indices and an empty row."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Tensor
    attn_sink: Tensor
    turned: Tensor

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments that prefill and decode share."""
        # Row 0: no turn, row 1: a quarter turn of every pair.
        table = torch.zeros(2, 64, device=self.q.device)
        table[0, :32] = 1.0
        table[1, 32:] = 1.0
        return {
            "sm_scale": SM_SCALE,
            "topk_length": self.topk_length,
            "attn_sink": self.attn_sink,
            "q_norm_eps": EPS,
            "rope": Rope(table, self.turned),
        }

    def tokens(self, start: int, stop: int) -> Case:
        """Return the case of a token range."""
        return replace(
            self,
            q=self.q[start:stop],
            indices=self.indices[start:stop],
            topk_length=self.topk_length[start:stop],
            turned=self.turned[start:stop],
        )


def make_case(device: torch.device) -> Case:
    """Build the case, the same on every device."""
    generator = torch.Generator().manual_seed(1)
    tokens, heads, rows, topk = 6, 4, 40, 16
    q = torch.randn(tokens, heads, D_V, generator=generator).to(torch.bfloat16)
    # Small multiples of a half, which the caches hold exactly.
    kv = torch.randint(-8, 9, (rows, D_V), generator=generator).to(torch.bfloat16) / 2
    indices = torch.randint(0, rows, (tokens, topk), generator=generator, dtype=torch.int32)
    indices[0, :5] = -1
    indices[1, 3] = rows
    lengths = torch.tensor([16, 16, 7, 0, 1, 12], dtype=torch.int32)
    sink = torch.tensor([0.0, 1.0, -float("inf"), -2.0])
    turned = torch.tensor([0, 1, 1, 1, 0, 1])
    parts = (q, kv, indices, lengths, sink, turned)
    return Case(*(part.to(device) for part in parts))


def _turn(x: Tensor, *, back: bool) -> Tensor:
    """Turn the interleaved pairs of the last 64 values by a quarter, or back."""
    even, odd = x[ROPE_START::2], x[ROPE_START + 1 :: 2]
    turned = x.clone()
    turned[ROPE_START::2] = odd if back else -odd
    turned[ROPE_START + 1 :: 2] = -even if back else even
    return turned


def attend64(case: Case) -> tuple[Tensor, Tensor]:
    """Return out [s_q, h_q, 512] and lse [s_q, h_q], float64 on the CPU."""
    q, kv, sink = case.q.double().cpu(), case.kv.double().cpu(), case.attn_sink.double().cpu()
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, D_V, dtype=torch.float64)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64)
    for token in range(tokens):
        listed = case.indices[token, : int(case.topk_length[token])].tolist()
        rows = kv[[index for index in listed if 0 <= index < kv.shape[0]]]
        if rows.shape[0] == 0:
            continue
        turned = bool(case.turned[token])
        for head in range(heads):
            query = q[token, head]
            norm = (query.square().mean() + EPS).rsqrt()
            if turned:
                query = _turn(query, back=False)
            logits = rows @ query * (norm * SM_SCALE)
            lse[token, head] = logits.logsumexp(0)
            weights = (logits - torch.logaddexp(lse[token, head], sink[head])).exp()
            value = weights @ rows
            out[token, head] = _turn(value, back=True) if turned else value
    return out, lse


def budget_bf16(wanted: Tensor) -> Tensor:
    """Error allowed to a bfloat16 output: one unit in the last place, and float32 sums.

    A unit in the last place of bfloat16 is at most 2 ** -7 of the value; rounding needs half of it,
    probabilities kept in bfloat16 the rest. Sums of 16 values up to 4 in float32 err by less than
    2 ** -14.
    """
    return wanted.abs() * 2.0**-7 + 2.0**-14


def budget_e4m3(wanted: Tensor) -> Tensor:
    """Error allowed to an MXFP8 output: half a step of e4m3 under the group's scale, and sums.

    Half a step is 2 ** -4 of a normal value. Below the smallest normal value half a step is
    2 ** -10 of the scale, which is at most amax / 224, so less than 2 ** -17 of the group's largest
    value. The last term is that of ``budget_bf16``.
    """
    amax = wanted.view(*wanted.shape[:-1], 16, 32).abs().amax(-1, keepdim=True)
    subnormal = (amax * 2.0**-17).expand(-1, -1, -1, 32).flatten(-2)
    return wanted.abs() * 2.0**-4 + subnormal + 2.0**-14

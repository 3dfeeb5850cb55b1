"""The error that bfloat16 weights have by themselves: a yardstick for fused kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import mlacast
from mlacast.reference import epilogue, prologue
from tests import oracles


def attend_with_bf16_weights(
    q: Tensor,
    selected: Sequence[Tensor],
    *,
    sm_scale: float,
    attn_sink: Tensor | None = None,
    q_norm_eps: float | None = None,
    rope: mlacast.Rope | None = None,
    q_order: str = "head",
) -> Tensor:
    """Attend in float32 with the un-normalised weights rounded to bfloat16, the output too.

    Tensor cores take both operands of P.V in 16 bits, so no fused kernel can do better than this
    but by luck. Rows are the token's own keys, one [n, d] tensor each.
    """
    values, norm = prologue(q, q_norm_eps=q_norm_eps, rope=rope, q_order=q_order)
    out = torch.zeros(q.shape[0], q.shape[1], 512)
    lse = torch.full(q.shape[:2], -torch.inf)
    for token, rows in enumerate(selected):
        if rows.shape[0] == 0:
            continue
        keys = rows.float()
        logits = (values[token] @ keys.T) * (norm[token] * sm_scale)[:, None]
        peak = logits.amax(1)
        weights = torch.exp(logits - peak[:, None])
        total = weights.sum(1)
        out[token] = (weights.bfloat16().float() @ keys[:, :512]) / total[:, None]
        lse[token] = peak + torch.log(total)
    rotate_back = rope if q.shape[2] == 512 else None
    return epilogue(out, lse, attn_sink=attn_sink, rope=rotate_back).bfloat16()


def assert_as_accurate(actual: Tensor, low_precision: Tensor, exact: Tensor) -> None:
    """Largest and mean error at most 1.5 times the yardstick's.

    Both round a few hundred weights at random, each against its own running maximum, so their
    errors are two draws of one distribution; 1.5 is the room for its largest value, and one bf16
    ulp of the largest output (which rounds last) keeps rows of one or two keys, where the yardstick
    may be exact, from failing for it.
    """
    assert not actual.isnan().any()
    error = (actual.cpu().double() - exact).abs()
    allowed = (low_precision.double() - exact).abs()
    ulp = oracles.bf16_ulp(exact)
    assert float(error.max()) <= 1.5 * float(allowed.max()) + float(ulp.max()), (
        float(error.max()),
        float(allowed.max()),
    )
    assert float(error.mean()) <= 1.5 * float(allowed.mean()) + float(ulp.mean()) / 4, (
        float(error.mean()),
        float(allowed.mean()),
    )


def assert_logarithms(actual: Tensor, exact: Tensor, d_qk: int, scale_times_norms: float) -> None:
    """lse or max_logits against float64.

    The bound is that of ``oracles.attend`` with an accumulation unit of 2**-22: products of bf16
    are exact, tensor cores align the summands of a step and drop two bits below float32's.
    """
    finite = exact.isfinite()
    assert torch.equal(actual.cpu().double()[~finite], exact[~finite])
    allowed = 4 * (d_qk**0.5 + 4) * 2.0**-22 * scale_times_norms + 2.0**-20 * exact[finite].abs()
    error = (actual.cpu().double()[finite] - exact[finite]).abs()
    assert bool((error <= allowed + 2.0**-20).all()), float(error.max())

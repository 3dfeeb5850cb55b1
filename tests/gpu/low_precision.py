"""The error that bfloat16 weights have by themselves: a yardstick for fused kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import mlacast
from mlacast.reference import epilogue, prologue
from tests import oracles


def weigh_in_bf16(
    q: Tensor,
    selected: Sequence[Tensor],
    *,
    sm_scale: float,
    attn_sink: Tensor | None = None,
    q_norm_eps: float | None = None,
    rope: mlacast.Rope | None = None,
    q_order: str = "head",
    base_keys: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend in float32 with the un-normalised weights rounded to bfloat16.

    Tensor cores take both operands of P.V in 16 bits, so no fused kernel can do better than this
    but by luck. Rows are the token's own keys, one [n, d] tensor each, on the device of ``q``.
    Weights are relative to the largest score, so that the largest weight is exactly one; or to the
    largest of the first ``base_keys``, but at most 2**8, like those of a kernel that moves their
    base only after large growth.

    Returns:
        out [s_q, h, 512], not rounded any further; and the magnitudes that were added up for each
        of its elements: an error of a share ``e`` in every weight moves an element by at most ``e``
        times that.
    """
    values, norm = prologue(q, q_norm_eps=q_norm_eps, rope=rope, q_order=q_order)
    out = torch.zeros(q.shape[0], q.shape[1], 512, device=q.device)
    size = torch.zeros_like(out)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for token, rows in enumerate(selected):
        if rows.shape[0] == 0:
            continue
        keys = rows.float()
        logits = (values[token] @ keys.T) * (norm[token] * sm_scale)[:, None]
        peak = logits.amax(1)
        base = torch.maximum(logits[:, :base_keys].amax(1), peak - 8 * math.log(2))
        weights = torch.exp(logits - base[:, None])
        total = weights.sum(1)
        rounded = weights.bfloat16().float()
        out[token] = (rounded @ keys[:, :512]) / total[:, None]
        size[token] = (rounded @ keys[:, :512].abs()) / total[:, None]
        lse[token] = base + torch.log(total)
    rotate_back = rope if q.shape[2] == 512 else None
    if rotate_back is not None:
        # Both of a pair, with factors of at most one.
        parts = size[..., -64:]
        if rotate_back.pairing == "interleaved":
            both = (parts[..., 0::2] + parts[..., 1::2]).repeat_interleave(2, 2)
        else:
            both = (parts[..., :32] + parts[..., 32:]).repeat(1, 1, 2)
        parts.copy_(both)
    out = epilogue(out, lse, attn_sink=attn_sink, rope=rotate_back)
    return out, epilogue(size, lse, attn_sink=attn_sink)


def attend_with_bf16_weights(q: Tensor, selected: Sequence[Tensor], **options: Any) -> Tensor:
    """Output of ``weigh_in_bf16`` rounded to bfloat16."""
    return weigh_in_bf16(q, selected, **options)[0].bfloat16()


def assert_as_accurate(actual: Tensor, low_precision: Tensor, exact: Tensor) -> None:
    """Largest and mean error at most 1.5 times the yardstick's.

    Both round a few hundred weights at random, each against its own running maximum, so their
    errors are two draws of one distribution; 1.5 is the room for its largest value, and one bf16
    ulp of the largest output (which rounds last) keeps rows of one or two keys, where the yardstick
    may be exact, from failing for it.
    """
    assert not actual.isnan().any()
    error = (actual.to(exact.device).double() - exact).abs()
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

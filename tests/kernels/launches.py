"""Call the launchers with float32 tensors on the CPU, and say what they must give.

The interpreter's bfloat16 is wrong, so queries and plain rows are float32 here and a "bf16" buffer
holds float32: it then shows the kernel's accumulators before any rounding. The expected values are
the reference's in float64, the allowed error is that of a float32 evaluation (``oracles.attend``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mlacast
from mlacast.kernels.triton.sparse_mla_decode import launch_sparse_mla_decode
from mlacast.kernels.triton.sparse_mla_prefill import launch_sparse_mla_prefill
from tests import oracles
from tests.oracles import AttentionOracle

SM_SCALE = 0.05
POISON = 7.0
# Inside, past and before a table of nine rows.
POSITIONS = torch.tensor([2, 400, -5])


@dataclass(frozen=True)
class Result:
    """What a launcher filled; ``max_logits`` is None for decode."""

    out: mlacast.QuantizedTensor
    lse: Tensor
    max_logits: Tensor | None = None


def float32_buffer(
    tokens: int, heads: int, device: torch.device | str = "cpu", features: int = 512
) -> mlacast.QuantizedTensor:
    """A buffer of unquantised rows in float32, which no public call can make."""
    buffer = mlacast.QuantizedTensor.empty(tokens, heads, features, mlacast.Bf16(), device)
    buffer.data = torch.full((tokens, heads, features), POISON, device=device)
    return buffer


def unit_table(max_pos: int) -> Tensor:
    """Cosines and sines of random angles, [max_pos, 64]: rotations keep the length of a query."""
    angles = torch.rand(max_pos, 32, dtype=torch.float64) * 2 * math.pi
    return torch.cat((angles.cos(), angles.sin()), 1).float()


def sinks(heads: int) -> Tensor:
    """Finite sinks, and from the second head on -inf, +inf, a huge one."""
    values = torch.randn(heads)
    for head, value in enumerate((-float("inf"), float("inf"), 90.0), start=1):
        if head < heads:
            values[head] = value
    return values


def prefill(
    q: Tensor, kv: Tensor, indices: Tensor, out: mlacast.QuantizedTensor, **options: Any
) -> Result:
    """Run the portable prefill kernel."""
    arguments: dict[str, Any] = {
        "sm_scale": SM_SCALE,
        "topk_length": None,
        "attn_sink": None,
        "q_norm_eps": None,
        "rope": None,
        "q_order": "head",
        **options,
    }
    lse = torch.full(q.shape[:2], POISON, device=q.device)
    max_logits = torch.full_like(lse, POISON)
    launch_sparse_mla_prefill(q, kv, indices, out=out, max_logits=max_logits, lse=lse, **arguments)
    return Result(out, lse, max_logits)


def decode(
    q: Tensor, k_cache: Tensor, indices: Tensor, out: mlacast.QuantizedTensor, **options: Any
) -> Result:
    """Run the portable decode kernel, and its combine kernel where the call is split."""
    arguments: dict[str, Any] = {
        "sm_scale": SM_SCALE,
        "topk_length": None,
        "extra_k_cache": None,
        "extra_indices": None,
        "extra_topk_length": None,
        "extra_kv_format": None,
        "attn_sink": None,
        "q_norm_eps": None,
        "rope": None,
        "q_order": "head",
        "num_splits": None,
        "batch_invariant": False,
        "workspace": None,
        **options,
    }
    lse = torch.full(q.shape[:2], POISON, device=q.device)
    launch_sparse_mla_decode(q, k_cache, indices, out=out, lse=lse, **arguments)
    return Result(out, lse)


def oracle(
    expected: tuple[Tensor, Tensor, Tensor | None],
    q: Tensor,
    selected: Sequence[Tensor],
    *,
    q_norm_eps: float | None = None,
    has_rope: bool = False,
) -> AttentionOracle:
    """Expected float64 (out, lse, max_logits) with the error bounds of a float32 evaluation.

    The bounds are those of the un-rotated query in head order: a rotation by unit vectors keeps its
    length, and rounds its result once more, which the factor 2 covers with the rotation of the
    output (two products of size at most |v|).
    """
    plain = oracles.attend(q, selected, sm_scale=SM_SCALE, q_norm_eps=q_norm_eps)
    out, lse, max_logits = expected
    return dataclasses.replace(
        plain,
        out=out,
        lse=lse,
        max_logits=plain.max_logits if max_logits is None else max_logits,
        logit_error=plain.logit_error * (2 if has_rope else 1),
        out_error=plain.out_error * (4 if has_rope else 1),
    )


def assert_matches(result: Result, expected: AttentionOracle) -> None:
    """Compare float32 results with their oracle."""
    oracles.assert_matches(
        result.out.data, result.lse, expected, actual_max_logits=result.max_logits
    )

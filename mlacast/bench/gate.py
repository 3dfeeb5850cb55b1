"""The gate in front of every timing: a few tokens against the float64 reference.

No substitute for the tests. It keeps a wrong kernel from being reported as a fast one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import mlacast
from mlacast import reference
from mlacast.bench.inputs import InputSet, Workload

SAMPLED_TOKENS = 4
# Norm of the error over the norm of the output. bfloat16 twice, probabilities and result: half a
# step is 2**-9 of a value. e4m3: half a step is 2**-4 of a value, at most 2**-4 / sqrt(3) = 3.6e-2
# in the mean square, and the bfloat16 probabilities on top.
LIMIT_BF16 = 6e-3
LIMIT_E4M3 = 4e-2
# The query of a fused kernel is a bfloat16 operand; logits here have a deviation of one.
LIMIT_LSE = 5e-3


@dataclass(frozen=True)
class Gate:
    """How far a call is from the reference; ``unwritten`` counts outputs left as they were."""

    error: float
    limit: float
    lse_error: float
    lse_limit: float
    unwritten: int

    @property
    def passed(self) -> bool:
        """Whether the call may be timed. NaN does not pass."""
        right = self.error <= self.limit and self.lse_error <= self.lse_limit
        return right and self.unwritten == 0


def check_call(
    workload: Workload, item: InputSet, call: Callable[[], object], *, has_lse: bool = True
) -> Gate:
    """Run ``call``, which fills ``item.out``, and compare some of its tokens.

    Args:
        workload: The case.
        item: The set that the call works on.
        call: Returns what the public operation returns.
        has_lse: False for a call that returns no log-sum-exp.
    """
    _poison(item.out)
    result = call()
    count = workload.case.tokens
    sampled = {0, count - 1, *random.sample(range(count), min(count, SAMPLED_TOKENS))}
    rows = torch.tensor(sorted(sampled), device=item.q.device)
    expected = getattr(reference, workload.case.op)(
        **workload.arguments(item, rows), compute_dtype=torch.float64
    )
    wanted, wanted_lse = expected[0], expected[-1]
    found = torch.cat([_values(item.out, row) for row in rows.tolist()]).view_as(wanted)
    error = ((found - wanted).norm() / wanted.norm()).item()
    lse_error = 0.0
    if has_lse:
        assert isinstance(result, tuple), "the operation returns a tuple"
        lse_error = (result[-1][rows].double() - wanted_lse).abs().max().item()
    limit = LIMIT_E4M3 if isinstance(item.out, mlacast.QuantizedTensor) else LIMIT_BF16
    return Gate(error, limit, lse_error, LIMIT_LSE, _count_nan(item.out))


def _poison(out: mlacast.QuantizedTensor | Tensor) -> None:
    """Fill with NaN codes."""
    if isinstance(out, Tensor):
        out.fill_(float("nan"))
    else:
        out.data.view(torch.uint8).fill_(0x7F)


def _count_nan(out: mlacast.QuantizedTensor | Tensor) -> int:
    if isinstance(out, Tensor):
        return int(out.isnan().sum().item())
    return int(((out.data.view(torch.uint8) & 0x7F) == 0x7F).sum().item())


def _values(out: mlacast.QuantizedTensor | Tensor, row: int) -> Tensor:
    """One token's values in float64."""
    if isinstance(out, Tensor):
        return out[row : row + 1].double()
    return out[row : row + 1].dequantize().double()

"""The chain that a fused call replaces: norm and RoPE, attention alone, inverse RoPE and cast.

The attention of the chain is the same public operation with a bfloat16 output and no other step
but the sink, so the difference is what fusing saves, not what another attention costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

import mlacast
from mlacast.bench.inputs import NORM_EPS, InputSet, Workload, plain_output

STEPS = ("norm_rope", "attention", "cast")
# The cast kernel writes e4m3 by an instruction that older GPUs lack.
OLDEST_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Chain:
    """The three steps on one set of inputs, each a call of its own."""

    steps: dict[str, Callable[[], object]]

    def __call__(self) -> object:
        """Run the steps; returns what the attention returns."""
        self.steps["norm_rope"]()
        result = self.steps["attention"]()
        self.steps["cast"]()
        return result


def has_chain(workload: Workload) -> bool:
    """Whether the case has separate steps, and this device what their kernels need.

    A case with batch invariance is measured against the same case without.
    """
    device = workload.sets[0].q.device
    case = workload.case
    if not case.fused or case.batch_invariant:
        return False
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY


def chain_of(workload: Workload, item: InputSet) -> Chain:
    """Build the chain over one set of inputs; its result goes to ``item.out`` as well."""
    from mlacast.bench.chain_kernels import norm_rope, rope_cast

    arguments = workload.arguments(item)
    rope, q, out = arguments["rope"], torch.empty_like(item.q), item.out
    assert isinstance(out, mlacast.QuantizedTensor), "only fused cases have a chain"
    plain = plain_output(workload.case, item.q.device)
    alone = {**arguments, "q": q, "q_norm_eps": None, "rope": None, "out": plain}
    op = getattr(mlacast, workload.case.op)
    return Chain(
        {
            "norm_rope": functools.partial(norm_rope, item.q, NORM_EPS, rope, q),
            "attention": functools.partial(op, **alone),
            "cast": functools.partial(rope_cast, plain, rope, out),
        }
    )

"""The operations of the core that a step makes, seen by a profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch

STEP = "mlacast::mla_attention"


def operations_of(call: Callable[[], object]) -> list[str]:
    """Names of the operations of mlacast that a call makes, the operator of a whole step apart."""
    with torch.autograd.profiler.profile() as profile:
        call()
    names = [event.name for event in profile.function_events or []]
    return [name for name in names if name.startswith("mlacast::") and name != STEP]

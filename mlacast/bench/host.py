"""What an eager call costs the host, and whether it keeps memory.

Calls are issued without waiting for the device, fewer than its queue holds, so the time is that of
Python, the checks, dispatch and the launches. torch's own launch is measured beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mlacast.bench.cases import DECODE, PREFILL, Case
from mlacast.bench.inputs import Pools, prepare
from mlacast.descriptors.kv_format import KvFormat

CALLS = 200
TARGET_US = 20.0
_SLOTS = 1 << 14
CASES = (
    Case("host-prefill-h64-k64-t1", PREFILL, 1, 64, 64, _SLOTS),
    Case(
        "host-decode-v4-h64-128+512-b1",
        DECODE,
        1,
        64,
        128,
        _SLOTS,
        kv_format=KvFormat.V4,
        extra_topk=512,
        extra_kv_format=KvFormat.V4,
    ),
)


@dataclass(frozen=True)
class HostCost:
    """Cost of one eager call.

    Attributes:
        name: What was called.
        us: Host time of a call, median over repeats of 200 calls.
        torch_us: Host time of ``torch.add`` into a given output, measured the same way.
        allocated_bytes: Change of allocated device memory over 200 calls.
        reserved_bytes: Change of reserved device memory over 200 calls.
    """

    name: str
    us: float
    torch_us: float
    allocated_bytes: int
    reserved_bytes: int

    @property
    def met(self) -> bool:
        """Whether the call stays within 20 us of torch's own and keeps no memory."""
        within = self.us - self.torch_us <= TARGET_US
        return within and self.allocated_bytes <= 0 and self.reserved_bytes <= 0


def host_us(call: Callable[[], object], repeats: int) -> float:
    """Median host time of a call in us."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    # The first round fills caches.
    return statistics.median(times[1:])


def measure_host(pools: Pools, repeats: int) -> list[HostCost]:
    """Measure every host case."""
    x, y = torch.zeros(64, device=pools.device), torch.zeros(64, device=pools.device)
    torch_us = host_us(lambda: torch.add(x, 1.0, out=y), repeats)
    costs = []
    for case in CASES:
        workload = prepare(case, pools, 1, 0)
        call = workload.call(workload.sets[0])
        us = host_us(call, repeats)
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated() - allocated
        reserved = torch.cuda.memory_reserved() - reserved
        costs.append(HostCost(case.name, us, torch_us, allocated, reserved))
    return costs

"""Registered cases at a size that the reference runs on the CPU, and a clock that is a formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from mlacast.bench.cases import Case
from mlacast.bench.costs import Roofs
from mlacast.bench.host import HostCost
from mlacast.bench.inputs import Pools
from mlacast.bench.protocols import Call, Timing, summarise
from mlacast.bench.run import CaseResult, document, run_case

ROOFS = Roofs(4000.0, 800.0, 700.0, 1.0)
L2_BYTES = 1 << 20
MACHINE: dict[str, Any] = {
    "gpu": "Test GPU",
    "driver_clock_power": None,
    "torch": "2.13.0",
    "triton": "3.6.0",
    "mlacast": "0.1.0",
    "commit": None,
    "date": "2026-01-02T03:04:05+00:00",
    "command": "mlacast bench --quick",
}
HOST = [HostCost("host-prefill", 25.0, 4.0, 0, 0), HostCost("host-decode", 20.0, 4.0, 0, 0)]


def shrink(case: Case) -> Case:
    """The case with few tokens, heads, columns and rows."""
    return dataclasses.replace(
        case,
        tokens=min(case.tokens, 5),
        heads=min(case.heads, 8),
        topk=16,
        rows=128,
        extra_topk=min(case.extra_topk, 16),
    )


def ten_us(protocol: str, calls: Sequence[Call], repeats: int) -> Timing:
    """Run the first call and say that every call took 10 us."""
    calls[0]()
    return summarise([10.0 * len(calls)] * repeats, len(calls))


def run_small(case: Case) -> CaseResult:
    """Gate and "time" a shrunk case on the CPU."""
    pools = Pools(torch.device("cpu"))
    return run_case(shrink(case), pools, l2_bytes=L2_BYTES, repeats=3, chain=True, measure=ten_us)


def report_of(results: Sequence[CaseResult]) -> dict[str, Any]:
    """The document of a run."""
    return document(MACHINE, ROOFS, results, HOST)

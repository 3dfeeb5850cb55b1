"""Ceilings of the device, measured in the run whose times are compared with them."""

from __future__ import annotations

import time

import torch

from mlacast.bench.costs import Roofs
from mlacast.bench.protocols import Call, burst, graph

_COPY_BYTES = 1 << 31
_MATMUL = 8192
_SUSTAINED_S = 2.0
_NODES = 500


def measure_roofs(device: torch.device, repeats: int) -> Roofs:
    """Measure copy bandwidth, the matrix rate cool and sustained, and the cost of a graph node."""
    copy = burst(_copy(device), repeats)
    a, b = (torch.randn((_MATMUL, _MATMUL), device=device).bfloat16() for _ in range(2))
    c = torch.empty_like(a)

    def multiply() -> object:
        return torch.mm(a, b, out=c)

    matmul = burst(multiply, repeats)
    end = time.monotonic() + _SUSTAINED_S
    while time.monotonic() < end:
        sustained = graph([multiply] * 20, 5)

    one = torch.zeros(1, device=device)
    node = graph([lambda: one.fill_(1.0)] * _NODES, repeats)
    # Operations in units of 1e6, which over microseconds are TFLOP/s.
    operations = 2 * _MATMUL**3 / 1e6
    return Roofs(
        copy_gbs=2 * _COPY_BYTES / copy.median_us / 1e3,
        matmul_tflops=operations / matmul.median_us,
        matmul_sustained_tflops=operations / sustained.median_us,
        node_us=node.median_us,
    )


def _copy(device: torch.device) -> Call:
    """Copy of random bytes, far larger than any cache."""
    source = torch.randint(0, 256, (_COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)

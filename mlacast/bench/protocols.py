"""How a time is taken. Both protocols report microseconds of one call.

``burst``: calls one at a time, each after 30 ms of rest and a spin kernel of about 1 ms. The clock
is then at its maximum and the launch is hidden behind the spin: what one large call takes.

``graph``: one CUDA graph of calls that rotate over input sets larger than the L2 cache, replayed;
a call's time is the replay's over the number of calls. Launches follow each other without gaps, as
in a server, and the power limit acts. Sustained rates are 6 to 14 % below those of a burst.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

REST_S = 0.03
# About 1 ms at 1.98 GHz.
SPIN_CYCLES = 2_000_000
WARM_UP = 3
# A replay shall be long against the launch of a graph, and the clock up before the first is timed.
_FEWEST_CALLS = 32
_WARM_UP_S = 0.03


@dataclass(frozen=True)
class Timing:
    """Times of one call in us over ``repeats`` measurements of ``calls`` calls each."""

    median_us: float
    p10_us: float
    p90_us: float
    repeats: int
    calls: int


def summarise(times_us: Sequence[float], calls: int) -> Timing:
    """Median and the 10th and 90th percentile of measured times, each over ``calls`` calls."""
    each = sorted(us / calls for us in times_us)
    tenths = statistics.quantiles(each, n=10, method="inclusive") if len(each) > 1 else each * 9
    return Timing(statistics.median(each), tenths[0], tenths[-1], len(each), calls)


def burst(call: Call, repeats: int) -> Timing:
    """Time single calls at full clock."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        time.sleep(REST_S)
        # torch has no public spin kernel.
        torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
        start, stop = _event(), _event()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return summarise(times, 1)


def graph(calls: Sequence[Call], repeats: int) -> Timing:
    """Time replays of one CUDA graph of ``calls``, all repeated if they are few."""
    calls = list(calls) * -(-_FEWEST_CALLS // len(calls))
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:WARM_UP]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        for call in calls:
            call()
    warm = time.monotonic() + _WARM_UP_S
    while time.monotonic() < warm:
        recorded.replay()
        torch.cuda.synchronize()
    marks = [_event() for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        recorded.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [
        start.elapsed_time(stop) * 1e3 for start, stop in zip(marks[:-1], marks[1:], strict=True)
    ]
    recorded.reset()
    return summarise(times, len(calls))


def measure(protocol: str, calls: Sequence[Call], repeats: int) -> Timing:
    """Time calls by the protocol of that name; a burst takes the first."""
    return burst(calls[0], repeats) if protocol == "burst" else graph(calls, repeats)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

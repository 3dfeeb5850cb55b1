"""Ten thousand mixed steps: memory, compilations, latency, and a graph beside eager calls.

    python benchmarks/soak.py --json benchmarks/results/soak_h200.json

A step is a prefill and a decode of changing sizes into one buffer pair, then one
``grouped_out_project`` over it, as an engine runs it. Reported are memory of torch and of the
process before, after and at every tenth, compilations after the warm-up, the median latency of the
first and last tenth of the steps, and whether a captured step, replayed on one stream while eager
steps run on another, gives the bits of an eager call every time. Fails if memory grows, anything
compiles, a bit differs, or the last tenth is more than a tenth slower. ``--device cpu`` runs it
without graphs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mlacast
from mlacast.bench.machine import describe

HEADS, GROUPS, COLUMNS = 16, 4, 256
MOST_PREFILL, MOST_DECODE, TOPK = 96, 64, 192
ROWS, PAGE_SIZE = 4096, 64
FORMAT = mlacast.Mxfp8("chunk32")
SLOWER = 1.1
# Bytes that the process may grow by: tables of known calls fill, and the host's allocator keeps
# what threads once needed. In the second half of the steps the tables are full.
HOST_ROOM = 64 << 20
HOST_ROOM_LATE = 8 << 20
TENTHS = 10
GRAPH_EVERY = 25


@dataclass(frozen=True)
class Pool:
    """Inputs of all steps; a step takes rows of them."""

    q: Tensor
    kv: Tensor
    cache: Tensor
    indices: Tensor
    lengths: Tensor
    table: Tensor
    positions: Tensor
    sink: Tensor
    weight: Tensor


def make_pool(device: torch.device) -> Pool:
    """Draw the inputs, with a fixed seed."""
    torch.manual_seed(0)
    rows = MOST_PREFILL + MOST_DECODE + 32
    kv = torch.randn(ROWS, 512, device=device).bfloat16()
    cache = mlacast.KvFormat.V4.allocate(ROWS // PAGE_SIZE, PAGE_SIZE, device=device)
    slots = torch.arange(ROWS, device=device)
    mlacast.kv_cache_append(kv, slots, cache, mlacast.KvFormat.V4)
    indices = torch.randint(-1, ROWS, (rows, TOPK), dtype=torch.int32, device=device)
    lengths = torch.randint(0, TOPK + 1, (rows,), dtype=torch.int32, device=device)
    angles = torch.rand(512, 32, device=device) * 6.28
    return Pool(
        q=torch.randn(rows, HEADS, 512, device=device).bfloat16(),
        kv=kv,
        cache=cache,
        indices=indices,
        lengths=lengths,
        table=torch.cat((angles.cos(), angles.sin()), 1),
        positions=torch.randint(0, 512, (rows,), device=device),
        sink=torch.randn(HEADS, device=device),
        weight=torch.randn(GROUPS, COLUMNS, HEADS * 512 // GROUPS, device=device).bfloat16(),
    )


@dataclass(frozen=True)
class Shape:
    """Tokens of a step, and the first row that it takes of the inputs."""

    prefill: int
    decode: int
    first: int
    topk: int


def draw_shape(source: random.Random) -> Shape:
    """Any shape, steps of prefill or decode alone among them."""
    return Shape(
        source.choice((0, source.randint(1, MOST_PREFILL))),
        source.choice((1, source.randint(0, MOST_DECODE))),
        source.randint(0, 31),
        source.randint(1, TOPK),
    )


def run_step(
    pool: Pool, shape: Shape, buffer: mlacast.QuantizedTensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the rows of the buffer and project them; lse of both launches and the product."""
    total = shape.prefill + shape.decode
    sums = []
    for is_prefill in (True, False):
        first, count = (0, shape.prefill) if is_prefill else (shape.prefill, shape.decode)
        rows = slice(shape.first + first, shape.first + first + count)
        common: dict[str, Any] = {
            "sm_scale": 0.05,
            "topk_length": pool.lengths[rows],
            "attn_sink": pool.sink,
            "q_norm_eps": 1e-6,
            "rope": mlacast.Rope(pool.table, pool.positions[rows]),
            "q_order": "chunk16",
            "out": buffer[first : first + count],
        }
        q, indices = pool.q[rows], pool.indices[rows, : shape.topk]
        if is_prefill:
            sums.append(mlacast.sparse_mla_prefill(q, pool.kv, indices, **common)[2])
        else:
            kv_format = mlacast.KvFormat.V4
            sums.append(
                mlacast.sparse_mla_decode(
                    q, pool.cache, indices, kv_format=kv_format, batch_invariant=True, **common
                )[1]
            )
    projected = mlacast.grouped_out_project(buffer[:total], pool.weight, weight_order="buffer")
    return sums[0], sums[-1], projected


def new_buffer(device: torch.device) -> mlacast.QuantizedTensor:
    """A buffer pair for the largest step."""
    features = HEADS * 512 // GROUPS
    rows = MOST_PREFILL + MOST_DECODE
    return mlacast.QuantizedTensor.empty(rows, GROUPS, features, FORMAT, device)


def host_bytes() -> int:
    """Memory of this process."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def memory(device: torch.device) -> dict[str, int]:
    """Bytes that torch has given out and reserved, and those of the process."""
    found = {"host": host_bytes()}
    if device.type == "cuda":
        found["allocated"] = torch.cuda.memory_allocated(device)
        found["reserved"] = torch.cuda.memory_reserved(device)
    return found


def count_compilations() -> list[int]:
    """A counter of what Triton compiles from now on; stays zero without Triton."""
    counter = [0]
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return counter
    compile_now = JITFunction._do_compile

    def counted(*args: Any, **options: Any) -> Any:
        counter[0] += 1
        return compile_now(*args, **options)

    JITFunction._do_compile = counted
    return counter


class Replayed:
    """A captured step, replayed on a stream of its own beside eager steps."""

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self.shape = Shape(33, 17, 5, 150)
        self.buffer = new_buffer(device)
        self.stream: Any = torch.cuda.Stream(device)
        expected = run_step(pool, self.shape, self.buffer)
        total = self.shape.prefill + self.shape.decode
        self._codes = self.buffer[:total].data.view(torch.uint8)
        self.expected = [part.clone() for part in (*expected, self._codes)]
        self.stream.wait_stream(torch.cuda.current_stream())
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.results = run_step(pool, self.shape, self.buffer)

    def replay(self) -> None:
        """Erase the results and start a replay; does not wait."""
        with torch.cuda.stream(self.stream):
            self._codes.fill_(0x5A)
            for part in self.results:
                part.fill_(7.0)
            self.graph.replay()

    def differs(self) -> bool:
        """Wait, and compare with the eager call."""
        self.stream.synchronize()
        found = (*self.results, self._codes)
        return not all(
            torch.equal(part.view(torch.uint8), wanted.view(torch.uint8))
            for part, wanted in zip(found, self.expected, strict=True)
        )


def timed_steps(
    pool: Pool, shapes: list[Shape], device: torch.device, step: Callable[[int], None]
) -> list[float]:
    """Seconds of each step, its work on the device included; ``step`` comes before each."""
    buffer = new_buffer(device)
    seconds = []
    for number, shape in enumerate(shapes):
        step(number)
        start = time.perf_counter()
        run_step(pool, shape, buffer)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def soak(device: torch.device, steps: int, warm_up: int, seed: int) -> dict[str, Any]:
    """Run the steps and report."""
    source = random.Random(seed)
    pool = make_pool(device)
    compilations = count_compilations()
    warm = [Shape(MOST_PREFILL, MOST_DECODE, 0, TOPK), Shape(0, 1, 1, 1), Shape(1, 0, 1, 16)]
    warm += [draw_shape(source) for _ in range(warm_up)]
    timed_steps(pool, warm, device, lambda number: None)
    replayed = Replayed(pool, device) if device.type == "cuda" else None
    mismatches = replays = 0

    by_tenth: list[int] = []

    def beside(number: int) -> None:
        nonlocal mismatches, replays
        if number * TENTHS // steps > len(by_tenth):
            by_tenth.append(host_bytes())
        if replayed is None or number % GRAPH_EVERY:
            return
        if replays and replayed.differs():
            mismatches += 1
        replayed.replay()
        replays += 1

    shapes = [draw_shape(source) for _ in range(steps)]
    warmed, compiled = memory(device), compilations[0]
    seconds = timed_steps(pool, shapes, device, beside)
    if replayed is not None and replays:
        mismatches += replayed.differs()
    after = memory(device)
    by_tenth.append(after["host"])
    tenth = max(len(seconds) // TENTHS, 1)
    # Steps that share the device with a replay take longer.
    alone = [
        value if replayed is None or at % GRAPH_EVERY else None for at, value in enumerate(seconds)
    ]
    medians = [
        statistics.median([value for value in part if value is not None] or [0.0]) * 1e6
        for part in (alone[:tenth], alone[-tenth:])
    ]
    return {
        "steps": steps,
        "warm_up": len(warm),
        "seed": seed,
        "memory_after_warm_up": warmed,
        "memory_at_the_end": after,
        "host_memory_by_tenth": by_tenth,
        "compilations": compilations[0],
        "compilations_after_warm_up": compilations[0] - compiled,
        "median_us": {"first_tenth": round(medians[0], 1), "last_tenth": round(medians[1], 1)},
        "graph_replays": replays,
        "replays_that_differ": mismatches,
    }


def complaints(report: dict[str, Any]) -> list[str]:
    """What a report says that must not be."""
    found = []
    before, after = report["memory_after_warm_up"], report["memory_at_the_end"]
    for name, size in after.items():
        room = HOST_ROOM if name == "host" else 0
        if size > before[name] + room:
            found.append(f"{name} memory grew from {before[name]} to {size} bytes")
    by_tenth = report["host_memory_by_tenth"]
    late = by_tenth[-1] - by_tenth[(len(by_tenth) - 1) // 2]
    if late > HOST_ROOM_LATE:
        found.append(f"host memory grew by {late} bytes in the second half")
    if report["compilations_after_warm_up"]:
        found.append(f"{report['compilations_after_warm_up']} compilations after the warm-up")
    if report["replays_that_differ"]:
        found.append(f"{report['replays_that_differ']} replays differ from the eager call")
    first, last = report["median_us"].values()
    if last > SLOWER * first:
        found.append(f"a step took {first} us at first and {last} us at last")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write the report; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    report = soak(device, options.steps, options.warm_up, options.seed)
    report["complaints"] = complaints(report)
    machine: dict[str, Any] = {"device": "cpu"}
    if device.type == "cuda":
        machine = describe(device) | {"command": " ".join(["python", *sys.argv])}
    text = json.dumps({"machine": machine, **report}, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(bool(report["complaints"]))


if __name__ == "__main__":
    sys.exit(main())

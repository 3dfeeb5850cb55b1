"""Check ``rope_quantize_fp8``, ``kv_cache_append`` and ``kv_cache_gather``, then time them.

    PYTHONPATH=. python benchmarks/time_caches.py --jobs 16 --json FILE
    PYTHONPATH=. python benchmarks/time_caches.py --jobs 16 --sweep

Every case runs once on poisoned or empty memory first and is compared byte for byte with the
reference on the CPU, for some of its rows; one that differs is not timed. Times follow the graph
protocol of ``mlacast.bench.protocols``: input sets larger than the L2 cache, launches without gaps;
``--burst`` adds single calls at full clock.

GB/s counts bytes read and written once. "copy" is that over the bandwidth of a copy of 1 GB in the
same run, which the targets are about: 80 % of it for 4096 tokens of 128 heads, 70 % for 8192 rows
of a cache. "same" compares with a copy of as many bytes by the same protocol, the faster of
``Tensor.copy_`` and an elementwise kernel: a call of a few us never sees the bandwidth of a long
one. Up to 16 tokens may take three times the node of an empty kernel, 64 tokens 5.5 us.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.cache_calls import Case, Work, compile_case, sweep_cases, usual_cases
from mlacast.bench.machine import describe
from mlacast.bench.protocols import burst, graph

SCHEMA = 1
COPY_BYTES = 1 << 30
NODES = 500
SHARES = {"rope_quantize_fp8": 0.8, "kv_cache_append": 0.7, "kv_cache_gather": 0.7}
NODES_OF_FEW_TOKENS = 3.0
US_OF_64_TOKENS = 5.5
FEWEST_SETS, MOST_SETS = 2, 512


def sets_for(moved_bytes: int, l2_bytes: int) -> int:
    """Input sets that are twice as large as the cache."""
    return min(max(math.ceil(2 * l2_bytes / moved_bytes), FEWEST_SETS), MOST_SETS)


def copy_us(moved_bytes: int, l2_bytes: int, repeats: int) -> float:
    """Time of copying half of ``moved_bytes``, by the faster of two ways."""
    words = max(moved_bytes // 2 // 16 * 2, 2)
    sets = sets_for(moved_bytes, l2_bytes)
    source = torch.ones((sets, words), dtype=torch.int64, device="cuda")
    target = torch.empty_like(source)
    ways: tuple[Callable[[int], Callable[[], object]], ...] = (
        lambda at: lambda: target[at].copy_(source[at]),
        lambda at: lambda: torch.bitwise_not(source[at], out=target[at]),
    )
    return min(graph([way(at) for at in range(sets)], repeats).median_us for way in ways)


def measure_ceilings(repeats: int) -> dict[str, float]:
    """Bandwidth of a long copy, and the node of an empty kernel."""
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = burst(lambda: target.copy_(source), min(repeats, 8))
    one = torch.zeros(1, device="cuda")
    node = graph([lambda: one.fill_(1.0)] * NODES, repeats)
    return {"copy_gbs": 2 * COPY_BYTES / copy.median_us / 1e3, "node_us": node.median_us}


def target_us(case: Case, ceilings: dict[str, float]) -> float | None:
    """Time to reach, None where there is none."""
    if case.rows >= 4096:
        return case.moved_bytes / ceilings["copy_gbs"] / 1e3 / SHARES[case.op]
    if case.op != "rope_quantize_fp8":
        return None
    return US_OF_64_TOKENS if case.rows == 64 else NODES_OF_FEW_TOKENS * ceilings["node_us"]


def run_case(
    case: Case, ceilings: dict[str, float], copies: dict[int, float], options: Any, l2_bytes: int
) -> dict[str, Any]:
    """Check and time a case."""
    result: dict[str, Any] = {
        "name": case.name,
        "op": case.op,
        "rows": case.rows,
        "kv_format": case.kv_format and case.kv_format.name,
        "fused": case.fused,
        "config": case.config and case.config._asdict(),
        "bytes": case.moved_bytes,
        "error": None,
    }
    try:
        work = Work(case, sets_for(case.moved_bytes, l2_bytes))
        work.check()
        timing = graph(work.calls, options.repeats)
        if options.burst:
            result["burst_us"] = burst(work.calls[0], options.repeats).median_us
    except Exception as error:
        return {**result, "error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    if case.moved_bytes not in copies:
        copies[case.moved_bytes] = copy_us(case.moved_bytes, l2_bytes, options.repeats)
    same_us = copies[case.moved_bytes]
    us, goal = timing.median_us, target_us(case, ceilings)
    gbs = case.moved_bytes / us / 1e3
    return {
        **result,
        "us": us,
        "p10_us": timing.p10_us,
        "p90_us": timing.p90_us,
        "gbs": gbs,
        "share_of_copy": gbs / ceilings["copy_gbs"],
        "same_copy_us": same_us,
        "share_of_same_copy": same_us / us,
        "target_us": goal,
        "met": None if goal is None else us <= goal,
    }


def line(result: dict[str, Any]) -> str:
    """One line of a report."""
    if result["error"]:
        return f"{result['name']}: FAILED {result['error']}"
    said = f"{result['name']}: {result['us']:.2f} us"
    said += f" ({result['p10_us']:.2f}-{result['p90_us']:.2f}), {result['gbs']:.0f} GB/s"
    said += f", copy {result['share_of_copy']:.0%}, same {result['share_of_same_copy']:.0%}"
    said += f" of {result['same_copy_us']:.2f} us"
    if "burst_us" in result:
        said += f", burst {result['burst_us']:.2f} us"
    if result["target_us"] is not None:
        said += f", target {result['target_us']:.2f} us {'met' if result['met'] else 'MISSED'}"
    return said


def compile_all(cases: list[Case], jobs: int) -> None:
    """Compile in ``jobs`` processes, each case's kernel once."""
    if jobs > 1:
        # A process that has used CUDA cannot be forked.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(cases)), context) as workers:
            list(workers.map(compile_case, cases))


def run(cases: list[Case], options: Any) -> dict[str, Any]:
    """Run cases and return the document that ``--json`` writes."""
    device = torch.device("cuda", torch.cuda.current_device())
    machine = describe(device)
    kept = [word for word in sys.argv[1:] if not word.startswith("--json=")]
    if "--json" in kept:
        del kept[kept.index("--json") : kept.index("--json") + 2]
    machine["command"] = shlex.join(["python", "benchmarks/time_caches.py", *kept])
    ceilings = measure_ceilings(options.repeats)
    print(machine["gpu"], machine["torch"], machine["triton"], ceilings, flush=True)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine,
        "ceilings": ceilings,
        "cases": [],
    }
    copies: dict[int, float] = {}
    for case in cases:
        if time.monotonic() > options.stop_at:
            print("time is up", flush=True)
            break
        result = run_case(case, ceilings, copies, options, machine["l2_bytes"])
        torch.cuda.empty_cache()
        print(line(result), flush=True)
        document["cases"].append(result)
        if options.json:
            # Rewritten after every case: a run cut short leaves its results.
            text = json.dumps(document, indent=1, allow_nan=False)
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(text + "\n", encoding="utf-8")
    return document


def main() -> int:
    """Compile, check, time; the exit code counts cases that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--sweep", action="store_true", help="programs of other sizes, for few calls"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--burst", action="store_true", help="also time single calls")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument("--seconds", type=float, default=150, help="for everything")
    parser.add_argument("--json", type=Path, help="file to write every number to")
    options = parser.parse_args()
    cases = sweep_cases() if options.sweep else usual_cases()
    cases = [case for case in cases if options.case in case.name]
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    if not torch.cuda.is_available():
        print("timings need an NVIDIA GPU, and torch sees none here", file=sys.stderr)
        return 1
    options.stop_at = time.monotonic() + options.seconds
    # A kernel that hangs cannot be interrupted.
    watchdog = threading.Timer(options.seconds + 20, lambda: (print("HANG"), os._exit(3)))
    watchdog.daemon = True
    watchdog.start()
    torch.manual_seed(0)
    started = time.monotonic()
    compile_all(cases, options.jobs)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    document = run(cases, options)
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    return sum(result["error"] is not None for result in document["cases"])


if __name__ == "__main__":
    sys.exit(main())

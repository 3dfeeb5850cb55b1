"""Run cases: gate, then time, then collect everything in one JSON document."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import mlacast
from mlacast.bench.cases import Case
from mlacast.bench.chain import STEPS, chain_of, has_chain
from mlacast.bench.costs import Roofs, flops, moved_bytes, padded_floor_us, roof_of
from mlacast.bench.gate import Gate, check_call
from mlacast.bench.host import HostCost, measure_host
from mlacast.bench.inputs import Pools, Workload, number_of_sets, prepare
from mlacast.bench.machine import describe
from mlacast.bench.protocols import Call, Timing, measure
from mlacast.bench.roofs import measure_roofs

SCHEMA = 1
# A peer is another measurement: differences below this are noise.
PEER_MARGIN = 1.02

Measure = Callable[[str, Sequence[Call], int], Timing]


@dataclass
class CaseResult:
    """What a run knows about a case.

    Attributes:
        case: The case.
        backend: Backend that ran it.
        gates: "op", and "chain" where there is one: how far from the reference.
        times: "op"; "chain" and its steps where there are any. Empty if a gate did not pass.
        error: Why there are no times, or None.
    """

    case: Case
    backend: str | None = None
    gates: dict[str, Gate] = field(default_factory=dict)
    times: dict[str, Timing] = field(default_factory=dict)
    error: str | None = None


def run_case(
    case: Case,
    pools: Pools,
    *,
    l2_bytes: int,
    repeats: int,
    chain: bool,
    measure: Measure = measure,
) -> CaseResult:
    """Check a case, then time it; an exception becomes the result's ``error``."""
    result = CaseResult(case)
    try:
        workload = prepare(case, pools, number_of_sets(case, l2_bytes), l2_bytes)
        _check(result, workload, chain)
        if result.error is None:
            _time(result, workload, chain, repeats, measure)
    except Exception as error:
        result.times = {}
        result.error = f"{type(error).__name__}: {error}"
    return result


def _check(result: CaseResult, workload: Workload, chain: bool) -> None:
    """Fill backend and gates."""
    item = workload.sets[0]
    arguments = {**workload.arguments(item), "out": item.out}
    result.backend = mlacast.explain(result.case.op, **arguments).backend
    if result.backend == "reference" and item.q.device.type != "cpu":
        result.error = "only the reference covers this call here, and it is not timed"
        return
    result.gates["op"] = check_call(workload, item, workload.call(item))
    if chain and has_chain(workload):
        result.gates["chain"] = check_call(workload, item, chain_of(workload, item))
    wrong = [name for name, gate in result.gates.items() if not gate.passed]
    if wrong:
        result.error = f"differs from the reference: {', '.join(wrong)}"


def _time(
    result: CaseResult, workload: Workload, chain: bool, repeats: int, measure: Measure
) -> None:
    """Fill the times."""
    protocol = result.case.protocol
    calls = [workload.call(item) for item in workload.sets]
    result.times["op"] = measure(protocol, calls, repeats)
    if chain and has_chain(workload):
        chains = [chain_of(workload, item) for item in workload.sets]
        for step in STEPS:
            result.times[step] = measure(protocol, [c.steps[step] for c in chains], repeats)
        result.times["chain"] = measure(protocol, chains, repeats)


def run(
    cases: Sequence[Case],
    device: torch.device,
    *,
    quick: bool = False,
    chain: bool = True,
    host: bool = True,
    json_path: Path | None = None,
    progress: Callable[[CaseResult], None] = lambda result: None,
) -> dict[str, Any]:
    """Run cases on a GPU and return the document that ``document`` describes.

    Args:
        cases: Cases, a peer before those measured against it.
        device: A CUDA device.
        quick: 5 measurements of everything instead of 20.
        chain: Whether to time the separate kernels too.
        host: Whether to measure the cost of an eager call.
        json_path: File that is rewritten after every case, so that a run cut short leaves its
            results.
        progress: Called with each result.
    """
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    repeats = 5 if quick else 20
    machine = describe(device)
    roofs = measure_roofs(device, repeats)
    pools = Pools(device)
    results: list[CaseResult] = []
    for case in cases:
        results.append(
            run_case(case, pools, l2_bytes=machine["l2_bytes"], repeats=repeats, chain=chain)
        )
        torch.cuda.empty_cache()
        _write(document(machine, roofs, results, []), json_path)
        progress(results[-1])
    report = document(machine, roofs, results, measure_host(pools, repeats) if host else [])
    _write(report, json_path)
    return report


def _write(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def document(
    machine: dict[str, Any],
    roofs: Roofs,
    results: Sequence[CaseResult],
    hosts: Sequence[HostCost],
) -> dict[str, Any]:
    """Collect a run as plain values: what was measured, and what follows from it."""
    medians = {r.case.name: r.times["op"].median_us for r in results if r.times}
    return {
        "schema": SCHEMA,
        "machine": machine,
        "roofs": dataclasses.asdict(roofs),
        "host": [{**dataclasses.asdict(cost), "met": cost.met} for cost in hosts],
        "cases": [_case(result, roofs, medians) for result in results],
    }


def _case(result: CaseResult, roofs: Roofs, medians: dict[str, float]) -> dict[str, Any]:
    case, roof = result.case, roof_of(result.case, roofs)
    op_us = medians.get(case.name)
    first_us, then_us = _target_us(case, roofs, medians)
    shape = dataclasses.asdict(case)
    for key in ("name", "op", "protocol", "target"):
        del shape[key]
    for key in ("kv_format", "extra_kv_format"):
        shape[key] = getattr(case, key) and getattr(case, key).name
    return {
        "name": case.name,
        "op": case.op,
        "shape": shape,
        "protocol": case.protocol,
        "backend": result.backend,
        "gates": {
            name: {
                **{key: _finite(value) for key, value in dataclasses.asdict(gate).items()},
                "passed": gate.passed,
            }
            for name, gate in result.gates.items()
        },
        "error": result.error,
        "times": {name: dataclasses.asdict(timing) for name, timing in result.times.items()},
        "flops": flops(case),
        "bytes": round(moved_bytes(case)),
        "tflops": op_us and flops(case) / op_us / 1e6,
        "gbs": op_us and moved_bytes(case) / op_us / 1e3,
        "roof": roof.name,
        "roof_us": roof.us,
        "roof_share": op_us and roof.us / op_us,
        "target": {
            **dataclasses.asdict(case.target),
            "first_us": first_us,
            "then_us": then_us,
            "met": _met(op_us, first_us, then_us),
        },
    }


def _target_us(
    case: Case, roofs: Roofs, medians: dict[str, float]
) -> tuple[float | None, float | None]:
    """Times to reach first and then, relative targets worked out."""
    target = case.target
    if target.floor_factor is not None:
        return target.floor_factor * padded_floor_us(case, roofs), None
    if target.peer is not None:
        peer_us = medians.get(target.peer)
        return peer_us and PEER_MARGIN * peer_us, None
    return target.first_us, target.then_us


def _met(op_us: float | None, first_us: float | None, then_us: float | None) -> str | None:
    """What a time meets: "all", only the "first" target, none ("missed"); None without both."""
    if op_us is None or first_us is None:
        return None
    if op_us > first_us:
        return "missed"
    return "all" if then_us is None or op_us <= then_us else "first"


def _finite(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None

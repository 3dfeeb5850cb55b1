"""Draw very many calls on a GPU, by seed, each compared with float64 on the device.

    python -m tools.fuzz_gpu --seconds 330 --jobs 15 --json build/fuzz.json
    python -m tools.fuzz_gpu --steady --seconds 150 --json build/steady.json
    python -m tools.fuzz_gpu --seed 7 --case sparse_mla_decode/hopper/3/0/41

``--steady`` compares bits instead: of repeats, given buffers, rows alone and in another order.
What kernels are compiled for comes from a bounded list of configurations; values, lengths, indices,
sizes and places vary from call to call. Each process takes configurations of its own, so nothing is
compiled twice. A process that hangs or loses its GPU context is replaced, and counts as a failure.
The summary is JSON: calls of each operation, backend and configuration, and failures with the words
that repeat each. ``--device cpu`` runs the reference on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import multiprocessing
import queue
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from mlacast.bench.machine import describe
from mlacast.errors import UnsupportedError
from tests.fuzz import seeded
from tests.fuzz.seeded import Failure, Task

# Failures of one configuration after which it says nothing new.
ENOUGH = 3
# Longest that one call may take, its compilation included.
HANG_S = 150
GRACE_S = 20


def work(tasks: list[Task], options: argparse.Namespace, stop_at: float, results: Any) -> None:
    """Run configurations in turn, some calls of each a round, until the time is over."""
    device = torch.device(options.device)
    seed, per_round = options.seed, options.per_round
    torch.set_num_threads(1)
    attempts: dict[Task, int] = {}
    failed: Counter[Task] = Counter()
    for first in range(0, options.rounds * per_round, per_round):
        for task in tasks:
            if time.time() >= stop_at:
                faulthandler.cancel_dump_traceback_later()
                results.put(("end", None, None))
                return
            if failed[task] >= ENOUGH:
                continue
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            results.put(("start", task, first))
            if task not in attempts:
                attempt = seeded.covered_attempt(task, seed, device)
                attempts[task] = -1 if attempt is None else attempt
            counts: Counter[str] = Counter()
            for case in range(first, first + per_round):
                if attempts[task] < 0 or failed[task] >= ENOUGH or time.time() >= stop_at:
                    break
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                try:
                    failure = seeded.run_case(task, seed, case, device, attempts[task])
                except UnsupportedError:
                    counts["not covered"] += 1
                    continue
                counts["cases"] += 1
                if failure is not None:
                    failed[task] += 1
                    results.put(("failure", task, failure))
                    if "CUDA error" in failure.error or "AcceleratorError" in failure.error:
                        # Nothing works in this process any more.
                        results.put(("counts", task, counts))
                        results.close()
                        results.join_thread()
                        raise SystemExit(3)
            if attempts[task] < 0:
                counts["no configuration"] += 1
            results.put(("counts", task, counts))
        if all(attempts.get(task, 0) < 0 or failed[task] >= ENOUGH for task in tasks):
            break
    faulthandler.cancel_dump_traceback_later()
    results.put(("end", None, None))


class Worker:
    """A process with configurations of its own."""

    def __init__(self, context: Any, options: argparse.Namespace, tasks: list[Task]) -> None:
        self._context, self._options = context, options
        self.tasks = tasks
        self.current: tuple[Task, int] | None = None
        self.ended = False
        self.results: Any = None
        self.process: Any = None

    def start(self, stop_at: float) -> None:
        """Start, or start again."""
        self.results = self._context.Queue()
        arguments = (self.tasks, self._options, stop_at, self.results)
        self.process = self._context.Process(target=work, args=arguments)
        self.process.start()


def gather(workers: list[Worker], stop_at: float, report: Report) -> None:
    """Collect results until every process has ended."""
    while not all(worker.ended for worker in workers):
        for worker in workers:
            if worker.ended:
                continue
            alive = worker.process.is_alive()
            while True:
                try:
                    kind, task, value = worker.results.get(timeout=0.02)
                except queue.Empty:
                    break
                if kind == "start":
                    worker.current = (task, value)
                elif kind == "failure":
                    report.failures.append(value)
                    print(f"FAILED {value.case}: {value.error} [{value.where}]", flush=True)
                elif kind == "counts":
                    report.add(task, value)
                elif kind == "end":
                    worker.ended = True
            late = time.time() > stop_at + GRACE_S + HANG_S
            if worker.ended or (alive and not late):
                continue
            if alive:
                worker.process.terminate()
            replace(worker, stop_at, report)


def replace(worker: Worker, stop_at: float, report: Report) -> None:
    """Report what a process that died was at, and start another one for the rest."""
    worker.process.join(timeout=10)
    code = worker.process.exitcode
    if worker.current is not None:
        task, first = worker.current
        worker.tasks = [other for other in worker.tasks if other != task]
        if code != 3:
            text = f"the process ended with {code} in a call from number {first} on"
            report.failures.append(Failure(f"{task}/?/{first}", text, ""))
            print(f"FAILED {task}: {text}", flush=True)
    worker.current = None
    if time.time() >= stop_at or not worker.tasks:
        worker.ended = True
    else:
        worker.start(stop_at)


@dataclasses.dataclass
class Report:
    """What was run."""

    cases: Counter[str] = dataclasses.field(default_factory=Counter)
    configurations: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    not_covered: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[Failure] = dataclasses.field(default_factory=list)

    def add(self, task: Task, counts: Counter[str]) -> None:
        """Add the calls of a round of one configuration."""
        name = f"{task.subject}/{task.backend or 'chosen'}"
        self.cases[name] += counts["cases"]
        self.not_covered[name] += counts["not covered"] + counts["no configuration"]
        if counts["cases"]:
            self.configurations.setdefault(name, set()).add(task.configuration)

    def as_json(self, seed: int, seconds: float, device: torch.device) -> dict[str, Any]:
        """Plain values."""
        machine = {"device": "cpu"} if device.type == "cpu" else describe(device)
        if device.type != "cpu":
            machine["command"] = " ".join(["python -m tools.fuzz_gpu", *sys.argv[1:]])
        return {
            "machine": machine,
            "seed": seed,
            "seconds": round(seconds, 1),
            "cases": sum(self.cases.values()),
            "by_subject": {
                name: {
                    "cases": count,
                    "configurations": len(self.configurations.get(name, ())),
                    "not_covered": self.not_covered[name],
                }
                for name, count in sorted(self.cases.items())
            },
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
        }


def repeat(name: str, seed: int, device: torch.device) -> int:
    """Run one call again, by its name."""
    subject, backend, configuration, attempt, case = name.split("/")
    task = Task(subject, None if backend == "chosen" else backend, int(configuration))
    failure = seeded.run_case(task, seed, int(case), device, int(attempt))
    print("right" if failure is None else f"{failure.error}\n{failure.where}")
    return int(failure is not None)


def main(arguments: list[str] | None = None) -> int:
    """Run for a time, or repeat one call; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument(
        "--per-round", type=int, default=80, help="calls of a configuration a round"
    )
    parser.add_argument("--rounds", type=int, default=10**6)
    parser.add_argument("--only", default="", help="part of the name of a configuration")
    parser.add_argument("--steady", action="store_true", help="repeats, places and batch mates")
    parser.add_argument("--case", default=None, help="repeat this call")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if options.case is not None:
        return repeat(options.case, options.seed, device)
    start = time.time()
    tasks = seeded.tasks_for(device, options.only, steady=options.steady)
    context = multiprocessing.get_context("spawn")
    jobs = min(options.jobs, len(tasks))
    workers = [Worker(context, options, tasks[at::jobs]) for at in range(jobs)]
    stop_at = start + options.seconds
    for worker in workers:
        worker.start(stop_at)
    report = Report()
    gather(workers, stop_at, report)
    for worker in workers:
        worker.process.join(timeout=10)
        if worker.process.is_alive():
            worker.process.terminate()
    summary = report.as_json(options.seed, time.time() - start, device)
    text = json.dumps(summary, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())

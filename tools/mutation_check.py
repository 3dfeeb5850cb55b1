"""Plant faults one at a time and see whether the tests notice. Standard library only.

``python tools/mutation_check.py`` copies the repository to a temporary folder, changes one piece of
source there, runs the tests that the fault names, and, where they stay green, those of its whole
part of the project. A fault that no test notices has survived: a test is missing. The faults are in
``tools/mutations``; those of ``hopper.py`` need a GPU and run with ``--device cuda``.

The exit status is 0 if every fault was noticed, 1 if one survived, 2 if one could not be tried.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.mutations import CPU, CUDA, Fault  # noqa: E402

LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "shared", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)
# What is run where the named tests stay green, by the beginning of the file's path.
WIDER = {
    "mlacast/formats/": ("tests/formats", "tests/descriptors", "tests/ops"),
    "mlacast/layouts/": ("tests/layouts", "tests/descriptors", "tests/ops"),
    "mlacast/descriptors/": ("tests/descriptors", "tests/ops", "tests/edge_cases"),
    "mlacast/reference/": ("tests/reference", "tests/ops", "tests/edge_cases"),
    "mlacast/kernels/": ("tests/kernels",),
    "mlacast/layers/": ("tests/layers", "tests/distributed", "tests/compat/vllm"),
    "mlacast/distributed/": ("tests/distributed",),
    "mlacast/compat/": ("tests/compat",),
    "mlacast/call_log/": ("tests/logging", "tests/cli/test_replay.py"),
    "mlacast/bench/": ("tests/bench", "tests/cli/test_bench.py"),
    "mlacast/integrations/": ("tests/integrations",),
    "mlacast/": ("tests/ops", "tests/edge_cases", "tests/compat", "tests/layers"),
}
WIDER_ON_GPU = ("tests/gpu",)
# pytest: all passed, some failed.
_PASSED, _FAILED = 0, 1


@dataclass(frozen=True)
class Outcome:
    """What became of one fault.

    Attributes:
        id: That of the fault.
        verdict: "killed", "killed late" (by the wider set alone), "survived" or "broken" (no test
            ran to its end, so nothing is known).
        seconds: How long its tests took.
        by: Name of the first test that failed, or what is wrong with the entry.
    """

    id: str
    verdict: str
    seconds: float
    by: str


def wider_tests(fault: Fault, device: str) -> tuple[str, ...]:
    """Tests of the part of the project that the fault is in."""
    if device == "cuda":
        return WIDER_ON_GPU
    return next(tests for prefix, tests in WIDER.items() if fault.file.startswith(prefix))


def first_failure(output: str) -> str:
    """The test that pytest's short summary names first."""
    for line in output.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" - ")[0].partition(" ")[2]
    return ""


def run_tests(tree: Path, tests: Sequence[str], timeout: float) -> tuple[int, str]:
    """Run pytest in a copy of the repository: its exit status and what it said.

    A run that takes too long, or whose process dies, counts as failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    # A changed source of the same size and second would be taken from the cache.
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    environment.pop("PYTEST_ADDOPTS", None)
    environment.pop("TRITON_INTERPRET", None)
    if any("_interpreted.py" in test for test in tests):
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return _FAILED, f"FAILED nothing within {timeout:.0f} s"
    if done.returncode < 0:
        # Memory that was written where none is may end the process.
        return _FAILED, f"FAILED the process died of signal {-done.returncode}"
    return done.returncode, done.stdout + done.stderr


def try_fault(fault: Fault, tree: Path, device: str, timeout: float, named_only: bool) -> Outcome:
    """Plant one fault in a copy, run its tests, and take it out again."""
    start = time.monotonic()

    def outcome(verdict: str, by: str) -> Outcome:
        return Outcome(fault.id, verdict, round(time.monotonic() - start, 1), by)

    problem = fault.problem(tree)
    if problem:
        return outcome("broken", problem)
    sound = (tree / fault.file).read_bytes()
    try:
        fault.plant(tree)
        status, output = run_tests(tree, fault.tests, timeout)
        verdict = "killed"
        if status == _PASSED and not named_only:
            status, output = run_tests(tree, wider_tests(fault, device), 4 * timeout)
            verdict = "killed late"
    finally:
        (tree / fault.file).write_bytes(sound)
    if status == _PASSED:
        return outcome("survived", "")
    if status == _FAILED:
        return outcome(verdict, first_failure(output))
    return outcome("broken", f"pytest said {status}: {output[-400:]}")


def control(faults: Sequence[Fault], trees: Sequence[Path], timeout: float) -> str:
    """Run all named tests without a fault, a process for each file; what failed, or ""."""
    by_file: dict[str, set[str]] = {}
    for test in (test for fault in faults for test in fault.tests):
        by_file.setdefault(test.partition("::")[0], set()).add(test)
    free: queue.Queue[Path] = queue.Queue()
    for tree in trees:
        free.put(tree)

    def one(tests: set[str]) -> str:
        tree = free.get()
        try:
            status, output = run_tests(tree, sorted(tests), 10 * timeout)
        finally:
            free.put(tree)
        return "" if status == _PASSED else first_failure(output) or output[-400:]

    with ThreadPoolExecutor(max_workers=len(trees)) as pool:
        return "; ".join(filter(None, pool.map(one, by_file.values())))


def try_all(
    faults: Sequence[Fault],
    folder: Path,
    *,
    device: str,
    jobs: int,
    timeout: float,
    with_control: bool,
    named_only: bool,
) -> list[Outcome]:
    """Try the faults in ``jobs`` copies of the repository below ``folder``."""
    copies = [folder / str(number) for number in range(min(jobs, len(faults)))]
    trees: queue.Queue[Path] = queue.Queue()
    for tree in copies:
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        trees.put(tree)
    if with_control:
        failed = control(faults, copies, timeout)
        if failed:
            return [Outcome("control", "broken", 0.0, f"without any fault: {failed}")]

    def one(fault: Fault) -> Outcome:
        tree = trees.get()
        try:
            found = try_fault(fault, tree, device, timeout, named_only)
        finally:
            trees.put(tree)
        print(line_of(fault, found), flush=True)
        return found

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        return list(pool.map(one, faults))


def line_of(fault: Fault, outcome: Outcome) -> str:
    """One row of the table."""
    head = f"{outcome.verdict:<12} {fault.id:<34} {outcome.seconds:6.1f} s  {fault.kind}"
    return f"{head}  <- {outcome.by}" if outcome.by else head


def main(arguments: Sequence[str] | None = None) -> int:
    """Choose faults, try them and print what became of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", action="append", default=[], metavar="ID")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are tried at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one fault")
    parser.add_argument("--no-control", action="store_true", help="trust the tests to be green")
    parser.add_argument("--named-only", action="store_true", help="never run the wider set")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    options = parser.parse_args(arguments)
    faults = CUDA if options.device == "cuda" else CPU
    if options.only:
        unknown = set(options.only) - {fault.id for fault in faults}
        if unknown:
            parser.error(f"no such fault for {options.device}: {', '.join(sorted(unknown))}")
        faults = tuple(fault for fault in faults if fault.id in options.only)
    if options.list:
        for fault in faults:
            print(f"{fault.id:<34} {fault.subject:<24} {fault.kind}")
        return 0
    problems = [problem for fault in faults if (problem := fault.problem(ROOT))]
    if problems:
        print("\n".join(problems))
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        outcomes = try_all(
            faults,
            Path(folder),
            device=options.device,
            jobs=options.jobs,
            timeout=options.timeout,
            with_control=not options.no_control,
            named_only=options.named_only,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=2) + "\n")
    counts = {v: sum(o.verdict == v for o in outcomes) for v in ("survived", "broken")}
    print(f"{len(outcomes)} faults: {counts['survived']} survived, {counts['broken']} broken")
    for outcome in outcomes:
        if outcome.verdict in counts:
            print(f"{outcome.verdict}: {outcome.id} {outcome.by}".rstrip())
    return 2 if counts["broken"] else 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())

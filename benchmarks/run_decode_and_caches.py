"""Check FP8 decode, its scheduler, RoPE with FP8 and the caches on this GPU, then time them.

    PYTHONPATH=. python benchmarks/run_decode_and_caches.py --jobs 16 --json FILE

First the tests of those operations on the device, through the core operations and through the
functions of MATE and FlashInfer; nothing is timed unless all pass. Then
the cases of ``time_caches.py``, and the FP8 decodes of ``mlacast bench``: 128 heads, 2048 columns,
64 and 128 requests. Every timed call is compared with the reference once more before it is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks import time_caches
from benchmarks.cache_calls import usual_cases
from mlacast.bench.cases import select_cases
from mlacast.bench.compile import compile_cases
from mlacast.bench.run import run

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "test_rope_quantize_fp8",
    "test_kv_cache_append",
    "test_kv_cache_gather",
    "test_decode_metadata",
    "test_fp8_decode",
    "test_dense_mla_decode",
    "test_dependents",
)
DECODE_CASES = "decode-fp8"


def run_tests(folder: Path, processes: int, seconds: float) -> dict[str, Any]:
    """Run the tests in ``processes`` at a time and return their counts; hanging ones are ended."""
    file = folder / "tests.xml"
    files = [f"tests/gpu/{name}.py" for name in TESTS]
    options = ["-q", "-p", "no:cacheprovider", "-n", str(processes), "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", *files, *options, f"--junitxml={file}"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
        exit_code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        exit_code, said = 1, f"the tests took more than {seconds:.0f} s"
    result: dict[str, Any] = {"exit_code": exit_code}
    if file.exists():
        (suite,) = ElementTree.parse(file).getroot().iter("testsuite")
        for key in ("tests", "failures", "errors", "skipped"):
            result[key] = int(suite.attrib[key])
        result["seconds"] = float(suite.attrib["time"])
        names = (case.attrib["classname"].rpartition(".")[2] for case in suite.iter("testcase"))
        result["tests_of_file"] = dict(Counter(names))
    print(*(f"{key} {value}" for key, value in result.items()), flush=True)
    if exit_code != 0:
        print(said[-3000:], flush=True)
    return result


def main() -> int:
    """Test, then time; the exit code is not 0 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--jobs", type=int, default=0, help="processes that test, and that compile beforehand"
    )
    parser.add_argument("--seconds", type=float, default=500, help="for everything")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="file to write every number to")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs an NVIDIA GPU, and torch sees none here", file=sys.stderr)
        return 1
    started = time.monotonic()
    options.stop_at, options.burst = started + options.seconds, False
    # A kernel that hangs cannot be interrupted.
    watchdog = threading.Timer(options.seconds + 30, lambda: (print("HANG"), os._exit(3)))
    watchdog.daemon = True
    watchdog.start()
    path, options.json = options.json, None
    document: dict[str, Any] = {}

    def write() -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", "utf-8")

    with tempfile.TemporaryDirectory() as folder:
        processes = options.jobs or 1
        document["tests"] = run_tests(Path(folder), processes, options.seconds * 0.6)
    write()
    if document["tests"]["exit_code"] or set(document["tests"]["tests_of_file"]) != set(TESTS):
        print("nothing is timed: a test failed, or a file has none", flush=True)
        return 1
    torch.manual_seed(0)
    cases = usual_cases()
    time_caches.compile_all(cases, options.jobs)
    document["caches"] = time_caches.run(cases, options)
    document["caches"]["machine"]["command"] = "python benchmarks/run_decode_and_caches.py"
    write()
    device = torch.device("cuda", torch.cuda.current_device())
    decodes = select_cases(DECODE_CASES)
    compile_cases([case.name for case in decodes], device, chain=False, jobs=options.jobs)
    report = run(decodes, device, quick=True, chain=False, host=False)
    report["machine"]["command"] = document["caches"]["machine"]["command"]
    document["decode"] = report
    write()
    for case in report["cases"]:
        times = case["times"].get("op", {})
        print(case["name"], case["error"] or f"{times['median_us']:.2f} us", case["target"]["met"])
    wrong = sum(case["error"] is not None for case in document["caches"]["cases"])
    wrong += sum(case["error"] is not None for case in report["cases"])
    print(f"{wrong} wrong, {time.monotonic() - started:.0f} s", flush=True)
    return int(wrong != 0)


if __name__ == "__main__":
    sys.exit(main())

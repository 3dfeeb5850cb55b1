"""Run a small test of every GPU kernel under compute-sanitizer, several processes at a time.

    python -m tools.sanitize_gpu --jobs 15 --json benchmarks/results/sanitizer_h200.json

Tools are memcheck (accesses out of bounds or misaligned) and synccheck (barriers that not all
threads reach). racecheck is left out: it takes memory that is handed over by mbarriers for a race.
Kernels compile faster outside: run the tests once before. Exit code 1 if a run reports an error,
fails or takes too long.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

TOOLS = ("memcheck", "synccheck")
# A test of every kernel; more than one where kernels differ by what they are compiled for.
TESTS = (
    "test_hopper_prefill.py::test_against_float64[bf16-h128-length-sink]",
    "test_hopper_prefill.py::test_programs_that_share_a_tile_store_the_same_bytes"
    "[bf16-h128-length-sink]",
    "test_hopper_prefill.py::test_programs_that_share_a_tile_store_the_same_bytes[mx-head]",
    "test_hopper_prefill.py::test_against_float64[mx-head]",
    "test_hopper_prefill_576.py::test_against_float64[bf16]",
    "test_hopper_decode.py::test_one_split_against_float64[v41-inline-h96]",
    "test_hopper_decode.py::test_splits_against_float64[v41-v41-fused]",
    "test_hopper_decode.py::test_caches[V32]",
    "test_hopper_decode_few.py::test_an_empty_token_ignores_what_it_has[angles-v4-v4-fused]",
    "test_hopper_decode_few.py::test_an_empty_token_ignores_what_it_has[angles-v4-v4-fused-h32]",
    "test_hopper_v32_scales.py::test_one_long_scale_of_a_block_is_enough",
    "test_hopper_merge.py::test_near_float64[nvfp4]",
    "test_hopper_dense_prefill.py::test_causal_bf16",
    "test_out_project.py::test_hopper_linear[mxfp8_head-words_32]",
    "test_out_project.py::test_few_tokens_fill_what_is_theirs_and_are_captured",
    "test_out_project.py::test_few_tokens_keep_nan_in_its_row_and_column",
    "test_out_project.py::test_portable_products[5-mxfp8_head-blocks_128]",
    "test_fp8_decode.py::test_mate_decode[16-2-53]",
    "test_accuracy.py::test_decode_of_two_pools[triton-V41-V41_FP4]",
    "test_accuracy.py::test_prefill[triton-h1-d512-topk1-raw-None-head]",
    "test_kv_cache_append.py::test_bytes_of_every_format[v41_fp4_inline_512-33-dtype0]",
    "test_kv_cache_gather.py::test_bits_of_every_format[v41_fp4_inline_512-dtype0]",
    "test_rope_quantize_fp8.py::test_bytes_of_every_case"
    "[kv0_64_512-half-float8_e4m3fn-bfloat16-float32-int64-1]",
    "test_layer_products.py::test_merges_match_float64[9-3-128-2-ht]",
    "test_layer_products.py::test_products_match_float64[3-5-True]",
    "test_dense_prefill.py::test_every_batch_matches_float64[padded_batch]",
    "test_dense_mla_decode.py::test_every_cache_format[v32_576-full]",
    "test_decode_metadata.py::test_random_lengths[65-7-0]",
)
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


@dataclass(frozen=True)
class Outcome:
    """One test under one tool; ``errors`` is None where the tool gave no summary."""

    tool: str
    test: str
    passed: bool
    errors: int | None
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Whether the test passed and the tool reported nothing."""
        return self.passed and self.errors == 0


def summary(output: str) -> int | None:
    """Errors that compute-sanitizer counted, over all processes; None if it did not say."""
    counts = [int(count) for count in _SUMMARY.findall(output)]
    return sum(counts) if counts else None


def run(sanitizer: str, tool: str, test: str, limit_s: float) -> Outcome:
    """Run one test under one tool."""
    begin = time.monotonic()
    command = [sanitizer, "--tool", tool, "--target-processes", "application-only"]
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/gpu/{test}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = str(error.stdout), -1
    passed = code == 0 and " passed" in output and "skipped" not in output
    outcome = Outcome(tool, test, passed, summary(output), time.monotonic() - begin)
    state = "clean" if outcome.is_clean else f"NOT CLEAN (exit {code}, errors {outcome.errors})"
    print(f"{tool:10s} {outcome.seconds:6.1f} s  {state}  {test}", flush=True)
    if not outcome.is_clean:
        said = [line for line in output.splitlines() if line.startswith("=========")]
        print("\n".join(said[:40]), output[-1000:], sep="\n", flush=True)
    return outcome


def main() -> int:
    """Run every test under every tool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one run")
    parser.add_argument("--only", default="", help="part of a test's name")
    parser.add_argument("--tool", choices=TOOLS, action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    pairs = [
        (tool, test)
        for tool in options.tool or TOOLS
        for test in TESTS
        if options.only in f"{tool} {test}"
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(
            pool.map(lambda pair: run(sanitizer, pair[0], pair[1], options.limit), pairs)
        )
    clean = sum(outcome.is_clean for outcome in outcomes)
    print(f"{clean} of {len(outcomes)} runs clean")
    if options.json is not None:
        import torch

        from mlacast.bench.machine import describe

        document = {
            "machine": describe(torch.device("cuda")),
            "runs": [{**asdict(outcome), "clean": outcome.is_clean} for outcome in outcomes],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if clean == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

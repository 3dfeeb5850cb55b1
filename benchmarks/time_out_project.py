"""Time the consumers of quantised outputs beside torch's bfloat16 products, each checked first.

    PYTHONPATH=. python benchmarks/time_out_project.py
    PYTHONPATH=. python benchmarks/time_out_project.py --tokens 64 --only mx --filter gluon

The shape is DeepSeek-V4's: 8 groups, 4096 features to 1024 columns. Every candidate is compiled in
a process of its own, which compares it with the float64 product of the dequantised operands; one
that is wrong or hangs is not timed. Weights rotate through more memory than the L2 cache has. One
JSON object per line.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import mlacast
from mlacast.bench import protocols
from mlacast.kernels.config.grouped_out_project import Variant
from mlacast.kernels.config.hopper_grouped_out_project import Variant as HopperVariant
from mlacast.kernels.config.hopper_grouped_out_project_few import plan_few
from mlacast.kernels.gluon.sm90 import grouped_out_project as hopper
from mlacast.kernels.triton import grouped_out_project as portable
from mlacast.kernels.vendor import scaled_mm_grouped_out_project as scaled_mm
from tests import projections

DEVICE = "cuda"
GROUPS, FEATURES, COLUMNS = 8, 4096, 1024
# Sets of weights: 34 MB each if they are e4m3.
SETS = 5
# Norm of the error over that of the product. bfloat16 results alone: 1.1e-3 at most.
LIMIT = 2e-3


@dataclass(frozen=True)
class Problem:
    """What is multiplied.

    Attributes:
        format: Format of the activations.
        weights: Kind of weights, of ``tests.projections``.
    """

    format: mlacast.OutFormat
    weights: str


PROBLEMS = {
    "mx": Problem(mlacast.Mxfp8(), "words_32"),
    "mx_chunk32": Problem(mlacast.Mxfp8("chunk32"), "words_32"),
    "mx_bf16": Problem(mlacast.Mxfp8(), "bfloat16"),
    "f128": Problem(mlacast.Fp8Group(128, "float32", "mn_major"), "blocks_128"),
    "bf16": Problem(mlacast.Bf16(), "bfloat16"),
    "nvfp4": Problem(mlacast.Nvfp4(448.0), "bfloat16"),
}
Launch = Callable[..., object]


def _portable(*numbers: Any) -> Launch:
    variant = Variant(*numbers)
    return functools.partial(portable.launch_grouped_out_project, variant=variant)


# Candidates for few and for many tokens: block_m, block_n, block_k, fp8_product, warps, stages.
FEW = {
    "triton_64x64x64": _portable(64, 64, 64, True, 4, 6),
    "triton_64x64x128": _portable(64, 64, 128, True, 4, 5),
    "triton_64x64x128_w8": _portable(64, 64, 128, True, 8, 5),
    "triton_64x32x128": _portable(64, 32, 128, True, 4, 4),
}
MANY = {
    "triton_128x128x64": _portable(128, 128, 64, True, 8, 4),
    "triton_128x128x128": _portable(128, 128, 128, True, 8, 3),
    "triton_64x128x64_w4": _portable(64, 128, 64, True, 4, 4),
    "triton_128x128x64_w4": _portable(128, 128, 64, True, 4, 4),
}


def _hopper(*numbers: Any) -> Launch:
    return functools.partial(hopper.launch_grouped_out_project, variant=HopperVariant(*numbers))


# block_m, block_n, stages, what is shared, products in flight, load roles. For scales per 32.
HOPPER_FEW = {
    "gluon_64x64_s8": _hopper(64, 64, 8, "steps"),
    "gluon_64x64_s8_b1": _hopper(64, 64, 8, "steps", 1),
    "gluon_64x64_s10": _hopper(64, 64, 10, "steps"),
    "gluon_64x64_columns": _hopper(64, 64, 8, "columns"),
    "gluon_64x32_s12": _hopper(64, 32, 12, "steps"),
    "gluon_64x64_two_loaders": _hopper(64, 64, 8, "steps", 2, 2),
    "gluon_64x64_two_loaders_s10": _hopper(64, 64, 10, "steps", 2, 2),
    "gluon_64x64_two_loaders_columns": _hopper(64, 64, 8, "columns", 2, 2),
}


# Tokens that there is room for, and stages. For scales per 32 on both sides.
HOPPER_FEW_32 = {
    f"gluon_few_{block_m}_s{stages}": functools.partial(
        hopper.launch_grouped_out_project, variant=plan_few(block_m, FEATURES, stages)
    )
    for block_m, stages in (
        (64, 8),
        (64, 10),
        (32, 8),
        (32, 12),
        (16, 8),
        (16, 12),
        (8, 8),
        (8, 12),
    )
}
HOPPER_MANY = {
    "gluon_128x128_columns": _hopper(128, 128, 5, "columns"),
    "gluon_128x128_columns_b1": _hopper(128, 128, 6, "columns", 1),
    "gluon_128x128_rows": _hopper(128, 128, 6, "rows"),
    "gluon_128x128_rows_b1": _hopper(128, 128, 6, "rows", 1),
    "gluon_64x128_steps": _hopper(64, 128, 6, "steps"),
}


def torch_bf16(
    out: mlacast.QuantizedTensor, weight: torch.Tensor, _: Any, *, projected: torch.Tensor
) -> None:
    """Torch's product of bfloat16 rows and weights."""
    torch.bmm(out.data.transpose(0, 1), weight.transpose(1, 2), out=projected.transpose(0, 1))


def candidates(problem: str, tokens: int) -> dict[str, Launch]:
    """What is compared on a problem."""
    found = dict(FEW if tokens <= 64 else MANY)
    if problem in ("mx", "f128"):
        found |= HOPPER_FEW if tokens <= 64 else HOPPER_MANY
    if problem == "mx" and tokens <= 64:
        found |= {
            name: launch
            for name, launch in HOPPER_FEW_32.items()
            if launch.keywords["variant"].block_m >= tokens
        }
    if problem == "f128":
        found["torch_scaled_mm"] = scaled_mm.launch_grouped_out_project
    if problem == "bf16":
        found["torch"] = torch_bf16
    return found


def draw(problem: str, tokens: int) -> tuple[mlacast.QuantizedTensor, projections.Weights]:
    """Activations whose scales differ, and weights."""
    case = PROBLEMS[problem]
    x = torch.randn(tokens, GROUPS * FEATURES, device=DEVICE)
    x *= torch.exp2(torch.randint(-3, 4, (tokens, 1), device=DEVICE))
    out = mlacast.quantize_output(x, case.format, num_groups=GROUPS, backend="reference")
    weights = projections.draw_weights(case.weights, (GROUPS, COLUMNS, FEATURES))
    scales = weights.weight_sf
    return out, projections.Weights(
        weights.weight.to(DEVICE),
        None if scales is None else scales.to(DEVICE),
        weights.values.to(DEVICE),
    )


def check(problem: str, tokens: int, name: str) -> str:
    """Say what is wrong with a candidate; nothing if it is right."""
    torch.manual_seed(1)
    out, weights = draw(problem, tokens)
    launch = candidates(problem, tokens)[name]
    expected, _ = projections.expect(out, weights)
    for _ in range(2):
        found = projections.multiply(launch, out, weights).double()
        if not bool(found.isfinite().all()):
            return f"{int((~found.isfinite()).sum())} values are not finite"
        error = float((found - expected).norm() / expected.norm())
        worst = float((found - expected).norm(dim=-1).div(expected.norm(dim=-1)).max())
        if not (error <= LIMIT and worst <= 2 * LIMIT):
            return f"error {error:.2e}, of the worst row {worst:.2e}"
    return ""


def measure(problem: str, tokens: int, names: list[str], repeats: int) -> None:
    """Print the times of candidates that are right."""
    torch.manual_seed(2)
    sets = [draw(problem, tokens)]
    for _ in range(SETS - 1):
        out, weights = sets[0]
        sf = weights.weight_sf
        # Copies are as good: what counts is that they lie elsewhere.
        again = None if sf is None else sf.clone(memory_format=torch.preserve_format)
        sets.append((out, projections.Weights(weights.weight.clone(), again, weights.values)))
    flops = 2.0 * tokens * GROUPS * FEATURES * COLUMNS
    shape = (tokens, GROUPS, COLUMNS)
    projected = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    for name in names:
        launch = candidates(problem, tokens)[name]
        calls = [
            functools.partial(launch, out, weights.weight, weights.weight_sf, projected=projected)
            for out, weights in sets
        ]
        for protocol in ("graph", "burst"):
            timing = protocols.measure(protocol, calls, repeats)
            line = {
                "problem": problem,
                "tokens": tokens,
                "candidate": name,
                "protocol": protocol,
                "us": round(timing.median_us, 2),
                "p90_us": round(timing.p90_us, 2),
                "tflops": round(flops / timing.median_us / 1e6, 1),
            }
            print(json.dumps(line), flush=True)


def main() -> int:
    """Check candidates side by side, then time the right ones."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", default="64,4096")
    parser.add_argument("--only", default="bf16,mx,mx_bf16,f128", help="problems")
    parser.add_argument("--filter", default="", help="only candidates with this in their names")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=100, help="for everything")
    parser.add_argument("--check", nargs=3, help="problem, tokens and candidate to check")
    options = parser.parse_args()
    started = time.monotonic()
    watchdog = threading.Timer(options.seconds, lambda: (print("HANG"), os._exit(3)))
    watchdog.daemon = True
    watchdog.start()
    if options.check:
        problem, tokens, name = options.check
        wrong = check(problem, int(tokens), name)
        print(wrong, end="")
        return 1 if wrong else 0
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    jobs = [
        (problem, tokens, name)
        for problem in options.only.split(",")
        for tokens in map(int, options.tokens.split(","))
        for name in candidates(problem, tokens)
        if options.filter in name or name == "torch"
    ]
    waiting = list(jobs)
    running: list[tuple[tuple[str, int, str], subprocess.Popen[str]]] = []
    right = []
    while waiting or running:
        while waiting and len(running) < options.jobs:
            job = waiting.pop(0)
            command = [sys.executable, __file__, "--seconds", "60", "--check", *map(str, job)]
            running.append(
                (
                    job,
                    subprocess.Popen(
                        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                    ),
                )
            )
        job, run = running.pop(0)
        said, _ = run.communicate()
        if run.returncode == 0:
            right.append(job)
        else:
            print(json.dumps({"wrong": job, "said": said.strip()[-600:]}), flush=True)
    print(
        json.dumps({"right": len(right), "of": len(jobs), "s": round(time.monotonic() - started)})
    )
    for problem, tokens in dict.fromkeys((job[0], job[1]) for job in right):
        if time.monotonic() - started > options.seconds - 15:
            print(json.dumps({"left_out": [problem, tokens]}))
            continue
        names = [job[2] for job in right if job[:2] == (problem, tokens)]
        measure(problem, tokens, names, options.repeats)
    return len(jobs) - len(right)


if __name__ == "__main__":
    sys.exit(main())

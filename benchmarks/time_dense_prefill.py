"""Time the Hopper ``dense_mla_prefill`` beside cuDNN's attention, after a check of every format.

    PYTHONPATH=. python benchmarks/time_dense_prefill.py
    PYTHONPATH=. python benchmarks/time_dense_prefill.py --formats bf16,nvfp4 --shapes 8x1024x16

Every format is compiled in a process of its own, which also checks it; one that is wrong or hangs
is not timed. Times are medians of calls that each follow a rest and a spin of about 1 ms (clocks
stay up). TFLOP/s counts batch * heads * tokens**2 * (192 + 128), half of the full square.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import mlacast
from mlacast.kernels.gluon.sm90.dense_mla_prefill import launch_dense_mla_prefill
from tests.gpu import dense_prefill_cases as cases

DEVICE = "cuda"
FORMATS = {
    "bf16": mlacast.Bf16(),
    "fp8_tensor": mlacast.Fp8Tensor(0.02),
    "group128": mlacast.Fp8Group(128, "float32", "mn_major"),
    "group64": mlacast.Fp8Group(64, "float32_pow2", "row_major"),
    "mxfp8": mlacast.Mxfp8(),
    "nvfp4": mlacast.Nvfp4(50.0),
}
# (sequences, tokens of each, heads)
SHAPES = {
    f"{sequences}x{tokens}x{heads}": (sequences, tokens, heads)
    for heads in (16, 128)
    for sequences, tokens in ((1, 8192), (8, 1024), (1, 16384))
}
PROBLEMS = (cases.RAGGED, cases.PADDED, cases.ALIGNED, cases.LONG)


def check(output: str) -> None:
    """Raise AssertionError if a format is wrong."""
    problems = PROBLEMS if output == "bf16" else (cases.ENDING, cases.INSIDE)
    for problem in problems:
        torch.manual_seed(1)
        inputs = cases.draw(problem, DEVICE)
        expected = cases.expect(problem, inputs)
        for _ in range(2):
            written = cases.launch(launch_dense_mla_prefill, problem, inputs, FORMATS[output], 1)
            torch.cuda.synchronize()
            cases.assert_right(problem, 1, written, expected)


def burst_us(call: Callable[[], object], calls: int) -> float:
    """Median over calls that each follow a rest and a spin kernel."""
    for _ in range(3):
        call()
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        time.sleep(0.025)
        torch.cuda._sleep(2_000_000)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def cudnn_call(sequences: int, tokens: int, heads: int) -> Callable[[], object]:
    """The same attention through torch; its layout is [sequences, heads, tokens, width]."""
    q, k, v = (
        torch.randn((sequences, tokens, heads, width), device=DEVICE).bfloat16().transpose(1, 2)
        for width in (192, 192, 128)
    )

    def call() -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return call


def our_call(sequences: int, tokens: int, heads: int, output: str) -> Callable[[], object]:
    """A launch; v is a view into rows that hold other things too, as an up-projection leaves it."""
    rows = sequences * tokens
    q, k = (torch.randn((rows, heads, 192), device=DEVICE).bfloat16() for _ in range(2))
    v = torch.randn((rows, heads, 256), device=DEVICE).bfloat16()[..., 128:]
    bounds = torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE) * tokens
    out = mlacast.QuantizedTensor.empty(rows, 1, heads * 128, FORMATS[output], DEVICE)
    lse = torch.empty((heads, rows), device=DEVICE)
    return functools.partial(
        launch_dense_mla_prefill,
        q,
        k,
        v,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=tokens,
        max_seqlen_k=tokens,
        softmax_scale=192**-0.5,
        causal=True,
        out=out,
        lse=lse,
    )


def time_all(names: list[str], shapes: list[str], calls: int, stop_at: float) -> None:
    """Print one line for each shape and name; what is behind ``stop_at`` is not timed."""
    for shape in (SHAPES[name] for name in shapes):
        sequences, tokens, heads = shape
        flops = sequences * heads * tokens**2 * (192 + 128)
        for name in names:
            if time.monotonic() > stop_at:
                print("time is up", flush=True)
                return
            call = cudnn_call(*shape) if name == "cudnn" else our_call(*shape, output=name)
            us = burst_us(call, calls)
            rate = flops / us / 1e6
            print(
                f"{sequences}x{tokens} h{heads} {name}: {us:.1f} us, {rate:.0f} TFLOP/s", flush=True
            )


def main() -> int:
    """Check formats side by side, then time the right ones."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", default="bf16,fp8_tensor,group128,mxfp8,nvfp4")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="sequences x tokens x heads")
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--ours", action="store_true", help="without cuDNN")
    parser.add_argument("--seconds", type=float, default=100, help="for everything")
    parser.add_argument("--check", help="check one format, by name")
    options = parser.parse_args()
    started = time.monotonic()
    watchdog = threading.Timer(options.seconds + 20, lambda: (print("HANG"), os._exit(3)))
    watchdog.daemon = True
    watchdog.start()
    if options.check:
        check(options.check)
        return 0
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    outputs = options.formats.split(",")
    runs = [
        subprocess.Popen(
            [sys.executable, __file__, "--seconds", "30", "--check", output],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for output in outputs
    ]
    right = []
    for output, run in zip(outputs, runs, strict=True):
        said, _ = run.communicate()
        if run.returncode == 0:
            right.append(output)
        else:
            print(output, "is WRONG:", *said.strip().splitlines()[-6:], sep="\n  ", flush=True)
    print(
        f"{len(right)} of {len(outputs)} right", f"{time.monotonic() - started:.0f} s", flush=True
    )
    names = right if options.ours else ["cudnn", *right]
    shapes = options.shapes.split(",")
    time_all(names, shapes, options.calls, started + options.seconds)
    return len(outputs) - len(right)


if __name__ == "__main__":
    sys.exit(main())

"""Check the Hopper ``sparse_mla_prefill`` for d_qk 576 against the reference, then time it.

    python benchmarks/check_sm90_prefill_576.py            every check, then the timings
    python benchmarks/check_sm90_prefill_576.py CASE       one check, by name

Times are medians of 20 calls, each after 30 ms of rest and a spin of about 1 ms (clocks stay up).
TFLOP/s counts 2 * heads * topk * (576 + 512) * tokens; the rotation and the cast count for nothing.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import mlacast
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576 import launch_sparse_mla_prefill_576
from mlacast.reference.quantize_output import quantize_output as store
from mlacast.reference.sparse_mla_prefill import sparse_mla_prefill as reference

DEVICE = "cuda"
TIME_LIMIT_S = 120


@dataclass(frozen=True)
class Case:
    """One compiled variant, checked over several shapes."""

    name: str
    heads: int = 128
    out_format: mlacast.OutFormat = mlacast.Bf16()
    groups: int = 1
    pairing: str | None = None
    sink: bool = False
    lengths: bool = False


CASES = (
    Case("bf16"),
    Case("bf16-h64-length-sink", 64, sink=True, lengths=True),
    Case("bf16-interleaved", pairing="interleaved"),
    Case("bf16-h96-half", 96, pairing="half", sink=True),
    Case("bf16-h1", 1, pairing="interleaved", lengths=True),
    Case("mx-head", 128, mlacast.Mxfp8("head"), 16, "interleaved", True, True),
    Case("mx-chunk-h16-half", 16, mlacast.Mxfp8("chunk32"), 2, "half", True, True),
    Case("group128-f32", 64, mlacast.Fp8Group(128, "float32", "mn_major"), 8, "interleaved"),
    Case("group128-packed", 128, mlacast.Fp8Group(128, "ue8m0_packed", "mn_major"), 8, "half"),
    Case("group64-pow2", 40, mlacast.Fp8Group(64, "float32_pow2", "row_major"), 5, sink=True),
    Case("group32-f32", 64, mlacast.Fp8Group(32, "float32", "row_major"), 4, lengths=True),
    Case("fp8-tensor", 64, mlacast.Fp8Tensor(0.02), 8, "interleaved"),
)
SHAPES = ((133, 640), (270, 100), (300, 64), (9, 0))


def rope_of(tokens: int, pairing: str | None) -> mlacast.Rope | None:
    """Random angles for every token."""
    if pairing is None:
        return None
    angles = torch.rand((5000, 32), device=DEVICE) * 6.3
    positions = torch.randint(0, 5000, (tokens,), device=DEVICE)
    return mlacast.Rope(torch.cat((angles.cos(), angles.sin()), 1), positions, pairing)


def draw(heads: int, tokens: int, topk: int, s_kv: int) -> tuple[torch.Tensor, ...]:
    """Random query, rows with NaN where nothing selects, and indices with invalid entries.

    The second half of the tokens has none: blocks without a masked key take another branch.
    """
    q = (torch.randn((tokens, heads, 576), device=DEVICE) * 3).bfloat16()
    kv = (torch.randn((s_kv, 576), device=DEVICE) * 2).bfloat16()
    # Every part of a row has to matter for the scores, the last dimensions too.
    kv[:, 400:] *= 2
    kv[s_kv // 2] = float("nan")
    indices = torch.randint(0, s_kv, (tokens, topk), device=DEVICE, dtype=torch.int32)
    indices[indices == s_kv // 2] = 0
    invalid = torch.rand((tokens, topk), device=DEVICE)
    invalid[tokens // 2 :] = 1.0
    indices[invalid < 0.2] = -1
    indices[invalid < 0.1] = s_kv
    indices[invalid < 0.02] = 2**31 - 1
    indices[invalid < 0.01] = -(2**31)
    indices[0, :64] = -1
    indices[3] = -1
    return q, kv, indices


def options_of(case: Case, tokens: int, topk: int) -> dict[str, Any]:
    """Arguments of the operation beside the tensors: one empty row, both infinite sinks."""
    lengths = sink = None
    if case.lengths:
        lengths = torch.randint(-3, topk + 70, (tokens,), device=DEVICE, dtype=torch.int32)
        lengths[tokens // 2] = 0
    if case.sink:
        sink = torch.randn(case.heads, device=DEVICE)
        sink[1:3] = torch.tensor((float("inf"), -float("inf")))
    return {
        "sm_scale": 0.01,
        "topk_length": lengths,
        "attn_sink": sink,
        "q_norm_eps": None,
        "rope": rope_of(tokens, case.pairing),
        "q_order": "head",
    }


def only(options: dict[str, Any], rows: slice) -> dict[str, Any]:
    """The same arguments for some of the tokens."""
    rope, lengths = options["rope"], options["topk_length"]
    if rope is not None:
        rope = mlacast.Rope(rope.cos_sin_cache, rope.positions[rows], rope.pairing)
    return options | {"rope": rope, "topk_length": None if lengths is None else lengths[rows]}


def check(case: Case, tokens: int, topk: int) -> list[str]:
    """One shape: errors against float64, untouched neighbours, exact repeat, batch independence."""
    q, kv, indices = draw(case.heads, tokens, topk, 1000)
    options = options_of(case, tokens, topk)
    features = case.heads * 512 // case.groups
    empty_out = functools.partial(
        mlacast.QuantizedTensor.empty,
        num_groups=case.groups,
        features=features,
        format=case.out_format,
        device=DEVICE,
    )
    before, after = 3, 6 - (tokens + 3) % 4
    buffer = empty_out(before + tokens + after)
    storage = buffer.data.view(torch.uint8)
    storage.fill_(0x5A)
    if buffer.sf is not None:
        buffer.sf.view(torch.uint8).fill_(0x5A) if buffer.sf.is_contiguous() else buffer.sf.fill_(7)
    part = buffer[before : before + tokens]

    def launch(out: mlacast.QuantizedTensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        max_logits = torch.full((out.num_tokens, case.heads), float("nan"), device=DEVICE)
        lse = max_logits.clone()
        launch_sparse_mla_prefill_576(
            q[rows],
            kv,
            indices[rows],
            out=out,
            max_logits=max_logits,
            lse=lse,
            **only(options, rows),
        )
        return max_logits, lse

    max_logits, lse = launch(part, slice(0, tokens))
    torch.cuda.synchronize()
    want, want_max, want_lse = reference(q, kv, indices, compute_dtype=torch.float64, **options)
    wrong = []
    got = part.dequantize().reshape(want.shape).double()
    scaled = case.out_format.key != "bf16"
    norm = want.norm().item()
    error = (got - want).norm().item() / max(norm, 1e-30)
    if norm == 0.0:
        if got.abs().max().item() != 0.0:
            wrong.append("empty rows are not zero")
    elif not error < (4e-2 if scaled else 6e-3):
        wrong.append(f"error {error:.2e}")
    empty = torch.isneginf(want_lse)
    if got[empty].abs().sum().item() != 0.0:
        wrong.append("an empty row is not zero")
    for name, have, target in (("lse", lse, want_lse), ("max_logits", max_logits, want_max)):
        if not torch.equal(torch.isneginf(have), empty):
            wrong.append(f"{name}: other rows are -inf")
        elif not torch.allclose(have[~empty].double(), target[~empty], rtol=2e-3, atol=2e-3):
            wrong.append(f"{name} off by {(have[~empty] - target[~empty]).abs().max().item():.2e}")
    if (storage[:before] != 0x5A).any() or (storage[before + tokens :] != 0x5A).any():
        wrong.append("codes outside of the range changed")
    if scaled and buffer.sf is not None:
        exact = empty_out(tokens)
        store(want.float().reshape(tokens, case.groups, features), exact)
        same_sf = (exact.sf == part.sf).float().mean().item()
        same_codes = (exact.data.view(torch.uint8) == part.data.view(torch.uint8)).float().mean()
        is_power = case.out_format.sf_kind != "float32"
        if (is_power and same_sf < 0.985) or same_codes.item() < (0.9 if is_power else 0.8):
            wrong.append(f"only {same_sf:.4f} of the scales, {same_codes.item():.4f} codes agree")
        outside = torch.cat((buffer.sf[:before].flatten(), buffer.sf[before + tokens :].flatten()))
        if (outside != outside[0]).any() or outside[0] == 0:
            wrong.append("scales outside of the range changed")
    again = empty_out(tokens)
    padded = again.sf_rows_with_padding()
    if padded is not None:
        padded.fill_(3)
    launch(again, slice(0, tokens))
    is_padded = padded is not None and case.out_format.sf_layout == "mn_major"
    if is_padded and (padded[tokens:] != 0).any():
        wrong.append("padding of the scales is not zero")
    first = part.data.view(torch.uint8)
    if not torch.equal(again.data.view(torch.uint8), first):
        wrong.append("a repeat differs")
    if part.sf is not None and not torch.equal(again.sf, part.sf):
        wrong.append("scales of a repeat differ")
    alone = empty_out(3)
    launch(alone, slice(2, 5))
    if not torch.equal(alone.data.view(torch.uint8), first[2:5]):
        wrong.append("a row depends on the others")
    return [f"{case.name} {tokens}x{topk}: {message}" for message in wrong]


def burst_us(call: Callable[[], None]) -> float:
    """Median of 20 calls, each after rest and a spin kernel."""
    for _ in range(3):
        call()
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        time.sleep(0.03)
        torch.cuda._sleep(2_000_000)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def time_all() -> None:
    """Time 4096 tokens: attention alone, with rotation, with rotation and cast."""
    tokens, topk = 4096, 2048
    variants = (
        ("bf16 out, attention alone", mlacast.Bf16(), False),
        ("rotation, bf16 out", mlacast.Bf16(), True),
        ("rotation, group128 float32", mlacast.Fp8Group(128, "float32", "mn_major"), True),
    )
    for heads, s_kv in ((128, 8192), (128, 65536), (64, 8192), (64, 65536)):
        q = torch.randn((tokens, heads, 576), device=DEVICE).bfloat16()
        kv = torch.randn((s_kv, 576), device=DEVICE).bfloat16()
        indices = torch.randint(0, s_kv, (tokens, topk), device=DEVICE, dtype=torch.int32)
        max_logits = torch.empty((tokens, heads), device=DEVICE)
        lse = torch.empty_like(max_logits)
        for name, out_format, rotated in variants:
            out = mlacast.QuantizedTensor.empty(tokens, heads, 512, out_format, DEVICE)
            launch = functools.partial(
                launch_sparse_mla_prefill_576,
                q,
                kv,
                indices,
                sm_scale=0.04,
                topk_length=None,
                attn_sink=None,
                q_norm_eps=None,
                rope=rope_of(tokens, "interleaved") if rotated else None,
                q_order="head",
                out=out,
                max_logits=max_logits,
                lse=lse,
            )
            us = burst_us(launch)
            tflops = 2 * heads * topk * 1088 * tokens / us / 1e6
            print(
                f"h{heads} topk{topk} s_kv{s_kv} {name}: {us:.1f} us, {tflops:.0f} TFLOP/s",
                flush=True,
            )


def main() -> int:
    """Run the checks in parallel processes, each with its own compilation, then time."""
    limit = TIME_LIMIT_S if len(sys.argv) > 1 else 2 * TIME_LIMIT_S
    watchdog = threading.Timer(limit, lambda: (print("HANG", flush=True), os._exit(3)))
    watchdog.daemon = True
    watchdog.start()
    if len(sys.argv) > 1:
        torch.manual_seed(1)
        wrong = []
        for case in CASES:
            if case.name == sys.argv[1]:
                wrong += [m for shape in SHAPES for _ in range(2) for m in check(case, *shape)]
        print("\n".join(wrong) or f"{sys.argv[1]}: right", flush=True)
        return len(wrong)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    names = [case.name for case in CASES]
    runs = [
        subprocess.Popen([sys.executable, __file__, name], stderr=subprocess.STDOUT)
        for name in names
    ]
    failed = sum(run.wait() != 0 for run in runs)
    print(f"{failed} of {len(runs)} cases failed", flush=True)
    time_all()
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""Check the Hopper ``sparse_mla_prefill`` against the reference, then time it.

    python benchmarks/check_sm90_prefill.py            every check, then the timings
    python benchmarks/check_sm90_prefill.py CASE       one check, by name

Times are medians of 20 calls, each after 30 ms of rest and a spin of about 1 ms (clocks stay up).
TFLOP/s counts 2 * heads * topk * (512 + 512) * tokens; norm, rotations and cast count for nothing.
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

import torch

import mlacast
from mlacast.kernels.gluon.sm90.sparse_mla_prefill import launch_sparse_mla_prefill
from mlacast.reference.quantize_output import quantize_output as store
from mlacast.reference.sparse_mla_prefill import sparse_mla_prefill as reference

DEVICE = "cuda"
TIME_LIMIT_S = 150


@dataclass(frozen=True)
class Case:
    """One compiled variant, checked over several shapes."""

    name: str
    heads: int = 64
    out_format: mlacast.OutFormat = mlacast.Bf16()
    groups: int = 1
    pairing: str | None = None
    norm: bool = False
    sink: bool = False
    lengths: bool = False
    order: str = "head"


MX32 = mlacast.Mxfp8("chunk32")
CASES = (
    Case("bf16"),
    Case("bf16-h128-length-sink", 128, sink=True, lengths=True),
    Case("mx-head", out_format=mlacast.Mxfp8("head"), groups=8, pairing="interleaved", norm=True),
    Case("mx-chunk", 64, MX32, 8, "interleaved", True, True, True, "chunk16"),
    Case("mx-chunk-h128-half", 128, MX32, 16, "half", True, True, False, "chunk16"),
    Case("mx-head-h128", 128, mlacast.Mxfp8("head"), 16, "half", True, True, True),
    Case("mx-chunk-h16", 16, MX32, 2, "interleaved", True, True, True, "chunk16"),
    Case("bf16-h96", 96, pairing="half", norm=True, sink=True),
    Case("group128-f32", 64, mlacast.Fp8Group(128, "float32", "mn_major"), 8, "interleaved", True),
    Case("group128-packed", 128, mlacast.Fp8Group(128, "ue8m0_packed", "mn_major"), 8, "half"),
    Case("group64-pow2", 40, mlacast.Fp8Group(64, "float32_pow2", "row_major"), 5, sink=True),
    Case("group32-f32", 64, mlacast.Fp8Group(32, "float32", "row_major"), 4, lengths=True),
    Case("fp8-tensor", 64, mlacast.Fp8Tensor(0.02), 8, "interleaved", True),
)
SHAPES = ((133, 640), (270, 100), (300, 64), (9, 0))


def rope_of(tokens: int, pairing: str | None) -> mlacast.Rope | None:
    """Random angles for every token."""
    if pairing is None:
        return None
    angles = torch.rand((5000, 32), device=DEVICE) * 6.3
    positions = torch.randint(0, 5000, (tokens,), device=DEVICE)
    return mlacast.Rope(torch.cat((angles.cos(), angles.sin()), 1), positions, pairing)


def draw(case: Case, tokens: int, topk: int, s_kv: int) -> tuple[torch.Tensor, ...]:
    """Random query, rows with NaN where nothing selects, and indices with invalid entries."""
    q = (torch.randn((tokens, case.heads, 512), device=DEVICE) * 3).bfloat16()
    kv = (torch.randn((s_kv, 512), device=DEVICE) * 2).bfloat16()
    kv[s_kv // 2] = float("nan")
    indices = torch.randint(0, s_kv, (tokens, topk), device=DEVICE, dtype=torch.int32)
    indices[indices == s_kv // 2] = 0
    invalid = torch.rand((tokens, topk), device=DEVICE)
    indices[invalid < 0.2] = -1
    indices[invalid < 0.1] = s_kv
    indices[invalid < 0.02] = 2**31 - 1
    indices[invalid < 0.01] = -(2**31)
    indices[0, :64] = -1
    if tokens > 3:
        indices[3] = -1
    return q, kv, indices


def run_case(case: Case) -> list[str]:
    """Return what is wrong."""
    wrong = []
    for tokens, topk in SHAPES:
        for attempt in range(2):
            wrong += [f"{case.name} {tokens}x{topk}: {m}" for m in check(case, tokens, topk)]
            if wrong:
                return wrong
            del attempt
    return wrong


def check(case: Case, tokens: int, topk: int) -> list[str]:
    """One shape: errors against float64, untouched neighbours, exact repeat, batch independence."""
    q, kv, indices = draw(case, tokens, topk, 1000)
    options = {
        "sm_scale": 0.02,
        "topk_length": None,
        "attn_sink": None,
        "q_norm_eps": 1e-6 if case.norm else None,
        "rope": rope_of(tokens, case.pairing),
        "q_order": case.order,
    }
    if case.norm:
        options["sm_scale"] = 0.1
    if case.lengths:
        options["topk_length"] = torch.randint(
            -3, topk + 70, (tokens,), device=DEVICE, dtype=torch.int32
        )
        options["topk_length"][tokens // 2] = 0
    if case.sink:
        options["attn_sink"] = torch.randn(case.heads, device=DEVICE)
        options["attn_sink"][1] = float("inf")
        options["attn_sink"][2] = -float("inf")
    features = case.heads * 512 // case.groups
    before, after = 3, 6 - (tokens + 3) % 4
    total = before + tokens + after
    buffer = mlacast.QuantizedTensor.empty(total, case.groups, features, case.out_format, DEVICE)
    storage = buffer.data.view(torch.uint8)
    storage.fill_(0x5A)
    if buffer.sf is not None:
        buffer.sf.view(torch.uint8).fill_(0x5A) if buffer.sf.is_contiguous() else buffer.sf.fill_(7)
    part = buffer[before : before + tokens]

    def launch(out: mlacast.QuantizedTensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        sliced = dict(options)
        if options["topk_length"] is not None:
            sliced["topk_length"] = options["topk_length"][rows]
        if options["rope"] is not None:
            rope = options["rope"]
            sliced["rope"] = mlacast.Rope(rope.cos_sin_cache, rope.positions[rows], rope.pairing)
        count = out.num_tokens
        max_logits = torch.full((count, case.heads), float("nan"), device=DEVICE)
        lse = max_logits.clone()
        launch_sparse_mla_prefill(
            q[rows], kv, indices[rows], out=out, max_logits=max_logits, lse=lse, **sliced
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
    limit = 4e-2 if scaled else 6e-3
    if norm == 0.0:
        if got.abs().max().item() != 0.0:
            wrong.append("empty rows are not zero")
    elif not error < limit:
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
        exact = mlacast.QuantizedTensor.empty(
            tokens, case.groups, features, case.out_format, DEVICE
        )
        store(want.float().reshape(tokens, case.groups, features), exact)
        same_sf = (exact.sf == part.sf).float().mean().item()
        same_codes = (exact.data.view(torch.uint8) == part.data.view(torch.uint8)).float().mean()
        is_power = case.out_format.sf_kind != "float32"
        if (is_power and same_sf < 0.985) or same_codes.item() < (0.9 if is_power else 0.8):
            wrong.append(f"only {same_sf:.4f} of the scales, {same_codes.item():.4f} codes agree")
        outside = torch.cat((buffer.sf[:before].flatten(), buffer.sf[before + tokens :].flatten()))
        if (outside != outside[0]).any() or outside[0] == 0:
            wrong.append("scales outside of the range changed")
    again = mlacast.QuantizedTensor.empty(tokens, case.groups, features, case.out_format, DEVICE)
    if again.sf_rows_with_padding() is not None:
        again.sf_rows_with_padding().fill_(3)
    launch(again, slice(0, tokens))
    padded = again.sf_rows_with_padding()
    is_padded = padded is not None and case.out_format.sf_layout == "mn_major"
    if is_padded and (padded[tokens:] != 0).any():
        wrong.append("padding of the scales is not zero")
    first = part.data.view(torch.uint8)
    if not torch.equal(again.data.view(torch.uint8), first):
        wrong.append("a repeat differs")
    if part.sf is not None and not torch.equal(again.sf, part.sf):
        wrong.append("scales of a repeat differ")
    if tokens > 4:
        rows = slice(2, 5)
        alone = mlacast.QuantizedTensor.empty(3, case.groups, features, case.out_format, DEVICE)
        launch(alone, rows)
        if not torch.equal(alone.data.view(torch.uint8), first[rows]):
            wrong.append("a row depends on the others")
    return wrong


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
    """Time 4096 tokens: attention alone, and fused with norm, rotations and cast."""
    tokens = 4096
    sizes = ((64, 640, 32768), (128, 1152, 32768), (64, 2048, 8192), (128, 2048, 8192))
    sizes += ((64, 640, 8192),)
    variants = (
        ("bf16 out, attention alone", mlacast.Bf16(), "head", False),
        ("fused, head order", mlacast.Mxfp8("head"), "head", True),
        ("fused, chunk16 -> chunk32", MX32, "chunk16", True),
        ("fused, group128 float32", mlacast.Fp8Group(128, "float32", "mn_major"), "head", True),
    )
    for heads, topk, s_kv in sizes:
        q = torch.randn((tokens, heads, 512), device=DEVICE).bfloat16()
        kv = torch.randn((s_kv, 512), device=DEVICE).bfloat16()
        indices = torch.randint(0, s_kv, (tokens, topk), device=DEVICE, dtype=torch.int32)
        max_logits = torch.empty((tokens, heads), device=DEVICE)
        lse = torch.empty_like(max_logits)
        for name, out_format, order, fused in variants:
            groups = heads // 8 if fused else 1
            out = mlacast.QuantizedTensor.empty(
                tokens, groups, heads * 512 // groups, out_format, DEVICE
            )
            options = {
                "sm_scale": 0.04,
                "topk_length": None,
                "attn_sink": torch.zeros(heads, device=DEVICE) if fused else None,
                "q_norm_eps": 1e-6 if fused else None,
                "rope": rope_of(tokens, "interleaved") if fused else None,
                "q_order": order,
            }

            launch = functools.partial(
                launch_sparse_mla_prefill,
                q,
                kv,
                indices,
                out=out,
                max_logits=max_logits,
                lse=lse,
                **options,
            )
            us = burst_us(launch)
            tflops = 2 * heads * topk * 1024 * tokens / us / 1e6
            print(f"h{heads} topk{topk} s_kv{s_kv} {name}: {us:.1f} us, {tflops:.0f} TFLOP/s")


def main() -> int:
    """Run the checks in parallel processes, each with its own compilation, then time."""
    if len(sys.argv) > 1:
        watchdog = threading.Timer(TIME_LIMIT_S, lambda: (print("HANG", flush=True), os._exit(3)))
        watchdog.daemon = True
        watchdog.start()
        torch.manual_seed(1)
        wrong = [m for case in CASES if case.name == sys.argv[1] for m in run_case(case)]
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

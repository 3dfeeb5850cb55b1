"""Check the Hopper ``sparse_mla_decode`` against the reference, then time it.

    python benchmarks/check_sm90_decode.py            every check, then the timings
    python benchmarks/check_sm90_decode.py CASE       one check, by name
    python benchmarks/check_sm90_decode.py time       only the timings

Times are those of one CUDA graph of eight calls with different slots, the median of nine replays.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

import mlacast
from mlacast import KvFormat
from mlacast.kernels.gluon.sm90.sparse_mla_decode import launch_sparse_mla_decode
from mlacast.reference.quantize_output import quantize_output as store
from mlacast.reference.sparse_mla_decode import sparse_mla_decode as reference

DEVICE = "cuda"
TIME_LIMIT_S = 80


@dataclass(frozen=True)
class Case:
    """One combination of options, checked over several shapes."""

    name: str
    kv_format: KvFormat = KvFormat.V41
    extra: KvFormat | None = None
    heads: int = 64
    out_format: mlacast.OutFormat = mlacast.Bf16()
    groups: int = 1
    pairing: str | None = None
    norm: bool = False
    sink: bool = False
    lengths: bool = False
    order: str = "head"


MX = mlacast.Mxfp8("head")
MX32 = mlacast.Mxfp8("chunk32")
V4, V41, FP4, V32 = KvFormat.V4, KvFormat.V41, KvFormat.V41_FP4, KvFormat.V32
INLINE, FP4_INLINE = KvFormat.V41_INLINE, KvFormat.V41_FP4_INLINE
CASES = (
    Case("v41-bf16"),
    Case("v41-inline-h96", INLINE, INLINE, 96, sink=True, lengths=True),
    Case("v41-v41-fused", V41, V41, 64, MX, 8, "interleaved", True, True, True),
    Case("v41-v41-chunk-h128", V41, V41, 128, MX32, 16, "half", True, True, True, "chunk16"),
    Case("v4-v4-fused", V4, V4, 64, MX, 8, "interleaved", True, True, True),
    Case("v4-chunk-h16", V4, None, 16, MX32, 2, "interleaved", True, False, False, "chunk16"),
    Case("v41-fp4-fused", V41, FP4, 64, MX32, 8, "interleaved", True, True, True, "chunk16"),
    Case("inline-fp4-inline", INLINE, FP4_INLINE, 32, mlacast.Fp8Tensor(0.05), 4, lengths=True),
    Case("v4-group128", V4, V4, 128, mlacast.Fp8Group(128, "float32", "mn_major"), 8, "half"),
)
# Query tokens, columns of both lists, splits.
SHAPES = ((5, 128, 512, None), (7, 100, 70, 1), (270, 64, 128, None), (3, 200, 0, 3), (2, 0, 64, 2))


def rope_of(tokens: int, pairing: str | None) -> mlacast.Rope | None:
    """Random angles for every token."""
    if pairing is None:
        return None
    angles = torch.rand((5000, 32), device=DEVICE) * 6.3
    positions = torch.randint(0, 5000, (tokens,), device=DEVICE)
    return mlacast.Rope(torch.cat((angles.cos(), angles.sin()), 1), positions, pairing)


def draw_cache(kv_format: KvFormat, pages: int, page_size: int) -> torch.Tensor:
    """A cache of random tokens whose groups differ in size by powers of two."""
    cache = kv_format.allocate(pages, page_size, device=DEVICE)
    width = kv_format.d_qk or 512
    for first in range(0, pages * page_size, 1 << 17):
        slots = torch.arange(first, min(first + (1 << 17), pages * page_size), device=DEVICE)
        sizes = torch.randint(-3, 3, (slots.numel(), width // 16, 1), device=DEVICE)
        latent = torch.randn((slots.numel(), width // 16, 16), device=DEVICE) * 2.0**sizes
        kv_format.append(latent.reshape(-1, width).bfloat16(), slots, cache)
    return cache


def draw_slots(tokens: int, columns: int, slots: int) -> torch.Tensor:
    """Slots with repeats and invalid entries."""
    indices = torch.randint(0, slots, (tokens, columns), device=DEVICE, dtype=torch.int32)
    invalid = torch.rand((tokens, columns), device=DEVICE)
    indices[invalid < 0.2] = -1
    indices[invalid < 0.1] = slots
    indices[invalid < 0.02] = 2**31 - 1
    indices[invalid < 0.01] = -(2**31)
    indices[0, :64] = -1
    if tokens > 2:
        indices[2] = -1
    return indices


def draw_lengths(tokens: int, columns: int, *, vary: bool) -> torch.Tensor | None:
    """Lengths from below zero to beyond the width."""
    if not vary:
        return None
    lengths = torch.randint(-3, columns + 70, (tokens,), device=DEVICE, dtype=torch.int32)
    lengths[tokens // 2] = 0
    return lengths


def check(case: Case, tokens: int, topk: int, extra_topk: int, splits: int | None) -> list[str]:
    """One shape: errors against float64, untouched neighbours, exact repeat."""
    cache = draw_cache(case.kv_format, 9, 64)
    extra_cache = None if case.extra is None else draw_cache(case.extra, 40, 17)
    q = (torch.randn((tokens, case.heads, case.kv_format.d_qk), device=DEVICE) * 3).bfloat16()
    indices = draw_slots(tokens, topk, 9 * 64)
    options = {
        "kv_format": case.kv_format,
        "sm_scale": 0.1 if case.norm else 0.02,
        "topk_length": draw_lengths(tokens, topk, vary=case.lengths),
        "extra_k_cache": extra_cache,
        "extra_indices": None,
        "extra_topk_length": None,
        "extra_kv_format": case.extra,
        "attn_sink": None,
        "q_norm_eps": 1e-6 if case.norm else None,
        "rope": rope_of(tokens, case.pairing),
        "q_order": case.order,
        "num_splits": splits,
    }
    if case.extra is not None:
        options["extra_indices"] = draw_slots(tokens, extra_topk, 40 * 17)
        options["extra_topk_length"] = draw_lengths(tokens, extra_topk, vary=case.lengths)
    if case.sink:
        options["attn_sink"] = torch.randn(case.heads, device=DEVICE)
        options["attn_sink"][1] = float("inf")
        options["attn_sink"][2] = -float("inf")
    features = case.heads * 512 // case.groups
    before, after = 3, 6 - (tokens + 3) % 4
    buffer = mlacast.QuantizedTensor.empty(
        before + tokens + after, case.groups, features, case.out_format, DEVICE
    )
    storage = buffer.data.view(torch.uint8)
    storage.fill_(0x5A)
    part = buffer[before : before + tokens]

    def launch(out: mlacast.QuantizedTensor) -> torch.Tensor:
        lse = torch.full((tokens, case.heads), float("nan"), device=DEVICE)
        launch_sparse_mla_decode(
            q, cache, indices, out=out, lse=lse, batch_invariant=False, workspace=None, **options
        )
        return lse

    lse = launch(part)
    torch.cuda.synchronize()
    want, want_lse = reference(q, cache, indices, compute_dtype=torch.float64, **options)
    wrong = []
    got = part.dequantize().reshape(want.shape).double()
    norm = want.norm().item()
    error = (got - want).norm().item() / max(norm, 1e-30)
    scaled = case.out_format.key != "bf16"
    limit = 4e-2 if scaled else 6e-3
    if norm == 0.0:
        if got.abs().max().item() != 0.0:
            wrong.append("empty rows are not zero")
    elif not error < limit:
        wrong.append(f"error {error:.2e}")
    empty = torch.isneginf(want_lse)
    if got[empty].abs().sum().item() != 0.0:
        wrong.append("an empty row is not zero")
    if not torch.equal(torch.isneginf(lse), empty):
        wrong.append("lse: other rows are -inf")
    elif not torch.allclose(lse[~empty].double(), want_lse[~empty], rtol=2e-3, atol=2e-3):
        wrong.append(f"lse off by {(lse[~empty] - want_lse[~empty]).abs().max().item():.2e}")
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
    again = mlacast.QuantizedTensor.empty(tokens, case.groups, features, case.out_format, DEVICE)
    launch(again)
    if not torch.equal(again.data.view(torch.uint8), part.data.view(torch.uint8)):
        wrong.append("a repeat differs")
    if part.sf is not None and not torch.equal(again.sf, part.sf):
        wrong.append("scales of a repeat differ")
    return wrong


def graph_us(calls: list[Callable[[], None]]) -> float:
    """Time of one call in a graph of all of them, the median of nine replays."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(9):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return statistics.median(times)


# Format, extra format, heads, columns, tokens with their targets in microseconds.
TIMED = (
    (V41, V41, 64, 128, 512, ((1, 13), (16, 19), (64, 31), (128, 36), (256, 64))),
    (V4, V4, 64, 128, 512, ((1, 13), (16, 19), (64, 31), (128, 36), (256, 64))),
    (V41, FP4, 64, 128, 512, ((1, 13), (16, 19), (64, 31), (128, 36), (256, 64))),
    (V41, V41, 128, 128, 1024, ((64, 46), (128, 90), (256, 172))),
    (V4, V4, 128, 128, 1024, ((64, 46), (128, 90), (256, 172))),
)


def time_all() -> None:
    """Time everything fused."""
    pools: dict[str, torch.Tensor] = {}
    for kv_format, extra, heads, topk, extra_topk, targets in TIMED:
        for needed in (kv_format, extra):
            if needed.name not in pools:
                pools[needed.name] = draw_cache(needed, 1 << 14, 64)
        slots = 1 << 20
        line = []
        for tokens, target in targets:
            q = torch.randn((tokens, heads, kv_format.d_qk), device=DEVICE).bfloat16()
            out = mlacast.QuantizedTensor.empty(tokens, heads // 8, 4096, MX, DEVICE)
            lse = torch.empty((tokens, heads), device=DEVICE)
            rope = rope_of(tokens, "interleaved")
            sink = torch.zeros(heads, device=DEVICE)
            calls = [
                functools.partial(
                    launch_sparse_mla_decode,
                    q,
                    pools[kv_format.name],
                    torch.randint(0, slots, (tokens, topk), device=DEVICE, dtype=torch.int32),
                    kv_format=kv_format,
                    sm_scale=0.04,
                    topk_length=None,
                    extra_k_cache=pools[extra.name],
                    extra_indices=torch.randint(
                        0, slots, (tokens, extra_topk), device=DEVICE, dtype=torch.int32
                    ),
                    extra_topk_length=None,
                    extra_kv_format=extra,
                    attn_sink=sink,
                    q_norm_eps=1e-6,
                    rope=rope,
                    q_order="head",
                    num_splits=None,
                    batch_invariant=False,
                    workspace=None,
                    out=out,
                    lse=lse,
                )
                for _ in range(8)
            ]
            line.append(f"{tokens}: {graph_us(calls):.1f} ({target})")
        name = f"{kv_format.name}+{extra.name} h{heads} {topk}+{extra_topk}"
        print(name, "us by tokens (target):", ", ".join(line), flush=True)


def main() -> int:
    """Run the checks in parallel processes, each with its own compilation, then time."""
    watchdog = threading.Timer(TIME_LIMIT_S, lambda: (print("HANG", flush=True), os._exit(3)))
    watchdog.daemon = True
    watchdog.start()
    torch.manual_seed(1)
    if sys.argv[1:] == ["time"]:
        time_all()
        return 0
    if len(sys.argv) > 1:
        case = next(case for case in CASES if case.name == sys.argv[1])
        wrong = [
            f"{case.name} {shape}: {message}" for shape in SHAPES for message in check(case, *shape)
        ]
        print("\n".join(wrong) or f"{case.name}: right", flush=True)
        return len(wrong)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    runs = [
        subprocess.Popen([sys.executable, __file__, case.name], stderr=subprocess.STDOUT)
        for case in CASES
    ]
    failed = sum(run.wait() != 0 for run in runs)
    print(f"{failed} of {len(runs)} cases failed", flush=True)
    time_all()
    return failed


if __name__ == "__main__":
    sys.exit(main())

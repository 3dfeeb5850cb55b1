"""Time the Hopper kernels of the sparse operations alone: no dispatch, no checks.

    python benchmarks/time_sm90.py                   every kernel
    python benchmarks/time_sm90.py prefill           one of prefill, prefill_576 and decode
    python benchmarks/time_sm90.py decode --only V4  the lines whose name contains "V4"
    python benchmarks/time_sm90.py --once            every call once: fills Triton's cache

That results are right is for ``pytest tests/gpu -k hopper``. Prefill, 4096 tokens: the burst
protocol of ``mlacast.bench.protocols``, medians of 20 calls; TFLOP/s counts 2 * heads * topk *
(d_qk + 512) * tokens, norm, rotations and cast count for nothing. Decode, everything fused: one
CUDA graph of eight calls with different slots, the median of nine replays.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mlacast  # noqa: E402
from mlacast import KvFormat  # noqa: E402
from mlacast.bench.protocols import burst  # noqa: E402
from mlacast.kernels.gluon.sm90.sparse_mla_decode import launch_sparse_mla_decode  # noqa: E402
from mlacast.kernels.gluon.sm90.sparse_mla_prefill import launch_sparse_mla_prefill  # noqa: E402
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576 import (  # noqa: E402
    launch_sparse_mla_prefill_576,
)

Call = Callable[[], object]

DEVICE = "cuda"
TIME_LIMIT_S = 300
TOKENS = 4096
SLOTS = 1 << 20
PAGE_SIZE = 64


@dataclass(frozen=True)
class Variant:
    """What a prefill does beside attention.

    Attributes:
        name: How its line is called.
        out_format: Format of the output.
        heads_per_group: Heads of a group of the output; 0 for all of them.
        q_order: Element order of the query.
        fused: Which of "norm", "rope" and "sink" are in it.
    """

    name: str
    out_format: mlacast.OutFormat = mlacast.Bf16()
    heads_per_group: int = 0
    q_order: str = "head"
    fused: tuple[str, ...] = ()


MX, MX32 = mlacast.Mxfp8("head"), mlacast.Mxfp8("chunk32")
GROUP_128 = mlacast.Fp8Group(128, "float32", "mn_major")
ALL = ("norm", "rope", "sink")
VARIANTS = (
    Variant("bf16 out, attention alone"),
    Variant("fused, head order", MX, 8, fused=ALL),
    Variant("fused, chunk16 -> chunk32", MX32, 8, "chunk16", ALL),
    Variant("fused, group128 float32", GROUP_128, 8, fused=ALL),
)
VARIANTS_576 = (
    Variant("bf16 out, attention alone", heads_per_group=1),
    Variant("rotation, bf16 out", heads_per_group=1, fused=("rope",)),
    Variant("rotation, group128 float32", GROUP_128, 1, fused=("rope",)),
)
# Heads, topk, rows.
SIZES = (
    (64, 640, 32768),
    (128, 1152, 32768),
    (64, 2048, 8192),
    (128, 2048, 8192),
    (64, 640, 8192),
)
SIZES_576 = ((128, 2048, 8192), (128, 2048, 65536), (64, 2048, 8192), (64, 2048, 65536))

V4, V41, FP4, V32 = KvFormat.V4, KvFormat.V41, KvFormat.V41_FP4, KvFormat.V32
# Formats, heads, columns of both lists, tokens with their targets in microseconds.
STEPS = (
    ((V41, V41), 64, 128, 512, ((1, 13), (16, 19), (64, 31), (128, 36), (256, 64))),
    ((V4, V4), 64, 128, 512, ((1, 13), (16, 19), (64, 31), (128, 36), (256, 64))),
    ((V41, FP4), 64, 128, 512, ((1, 13), (16, 19), (64, 31), (128, 36), (256, 64))),
    ((V41, V41), 128, 128, 1024, ((64, 46), (128, 90), (256, 172))),
    ((V4, V4), 128, 128, 1024, ((64, 46), (128, 90), (256, 172))),
    ((V32,), 128, 2048, 0, ((64, 85), (128, 165))),
)


def rope_of(tokens: int) -> mlacast.Rope:
    """Random angles for every token."""
    angles = torch.rand((5000, 32), device=DEVICE) * 6.3
    table = torch.cat((angles.cos(), angles.sin()), 1)
    return mlacast.Rope(table, torch.randint(0, 5000, (tokens,), device=DEVICE))


def draw_indices(tokens: int, topk: int, rows: int) -> torch.Tensor:
    """Indices [tokens, topk], all valid."""
    return torch.randint(0, rows, (tokens, topk), device=DEVICE, dtype=torch.int32)


def prefill_call(
    launch: Callable[..., object], inputs: Sequence[torch.Tensor], variant: Variant
) -> Call:
    """One variant for a query, rows and indices."""
    heads = inputs[0].shape[1]
    groups = heads // variant.heads_per_group if variant.heads_per_group else 1
    features = heads * 512 // groups
    max_logits = torch.empty((TOKENS, heads), device=DEVICE)
    return functools.partial(
        launch,
        *inputs,
        sm_scale=0.04,
        topk_length=None,
        attn_sink=torch.zeros(heads, device=DEVICE) if "sink" in variant.fused else None,
        q_norm_eps=1e-6 if "norm" in variant.fused else None,
        rope=rope_of(TOKENS) if "rope" in variant.fused else None,
        q_order=variant.q_order,
        out=mlacast.QuantizedTensor.empty(TOKENS, groups, features, variant.out_format, DEVICE),
        max_logits=max_logits,
        lse=torch.empty_like(max_logits),
    )


def time_prefill(
    launch: Callable[..., object],
    d_qk: int,
    sizes: Sequence[tuple[int, int, int]],
    variants: Sequence[Variant],
    only: str,
    once: bool,
) -> None:
    """Print a line for every size and variant; ``once`` only makes the calls."""
    for heads, topk, rows in sizes:
        q = torch.randn((TOKENS, heads, d_qk), device=DEVICE).bfloat16()
        kv = torch.randn((rows, d_qk), device=DEVICE).bfloat16()
        inputs = (q, kv, draw_indices(TOKENS, topk, rows))
        for variant in variants:
            name = f"h{heads} topk{topk} s_kv{rows} {variant.name}"
            if only in name:
                call = prefill_call(launch, inputs, variant)
                if once:
                    call()
                    continue
                us = burst(call, 20).median_us
                tflops = 2 * heads * topk * (d_qk + 512) * TOKENS / us / 1e6
                print(f"{name}: {us:.1f} us, {tflops:.0f} TFLOP/s", flush=True)


@functools.cache
def pool_of(kv_format: KvFormat) -> torch.Tensor:
    """A cache of SLOTS tokens; its bytes are numbers of similar size as codes and as scales.

    Scales of "V32" are powers of two, like those that the library writes.
    """
    cache = kv_format.allocate(SLOTS // PAGE_SIZE, PAGE_SIZE, device=DEVICE)
    every = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(cache.untyped_storage())
    every.random_(56, 63)
    if kv_format is V32:
        exponents = torch.randint(-3, 3, (*cache.shape[:-1], 4), device=DEVICE)
        cache[..., 512:528] = torch.exp2(exponents.float()).view(torch.uint8)
    return cache


def decode_calls(
    formats: Sequence[KvFormat], heads: int, topk: int, extra_topk: int, tokens: int
) -> list[Call]:
    """Eight calls of one step, each with slots of its own."""
    extra = formats[1] if len(formats) > 1 else None
    d_qk = formats[0].d_qk
    assert d_qk is not None, "a format of a fixed width"
    q = torch.randn((tokens, heads, d_qk), device=DEVICE).bfloat16()
    out = mlacast.QuantizedTensor.empty(tokens, heads // 8, 4096, MX, DEVICE)
    lse = torch.empty((tokens, heads), device=DEVICE)
    rope, sink = rope_of(tokens), torch.zeros(heads, device=DEVICE)
    return [
        functools.partial(
            launch_sparse_mla_decode,
            q,
            pool_of(formats[0]),
            draw_indices(tokens, topk, SLOTS),
            kv_format=formats[0],
            sm_scale=0.04,
            topk_length=None,
            extra_k_cache=None if extra is None else pool_of(extra),
            extra_indices=None if extra is None else draw_indices(tokens, extra_topk, SLOTS),
            extra_topk_length=None,
            extra_kv_format=extra,
            attn_sink=sink,
            q_norm_eps=1e-6 if d_qk == 512 else None,
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


def graph_us(calls: Sequence[Call]) -> float:
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


def time_decode(only: str, once: bool) -> None:
    """Print a line for every step, with times by tokens; ``once`` only makes the calls."""
    for formats, heads, topk, extra_topk, targets in STEPS:
        both = "+".join(kv_format.name for kv_format in formats)
        name = f"{both} h{heads} {topk}+{extra_topk}"
        if only not in name:
            continue
        times = []
        for tokens, target in targets:
            calls = decode_calls(formats, heads, topk, extra_topk, tokens)
            if once:
                calls[0]()
            else:
                times.append(f"{tokens}: {graph_us(calls):.1f} ({target})")
        if times:
            print(name, "us by tokens (target):", ", ".join(times), flush=True)


def main() -> None:
    """Time what the command line names."""
    parser = argparse.ArgumentParser(description="Time the Hopper kernels alone.")
    kernels = ("prefill", "prefill_576", "decode")
    parser.add_argument("kernel", nargs="*", help=f"{', '.join(kernels)}; all by default")
    parser.add_argument("--only", default="", help="lines whose name contains this")
    parser.add_argument("--once", action="store_true", help="time nothing, call everything once")
    options = parser.parse_args()
    chosen = options.kernel or kernels
    if not set(chosen) <= set(kernels):
        parser.error(f"kernel must be one of {', '.join(kernels)}, got {', '.join(chosen)}")
    # A kernel whose warp groups wait for each other would never return.
    faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    how = (options.only, options.once)
    if "prefill" in chosen:
        time_prefill(launch_sparse_mla_prefill, 512, SIZES, VARIANTS, *how)
    if "prefill_576" in chosen:
        time_prefill(launch_sparse_mla_prefill_576, 576, SIZES_576, VARIANTS_576, *how)
    if "decode" in chosen:
        time_decode(*how)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()

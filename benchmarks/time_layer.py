"""Time the portable kernels of a dense layer beside what torch has for the same work.

    python benchmarks/time_layer.py              everything
    python benchmarks/time_layer.py v_up         one of v_up, merge and prefill
    python benchmarks/time_layer.py --once       every call once: fills Triton's cache
    python benchmarks/time_layer.py --jobs 12    the same in 12 processes, then everything

That results are right is for test_dense_prefill.py and test_layer_products.py of tests/gpu.
Products and merges: the graph protocol of ``mlacast.bench.protocols`` over input sets larger than
the L2 cache, beside ``torch.bmm`` and the copy bandwidth of the same run. Prefill: the burst
protocol, beside torch's cuDNN attention; TFLOP/s counts batch * heads * tokens**2 * (192 + 128).
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mlacast  # noqa: E402
from mlacast.bench.protocols import burst, graph  # noqa: E402
from mlacast.kernels.config import dense_prefill  # noqa: E402
from mlacast.kernels.config.dense_prefill import PrefillConfig  # noqa: E402
from mlacast.kernels.config.v_up_project import v_up_config  # noqa: E402
from mlacast.kernels.triton import dense_mla_prefill, v_up_project  # noqa: E402

Call = Callable[[], object]

DEVICE = "cuda"
TIME_LIMIT_S = 400
REPEATS = 9
BF16 = torch.bfloat16
L2_BYTES = 64 << 20
COPY_BYTES = 1 << 30

FORMATS: dict[str, mlacast.OutFormat] = {
    "bf16": mlacast.Bf16(),
    "fp8 per tensor": mlacast.Fp8Tensor(0.05),
    "fp8 128 float32": mlacast.Fp8Group(128),
    "fp8 128 pow2 mn": mlacast.Fp8Group(128, "float32_pow2", "mn_major"),
    "mxfp8": mlacast.Mxfp8(),
    "nvfp4": mlacast.Nvfp4(448.0),
}
# Tokens and heads of a product.
PRODUCTS = ((1, 128), (16, 128), (64, 128), (128, 128), (256, 128), (128, 16))
# Tokens, heads, width and parts of a merge.
MERGES = ((8192, 128, 128, 2), (1024, 128, 128, 2), (8192, 16, 128, 3), (256, 128, 512, 4))
# Sequences, tokens of each, heads.
PREFILLS = ((1, 8192, 16), (8, 1024, 16), (1, 8192, 128), (8, 1024, 128), (1, 16384, 16))
# Tiles worth trying; the first is that of the library.
TILES = (
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 128, 8, 2),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(64, 64, 4, 2),
)


def buffer_of(tokens: int, features: int, fmt: mlacast.OutFormat) -> mlacast.QuantizedTensor:
    """A whole buffer of one group."""
    return mlacast.QuantizedTensor.empty(tokens, 1, features, fmt, DEVICE)


def number_of_sets(bytes_of_a_set: int) -> int:
    """So many input sets that the L2 cache forgets the first before it comes again."""
    return max(2, min(16, 3 * L2_BYTES // bytes_of_a_set + 1))


def time_products() -> Iterator[tuple[str, list[Call], Callable[[float], str]]]:
    """Lines of ``v_up_project``, in every format, and of ``torch.bmm``."""
    for tokens, heads in PRODUCTS:
        bytes_read = heads * 512 * (tokens + 128) * 2
        sets = [
            (
                torch.randn(tokens, heads, 512, dtype=BF16, device=DEVICE),
                torch.randn(heads, 512, 128, dtype=BF16, device=DEVICE) / 22,
            )
            for _ in range(number_of_sets(bytes_read))
        ]
        products = torch.empty(heads, tokens, 128, dtype=BF16, device=DEVICE)
        calls: list[Call] = [
            functools.partial(torch.bmm, x.transpose(0, 1), w, out=products) for x, w in sets
        ]
        yield f"v_up {tokens}x{heads} torch.bmm", calls, _no_rate
        for name, fmt in FORMATS.items():
            out = buffer_of(tokens, heads * 128, fmt)
            calls = [
                functools.partial(mlacast.v_up_project, x, w, out=out, backend="triton")
                for x, w in sets
            ]
            moved = bytes_read + _written(out)
            rate = functools.partial(_gigabytes, moved)
            yield f"v_up {tokens}x{heads} {name}", calls, rate
            if tokens > 64 and name in ("bf16", "nvfp4"):
                calls = [functools.partial(_v_up_in_small_tiles, x, w, out) for x, w in sets]
                yield f"v_up {tokens}x{heads} {name}, tiles of 64", calls, rate


def time_merges() -> Iterator[tuple[str, list[Call], Callable[[float], str]]]:
    """Lines of ``merge_attention_states`` in every format, after a copy."""
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy = functools.partial(target.copy_, source)
    yield "copy", [copy], functools.partial(_gigabytes, 2 * COPY_BYTES)
    del source, target
    for tokens, heads, width, count in MERGES:
        elements = tokens * heads * width
        sets = [
            (
                [
                    torch.randn(tokens, heads, width, dtype=BF16, device=DEVICE)
                    for _ in range(count)
                ],
                [torch.randn(heads, tokens, device=DEVICE) for _ in range(count)],
            )
            for _ in range(number_of_sets(elements * 2 * count))
        ]
        for name, fmt in FORMATS.items():
            out = buffer_of(tokens, heads * width, fmt)
            calls: list[Call] = [
                functools.partial(
                    mlacast.merge_attention_states, outs, lses, out=out, backend="triton"
                )
                for outs, lses in sets
            ]
            moved = elements * 2 * count + tokens * heads * 4 * (count + 1) + _written(out)
            title = f"merge {count} of {tokens}x{heads}x{width} {name}"
            yield title, calls, functools.partial(_gigabytes, moved)


def time_prefills() -> Iterator[tuple[str, list[Call], Callable[[float], str]]]:
    """Lines of ``dense_mla_prefill``: tiles as bfloat16, formats with the library's tile."""
    for count, length, heads in PREFILLS:
        tokens = count * length
        q, k = (torch.randn(tokens, heads, 192, dtype=BF16, device=DEVICE) for _ in range(2))
        v = torch.randn(tokens, heads, 256, dtype=BF16, device=DEVICE)[..., 128:]
        flops = count * heads * length**2 * (192 + 128)
        rate = functools.partial(_teraflops, flops)
        title = f"prefill {count}x{length} {heads} heads"
        inputs = [x.unflatten(0, (count, length)).transpose(1, 2).contiguous() for x in (q, k, v)]
        yield f"{title} cuDNN", [functools.partial(_cudnn, *inputs)], rate
        bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=DEVICE)
        for tile, (name, fmt) in itertools.chain(
            ((tile, ("bf16", FORMATS["bf16"])) for tile in TILES),
            ((TILES[0], entry) for entry in list(FORMATS.items())[1:]),
        ):
            out = buffer_of(tokens, heads * 128, fmt)
            lse = torch.empty(heads, tokens, device=DEVICE)
            call = functools.partial(_prefill, tile, (q, k, v), bounds, length, out=out, lse=lse)
            shape = f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}"
            yield f"{title} {name} {shape}", [call], rate


def _v_up_in_small_tiles(x: torch.Tensor, w: torch.Tensor, out: mlacast.QuantizedTensor) -> None:
    """Launch the kernel with the tile it takes for few tokens."""
    v_up_project.launch_v_up_project(x, w, out=out, config=v_up_config(1))


def _prefill(
    tile: PrefillConfig,
    inputs: tuple[torch.Tensor, ...],
    bounds: torch.Tensor,
    length: int,
    **outputs: Any,
) -> None:
    """Launch the kernel with a tile of our choice."""
    vars(dense_prefill)["prefill_config"] = lambda longest, shared: tile
    dense_mla_prefill.launch_dense_mla_prefill(
        *inputs,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=length,
        max_seqlen_k=length,
        softmax_scale=192**-0.5,
        causal=True,
        **outputs,
    )


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of torch by cuDNN, the only fast one there that takes 192 and 128."""
    backend = torch.nn.attention.SDPBackend.CUDNN_ATTENTION
    with torch.nn.attention.sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _written(out: mlacast.QuantizedTensor) -> int:
    return out.data.nbytes + (0 if out.sf is None else out.sf.nbytes)


def _no_rate(us: float) -> str:
    return ""


def _gigabytes(moved: int, us: float) -> str:
    return f"{moved / us / 1e3:7.0f} GB/s"


def _teraflops(flops: int, us: float) -> str:
    return f"{flops / us / 1e6:7.0f} TFLOP/s"


GROUPS = {"v_up": time_products, "merge": time_merges, "prefill": time_prefills}


def compile_in_processes(groups: list[str], jobs: int) -> None:
    """Make every call once in ``jobs`` processes, each a share of the lines."""
    command = [sys.executable, __file__, *groups, "--once"]
    processes = [
        subprocess.Popen([*command, "--share", f"{share}/{jobs}"]) for share in range(jobs)
    ]
    for process in processes:
        if process.wait():
            raise SystemExit(f"a process that fills the cache ended with {process.returncode}")


def main() -> None:
    """Print a line for each kernel and shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="what to time")
    parser.add_argument("--only", default="", help="lines whose name contains this")
    parser.add_argument("--once", action="store_true", help="call once, time nothing")
    parser.add_argument("--share", default="0/1", help="every nth line from one on: first/n")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile first")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True)
    groups = options.groups or list(GROUPS)
    if options.jobs:
        compile_in_processes(groups, options.jobs)
    share, shares = map(int, options.share.split("/"))
    lines = itertools.chain.from_iterable(GROUPS[name]() for name in groups)
    for at, (title, calls, rate) in enumerate(lines):
        if options.only not in title or at % shares != share:
            continue
        if options.once:
            calls[0]()
            continue
        is_prefill = title.startswith("prefill")
        timing = burst(calls[0], REPEATS) if is_prefill else graph(calls, REPEATS)
        print(f"{title:58s} {timing.median_us:9.1f} us {rate(timing.median_us)}", flush=True)
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()

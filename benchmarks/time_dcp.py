"""Time decode context parallelism on two GPUs beside one GPU, and beside heads split alone.

    PYTHONPATH=. python benchmarks/time_dcp.py --json FILE

A step of a layer of 128 heads, in three ways: "one", a GPU with all heads and the whole cache;
"heads", two GPUs with 64 heads each and the whole cache twice, which exchange nothing; "dcp", two
GPUs with 64 heads and half of the cache each. The output is FP8 in groups of 128, cast by the last
kernel. Every case first compares "dcp", in bfloat16, with the same heads over the whole cache; one
that is wrong is not timed.

Decodes: a CUDA graph of calls, collectives included, replayed; inputs are larger than the L2 cache.
Prefills: single calls behind a barrier. Medians over replays, of the slower GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mlacast
from mlacast.bench.machine import describe
from mlacast.bench.protocols import Timing, summarise
from mlacast.distributed import KvShard, local_indices, local_slots
from mlacast.layers import MLAAttention, MLAMetadata
from tests.distributed.ranks import found_by_ranks

SCHEMA = 1
WORLD = 2
HEADS = 128
PAGE = 64
# Positions that stay together, as long as a page: whole pages of an engine's blocks.
INTERLEAVE = 64
SCALE = 192**-0.5
OUT_FORMAT = mlacast.Fp8Group(128, "float32_pow2", "mn_major")
CALLS, WARM_UP = 16, 3
# Rows are rounded to bfloat16 twice more than over the whole cache.
ROW_ERROR = 2**-6


@dataclass(frozen=True)
class Case:
    """A step: ``requests`` of ``new`` tokens each, over ``cached`` tokens that include them.

    Attributes:
        name: What the lines begin with.
        requests: Requests of the step.
        cached: Tokens of each.
        kv_format: Name of the cache format.
        topk: Selected tokens of a row; 0 attends to all.
        new: New tokens of a request; more than one make it a prefill.
    """

    name: str
    requests: int
    cached: int
    kv_format: str = "BF16"
    topk: int = 0
    new: int = 1


CASES = (
    Case("dense B64 8k", 64, 8192),
    Case("dense B256 8k", 256, 8192),
    Case("dense B64 32k", 64, 32768),
    Case("dense V32 B64 8k", 64, 8192, "V32"),
    Case("dense V32 B256 8k", 256, 8192, "V32"),
    Case("sparse V32 B64 16k top2048", 64, 16384, "V32", 2048),
    Case("sparse V32 B256 16k top2048", 256, 16384, "V32", 2048),
    Case("prefill 2k of 32k", 1, 32768, new=2048),
)


class Problem:
    """The step of one case on this GPU, in each of the three ways."""

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        torch.manual_seed(1)
        self.case, self.rank, self.device = case, rank, device
        self.kv_format = mlacast.KvFormat.from_name(case.kv_format)
        tokens = case.requests * case.new
        draw = functools.partial(torch.randn, dtype=torch.bfloat16, device=device)
        self.weight = draw(HEADS * 256, 512) / 22
        self.q, self.kv_c, self.k_pe = draw(tokens, HEADS, 192), draw(tokens, 512), draw(tokens, 64)
        self.table, self.cache = self._pages(case.cached)
        flat = self.cache.flatten(0, 1)
        for request in range(case.requests):
            slots = self._slots(request, KvShard(), self.table)
            mlacast.kv_cache_append(draw(case.cached, 576), slots, self.cache, self.kv_format)
        self.shard = KvShard(rank, WORLD, INTERLEAVE)
        self.own_table, self.own_cache = self._pages(self.shard.local_length(case.cached))
        own = self.own_cache.flatten(0, 1)
        for request in range(case.requests):
            target = self._slots(request, self.shard, self.own_table)
            source = self._slots(request, KvShard(), self.table)
            own[target[target >= 0]] = flat[source[target >= 0]]
        self.positions = None
        if case.topk:
            scores = torch.rand(tokens, case.cached, device=device)
            self.positions = scores.topk(case.topk, sorted=False).indices

    def _pages(self, tokens: int) -> tuple[Tensor, Tensor]:
        pages = -(-tokens // PAGE)
        count = pages * self.case.requests
        table = torch.randperm(count, device=self.device).view(self.case.requests, pages)
        width = None if self.kv_format.d_qk else 576
        cache = self.kv_format.allocate(count, PAGE, d_qk=width, device=self.device)
        return table.to(torch.int32), cache

    def _slots(self, request: int, shard: KvShard, table: Tensor) -> Tensor:
        positions = torch.arange(self.case.cached, device=self.device)
        requests = torch.full_like(positions, request)
        return local_slots(positions, requests, table, PAGE, shard)

    def call(
        self, way: str, out_format: mlacast.OutFormat
    ) -> tuple[mlacast.QuantizedTensor, Callable[[], object]]:
        """Return a buffer, and the call that fills it."""
        case = self.case
        heads = HEADS if way == "one" else HEADS // WORLD
        first = 0 if way == "one" else self.rank * heads
        mine = slice(first, first + heads)
        is_dcp = way == "dcp"
        shard = self.shard if is_dcp else KvShard()
        table, cache = (self.own_table, self.own_cache) if is_dcp else (self.table, self.cache)
        layer = MLAAttention(
            heads,
            scale=SCALE,
            kv_b_proj=self.weight[first * 256 : (first + heads) * 256],
            kv_format=self.kv_format,
            dcp_group=dist.group.WORLD if is_dcp else None,
        )
        metadata = MLAMetadata.build(
            [case.new] * case.requests,
            [case.cached - case.new] * case.requests,
            table,
            PAGE,
            1,
            shard.rank,
            shard.world_size,
            shard.interleave,
        )
        options = {}
        if self.positions is not None:
            requests = torch.arange(case.requests, device=self.device)
            packed = local_indices(self.positions, requests, table, PAGE, shard)
            options = dict(zip(("indices", "topk_length"), packed, strict=True))
        tokens = case.requests * case.new
        shape = (tokens, 1, heads * 128)
        buffer = mlacast.QuantizedTensor.empty(*shape, out_format, self.device)
        q = self.q[:, mine].contiguous()
        arguments = (q, self.kv_c, self.k_pe, cache, metadata, buffer)
        return buffer, functools.partial(layer, *arguments, **options)

    def error(self) -> float:
        """Largest relative error of a row of "dcp" beside the same heads over the whole cache."""
        rows = []
        for way in ("heads", "dcp"):
            buffer, call = self.call(way, mlacast.Bf16())
            call()
            rows.append(buffer.data.view(-1, 128).double())
        wanted, found = rows
        return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def graph_times(call: Callable[[], object], repeats: int) -> Iterator[float]:
    """Microseconds of each replay of CALLS calls; every rank replays as often."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    for _ in range(WARM_UP):
        graph.replay()
    yield from _timed(graph.replay, repeats)
    torch.cuda.synchronize()
    graph.reset()


def _timed(call: Callable[[], object], repeats: int) -> Iterator[float]:
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        yield start.elapsed_time(stop) * 1e3


def time_way(problem: Problem, way: str, repeats: int) -> dict[str, Any]:
    """Time one way on every rank at once; return the timing of the slowest."""
    _, call = problem.call(way, OUT_FORMAT)
    if problem.case.new == 1:
        timing = summarise(list(graph_times(call, repeats)), CALLS)
    else:
        for _ in range(WARM_UP):
            call()
        timing = summarise(list(_timed(call, repeats)), 1)
    timings: list[Timing | None] = [None] * WORLD
    dist.all_gather_object(timings, timing)
    return max((asdict(found) for found in timings if found), key=lambda found: found["median_us"])


def run(
    names: tuple[str, ...], repeats: int, seconds: float, json_file: Path | None
) -> dict[str, Any]:
    """Check and time the cases in one of two processes; the first prints and writes."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    watchdog = threading.Timer(seconds, lambda: (print("HANG", flush=True), os._exit(3)))
    watchdog.daemon = True
    watchdog.start()
    document: dict[str, Any] = {"schema": SCHEMA, "machine": describe(device), "cases": []}
    kept = [word for word in sys.argv[1:] if not word.startswith("--json=")]
    if "--json" in kept:
        del kept[kept.index("--json") : kept.index("--json") + 2]
    document["machine"]["command"] = shlex.join(["python", "benchmarks/time_dcp.py", *kept])
    for case in CASES:
        if case.name not in names:
            continue
        problem = Problem(case, rank, device)
        errors: list[float] = [0.0] * WORLD
        dist.all_gather_object(errors, problem.error())
        line: dict[str, Any] = {**asdict(case), "error": max(errors)}
        if max(errors) <= ROW_ERROR:
            for way in ("one", "heads", "dcp"):
                line[way] = time_way(problem, way, repeats)
        document["cases"].append(line)
        del problem
        torch.cuda.empty_cache()
        if rank == 0:
            print(text_of(line), flush=True)
            if json_file is not None:
                # Rewritten after every case: a run cut short leaves its results.
                text = json.dumps(document, indent=1, allow_nan=False)
                json_file.write_text(text + "\n", encoding="utf-8")
    watchdog.cancel()
    return document


def text_of(line: dict[str, Any]) -> str:
    """One line for one case."""
    if "dcp" not in line:
        return f"{line['name']}: WRONG, rows differ by {line['error']:.4f}"
    one, heads, dcp = (line[way]["median_us"] for way in ("one", "heads", "dcp"))
    return (
        f"{line['name']:28s} one {one:8.1f} us, heads {heads:8.1f} us, dcp {dcp:8.1f} us"
        f" ({one / dcp:.2f} of one), error {line['error']:.4f}"
    )


def main() -> int:
    """Run both processes; the exit code counts cases that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=400, help="for everything")
    parser.add_argument("--json", type=Path, help="file to write every number to")
    options = parser.parse_args()
    if torch.cuda.device_count() < WORLD:
        print("needs two GPUs", file=sys.stderr)
        return 1
    names = tuple(case.name for case in CASES if options.case in case.name)
    json_file = None if options.json is None else options.json.resolve()
    work = functools.partial(run, names, options.repeats, options.seconds, json_file)
    with tempfile.TemporaryDirectory() as folder:
        document = found_by_ranks(work, WORLD, Path(folder), "nccl")[0]
    return sum("dcp" not in line for line in document["cases"])


if __name__ == "__main__":
    sys.exit(main())

"""Edge cases from the field that need a device: graphs, streams and repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import cache_writers
from tests.cache_writers import V4
from tests.gpu import steps
from tests.gpu.steps import CUDA, SM_SCALE, Step, all_same, copy_storage, decode_step, prefill_step

pytestmark = pytest.mark.usefixtures("each_backend")

CHUNK32 = mlacast.Mxfp8("chunk32")
TOKENS, TOPK = 8, 64
LENGTHS = (
    [64, 0, 1, 33, 64, 64, 5, 0],
    [64] * 8,
    [0] * 8,
    # Three live rows of a batch that was captured with eight.
    [7, 64, 2, 0, 0, 0, 0, 0],
    [1] * 8,
)
CALLS = pytest.mark.parametrize(
    ("make", "options"),
    [
        (prefill_step, {}),
        (decode_step, {}),
        (decode_step, {"num_splits": 1}),
        (decode_step, {"num_splits": 3}),
    ],
    ids=["prefill", "decode", "decode_one_split", "decode_three_splits"],
)
Run = Callable[[], tuple[Any, ...]]


def _capture(run: Run) -> tuple[torch.cuda.CUDAGraph, tuple[Any, ...]]:
    """Warm up and capture on a side stream; the graph and what it writes."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def _tensors(results: tuple[Any, ...]) -> Iterator[Tensor]:
    for part in results:
        if isinstance(part, Tensor):
            yield part
        else:
            yield part.data
            yield part.sf


def _clear(results: tuple[Any, ...]) -> None:
    for tensor in _tensors(results):
        tensor.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype).fill_(7)


@CALLS
@pytest.mark.parametrize("captured_with", [1, TOPK])
def test_a_replay_serves_other_lengths(
    make: Callable[..., Step], options: dict[str, Any], captured_with: int
) -> None:
    """BC-41, vllm-project/vllm#36611: captured with one key a row, or all; replayed with others."""
    step = make(TOKENS, topk=TOPK)
    step.lengths.fill_(captured_with)
    graph, captured = _capture(lambda: step.run(out_format=CHUNK32, **options))
    for lengths in LENGTHS:
        step.copy_(make(TOKENS, topk=TOPK))
        step.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        torch.cuda.synchronize()
        _clear(captured)
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_allocated() == before
        torch.cuda.synchronize()
        replayed = [tensor.clone() for tensor in _tensors(captured)]
        eager = list(_tensors(step.run(out_format=CHUNK32, **options)))
        assert all_same(tuple(replayed[2:]), tuple(eager[2:]))
        for left, right in zip(replayed[:2], eager[:2], strict=True):
            assert torch.equal(
                left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
            )


@pytest.mark.parametrize("make", [prefill_step, decode_step])
def test_capture_on_a_side_stream_holds_all_the_work(make: Callable[..., Step]) -> None:
    """BC-43, thu-ml/SageAttention#371: kernels on the legacy stream were missing from the graph."""
    step = make(6)
    expected = step.run()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step.run()
        graph.capture_begin()
        captured = step.run()
        graph.capture_end()
    torch.cuda.synchronize()
    _clear(captured)
    graph.replay()
    torch.cuda.synchronize()
    assert all_same(captured, expected)


@pytest.mark.parametrize("make", [prefill_step, decode_step])
def test_producers_and_consumers_on_a_side_stream(make: Callable[..., Step]) -> None:
    """BC-43: 200 times a slow producer, then attention, without waiting by hand.

    Then 500 times producer, attention and a consumer of its output, with random pauses.
    """
    step = make(6)
    wanted = step.q.clone()
    expected = step.run(out_format=CHUNK32)
    plain = step.run()[0]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    pauses = torch.randint(0, 200_000, (700,)).tolist()
    for number, pause in enumerate(pauses):
        step.q.zero_()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000 if number < 200 else pause)  # type: ignore[no-untyped-call]
            step.q.copy_(wanted)
            if number < 200:
                results = step.run(out_format=CHUNK32)
            else:
                doubled = step.run()[0] * 2
        torch.cuda.current_stream().wait_stream(side)
        if number < 200:
            torch.cuda.synchronize()
            assert all_same(results, expected)
        elif number % 25 == 0:
            assert torch.equal(doubled, plain * 2)
    torch.cuda.synchronize()
    assert torch.equal(doubled, plain * 2)


@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_200_runs_and_eight_page_placements_of_64_tokens(num_splits: int | None) -> None:
    """BC-48, 1CatAI/1Cat-vLLM#162: two writers of one element, results that varied by run."""
    records = cache_writers.draw_records(V4, 64)
    q = torch.randn(64, 4, 512, dtype=torch.bfloat16, device=CUDA)
    logical = torch.randint(0, 64, (64, 64))

    def run(cache: Tensor, slots: Tensor) -> tuple[Any, ...]:
        return tuple(
            mlacast.sparse_mla_decode(
                q,
                cache,
                slots,
                kv_format=mlacast.KvFormat.V4,
                sm_scale=SM_SCALE,
                attn_sink=torch.zeros(4, device=CUDA),
                num_splits=num_splits,
                out_format=mlacast.Mxfp8(),
                backend=steps.BACKEND,
            )
        )

    first: tuple[Any, ...] | None = None
    for placement in range(8):
        pages = torch.randperm(12)[:8]
        slots = (pages[:, None] * 8 + torch.arange(8)).flatten()
        filled = cache_writers.fill_cache(
            V4, records, num_pages=12, page_size=8, slots=slots.tolist()
        )
        cache, chosen = copy_storage(filled.cache), slots[logical].to(torch.int32).to(CUDA)
        for _ in range(200 if placement == 0 else 1):
            results = run(cache, chosen)
            first = first or results
            assert all_same(results, first)

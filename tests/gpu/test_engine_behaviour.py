"""What an engine relies on: determinism, buffers, graphs, streams, compilation, sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests.gpu import steps
from tests.gpu.steps import CUDA, Step, all_same, decode_step, prefill_step, same_bits

pytestmark = pytest.mark.usefixtures("each_backend")

CHUNK32 = mlacast.Mxfp8("chunk32")
BOTH = pytest.mark.parametrize("make", [prefill_step, decode_step])


@BOTH
def test_the_same_call_gives_the_same_bits(make: Any) -> None:
    step = make(40)
    first = step.run(out_format=CHUNK32)
    for _ in range(20):
        assert all_same(step.run(out_format=CHUNK32), first)


def test_prefill_rows_do_not_depend_on_the_others() -> None:
    step = prefill_step(40)
    together = step.run()
    for first, last in ((0, 1), (7, 8), (5, 23), (39, 40)):
        alone = step.rows(first, last).run()
        assert all_same(alone, tuple(part[first:last] for part in together))


def test_batch_invariant_decode_rows_do_not_depend_on_the_others() -> None:
    step = decode_step(40, topk=600)
    together = step.run(batch_invariant=True)
    for first, last in ((0, 1), (7, 8), (5, 23), (39, 40)):
        alone = step.rows(first, last).run(batch_invariant=True)
        assert all_same(alone, tuple(part[first:last] for part in together))


@BOTH
@pytest.mark.parametrize(
    "fmt",
    [mlacast.Bf16(), CHUNK32, mlacast.Fp8Group(128, "float32", "mn_major"), mlacast.Nvfp4(500.0)],
    ids=lambda fmt: fmt.key,
)
def test_a_provided_buffer_equals_an_allocated_one(make: Any, fmt: mlacast.OutFormat) -> None:
    step = make(5)
    groups = 8 if fmt.key == "bf16" else 2
    allocated = step.run(out_format=fmt, num_groups=groups)
    for start, total in ((0, 5), (3, 8), (2, 11)):
        buffer = mlacast.QuantizedTensor.empty(total, groups, 4096 // groups, fmt, CUDA)
        view = buffer[start : start + 5]
        given = step.run(out=view)
        assert given[0] is view
        assert torch.equal(view.dequantize(), allocated[0].dequantize())
        assert torch.equal(view.data.view(torch.uint8), allocated[0].data.view(torch.uint8))
        assert all_same(given[1:], allocated[1:])


def test_a_mixed_step_replays_in_one_graph_with_other_inputs() -> None:
    """BC-41: prefill and decode into one buffer, then the projection, captured with lengths 1."""
    prefill, decode = prefill_step(5), decode_step(3)
    prefill.lengths.fill_(1)
    decode.lengths.fill_(1)
    buffer = mlacast.QuantizedTensor.empty(8, 2, 2048, CHUNK32, CUDA)
    weight = torch.randn(2, 64, 2048, dtype=torch.bfloat16, device=CUDA)

    def step() -> tuple[Any, ...]:
        first = prefill.run(out=buffer[:5])
        second = decode.run(out=buffer[5:])
        return (*first[1:], second[1], mlacast.grouped_out_project(buffer, weight))

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for trial in range(4):
        prefill.copy_(prefill_step(5))
        decode.copy_(decode_step(3))
        if trial == 2:
            prefill.lengths.fill_(0)
            decode.lengths.fill_(150)
        buffer.data.view(torch.uint8).fill_(0x5A)
        before = torch.cuda.memory_allocated()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        replayed = [part.clone() for part in captured]
        data = buffer.data.view(torch.uint8).clone()
        eager = step()
        assert torch.equal(buffer.data.view(torch.uint8), data)
        assert all_same(tuple(replayed), eager)


def test_fullgraph_compile_with_changing_token_counts() -> None:
    table = prefill_step(1).options["rope"].cos_sin_cache

    def run(step: Step, q: Tensor, indices: Tensor, lengths: Tensor) -> Tensor:
        out, _, _ = mlacast.sparse_mla_prefill(
            q,
            step.pool,
            indices,
            topk_length=lengths,
            sm_scale=0.05,
            rope=mlacast.Rope(table, torch.zeros_like(lengths)),
            backend=steps.BACKEND,
        )
        assert isinstance(out, Tensor)
        return out + 1

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for tokens in (4, 7, 2):
        step = prefill_step(tokens)
        arguments = (step, step.q, step.indices, step.lengths)
        assert torch.equal(compiled(*arguments), run(*arguments))


@BOTH
def test_work_is_on_the_current_stream(make: Any) -> None:
    """BC-43: a slow producer writes the query on a side stream, and nobody waits by hand."""
    step = make(6)
    wanted = step.q.clone()
    expected = step.run(out_format=CHUNK32)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for _ in range(20):
        step.q.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            step.q.copy_(wanted)
            results = step.run(out_format=CHUNK32)
        torch.cuda.synchronize()
        assert all_same(results, expected)


@BOTH
def test_zero_tokens(make: Any) -> None:
    step = make(3).rows(0, 0)
    results = step.run()
    assert results[0].shape == (0, 8, 512)
    assert all(part.shape == (0, 8) and part.is_cuda for part in results[1:])
    assert step.run(out_format=CHUNK32)[0].num_tokens == 0
    torch.cuda.synchronize()


@BOTH
def test_unselected_memory_may_hold_nan(make: Any) -> None:
    step = make(6)
    step.indices.remainder_(5)
    clean = step.run()
    poisoned = step.pool.clone() if step.pool.is_contiguous() else step.pool
    if poisoned.dtype == torch.uint8:
        # 0xFF is NaN as e4m3, ue8m0 and bf16; the second page is not selected at all.
        poisoned[1] = 0xFF
    else:
        poisoned[5:] = float("nan")
    step.pool = poisoned
    assert not clean[0].isnan().any()
    assert all_same(step.run(), clean)


@pytest.mark.parametrize("num_splits", [None, 1, 2])
def test_more_tokens_than_a_grid_axis_of_65535(num_splits: int | None) -> None:
    """One key a row has the weight one: outputs are copies of rows. None is prefill."""
    tokens = 70_001
    kv = torch.randn(640, 512, dtype=torch.bfloat16, device=CUDA)
    indices = (torch.arange(tokens, dtype=torch.int32, device=CUDA) * 7 % 640)[:, None]
    q = torch.randn(tokens, 1, 512, dtype=torch.bfloat16, device=CUDA)
    if num_splits is None:
        out = mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=0.05, backend=steps.BACKEND)[0]
    else:
        out = mlacast.sparse_mla_decode(
            q,
            kv.view(10, 64, 512),
            indices,
            kv_format=mlacast.KvFormat.BF16,
            sm_scale=0.05,
            num_splits=num_splits,
            backend=steps.BACKEND,
        )[0]
    assert same_bits(out, kv[indices[:, 0].long()][:, None])


def test_far_more_splits_than_columns() -> None:
    """More than a grid's second axis holds; the surplus splits would be empty."""
    step = decode_step(1)
    few, many = step.run(num_splits=8), step.run(num_splits=70_000)
    # The scores are the same. At most 150 weights and their sums are rounded at random, 4 *
    # sqrt(150) * 2**-24 = 3e-6 in each of the two; their exponentials and the logarithm to 2**-22.
    assert torch.allclose(few[1], many[1], rtol=2.0**-20, atol=1e-5)
    # Weights relative to another maximum are rounded to bfloat16 anew, outputs are too: each by at
    # most 2**-8 / sqrt(3) in the mean square, which moves a sum of values that have nothing to do
    # with each other by as much of itself. Twice two of them are 2**-7 / sqrt(3).
    error = (few[0].double() - many[0].double()).norm(dim=-1)
    assert bool((error <= 2.0**-7 * few[0].double().norm(dim=-1)).all())


@BOTH
def test_views_at_any_alignment(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, rows or pages, table and output one element past an aligned address.

    The portable kernel serves them, whichever backend is asked.
    """
    step = make(6)
    step.options.update(q_norm_eps=None, q_order="head")
    with monkeypatch.context() as patch:
        patch.setattr(steps, "BACKEND", "triton")
        expected = step.run()
    queries = torch.zeros(6, 8, 516, dtype=torch.bfloat16, device=CUDA)[:, :, 1:513]
    queries.copy_(step.q)
    step.q = queries
    pool = step.pool
    span = (pool.shape[0] - 1) * pool.stride(0) + pool[0].numel()
    flat = torch.zeros(span + 1, dtype=pool.dtype, device=CUDA)
    moved = flat.as_strided(pool.shape, pool.stride(), 1)
    moved.copy_(pool)
    step.pool = moved
    rope = step.options["rope"]
    table = torch.zeros(64, 67, device=CUDA)[:, 1:65]
    table.copy_(rope.cos_sin_cache)
    step.options["rope"] = mlacast.Rope(table, rope.positions)
    out = torch.zeros(6, 8 * 512 + 3, dtype=torch.bfloat16, device=CUDA)[:, 1:-2].view(6, 8, 512)
    assert all_same(step.run(out=out)[1:], expected[1:])
    assert torch.equal(out, expected[0])

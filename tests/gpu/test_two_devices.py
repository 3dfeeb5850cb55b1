"""Tensors on the second GPU while the first is current: the device guard of every launch.

BC-45, deepseek-ai/FlashMLA#158: properties of the wrong device, launches on the wrong device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests.format_cases import storage_bytes
from tests.gpu.steps import Step, decode_step, prefill_step

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two GPUs: torch.cuda.device_count() < 2"
    ),
    pytest.mark.usefixtures("each_backend"),
]
OTHER = "cuda:1"
MXFP8 = mlacast.Mxfp8()


def _to_other(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(OTHER)
    if isinstance(value, mlacast.Rope):
        table, positions = value.cos_sin_cache.to(OTHER), value.positions.to(OTHER)
        return mlacast.Rope(table, positions, value.pairing)
    return value


def _step_on_other(step: Step) -> Step:
    options = {name: _to_other(value) for name, value in step.options.items()}
    flat = storage_bytes(step.pool).to(OTHER).view(step.pool.dtype)
    pool = flat.as_strided(step.pool.shape, step.pool.stride(), step.pool.storage_offset())
    q, indices, lengths = step.q.to(OTHER), step.indices.to(OTHER), step.lengths.to(OTHER)
    return Step(q, pool, indices, lengths, options)


def _bytes(result: Any) -> list[Tensor]:
    """Every tensor of a result as bytes on the CPU."""
    if isinstance(result, mlacast.QuantizedTensor):
        return _bytes([result.data, result.sf])
    if isinstance(result, Tensor):
        return [result.contiguous().view(torch.uint8).cpu()]
    return [part for item in result if item is not None for part in _bytes(item)]


def _assert_same(first: Callable[[], Any], other: Callable[[], Any]) -> None:
    """The calls give the same bytes, three times over, and leave the first device current.

    From the second call on the short way of a known signature is taken, on each device in turn.
    """
    torch.cuda.set_device(0)
    for _ in range(3):
        here = _bytes(first())
        there = _bytes(other())
        assert torch.cuda.current_device() == 0
        assert here and all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("num_splits", [None, 3])
def test_decode(num_splits: int | None) -> None:
    step = decode_step(5)
    other = _step_on_other(step)
    options = {"out_format": MXFP8, "num_splits": num_splits, "num_groups": 2}
    _assert_same(lambda: step.run(**options), lambda: other.run(**options))


def test_prefill() -> None:
    step = prefill_step(5)
    other = _step_on_other(step)
    options = {"out_format": MXFP8, "num_groups": 2}
    _assert_same(lambda: step.run(**options), lambda: other.run(**options))


def test_outputs_are_on_the_device_of_the_inputs() -> None:
    out, _, lse = _step_on_other(prefill_step(3)).run()
    assert (out.device, lse.device) == (torch.device(OTHER), torch.device(OTHER))


def test_work_is_on_the_current_stream_of_the_device_of_the_inputs() -> None:
    """A slow producer of the query runs on a side stream of the second GPU."""
    step = _step_on_other(prefill_step(6))
    wanted = step.q.clone()
    expected = _bytes(step.run(out_format=MXFP8))
    side = torch.cuda.Stream(OTHER)  # type: ignore[no-untyped-call]
    for _ in range(5):
        step.q.zero_()
        torch.cuda.synchronize(OTHER)
        with torch.cuda.stream(side):
            torch.cuda.set_device(OTHER)
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            step.q.copy_(wanted)
            torch.cuda.set_device(0)
            result = step.run(out_format=MXFP8)
        side.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(_bytes(result), expected, strict=True))


def test_50_calls_in_turn() -> None:
    first = decode_step(5)
    steps = (first, _step_on_other(first))
    torch.cuda.set_device(0)
    expected = _bytes(first.run(out_format=MXFP8))
    for _ in range(50):
        for step in steps:
            found = _bytes(step.run(out_format=MXFP8))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("make", [prefill_step, decode_step])
def test_a_graph_of_the_other_device(make: Callable[..., Step]) -> None:
    """Captured and replayed on the second GPU's stream while the first GPU is current."""
    step = _step_on_other(make(6))
    torch.cuda.set_device(0)
    expected = _bytes(step.run())
    side = torch.cuda.Stream(OTHER)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(OTHER))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        step.run()
        graph.capture_begin()
        torch.cuda.set_device(0)
        captured = step.run()
        assert torch.cuda.current_device() == 0
        torch.cuda.set_device(OTHER)
        graph.capture_end()
        for part in captured:
            part.fill_(7)
        graph.replay()
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(_bytes(captured), expected, strict=True))


def test_a_call_on_two_devices_is_an_error() -> None:
    step = prefill_step(3)
    step.indices = step.indices.to(OTHER)
    with pytest.raises(ValueError, match="indices"):
        step.run()


def test_operations_around_the_attention() -> None:
    torch.manual_seed(0)
    latent = torch.randn(6, 512, dtype=torch.bfloat16)
    slots = torch.tensor([3, 0, -1, 130, 64, 7])
    kv_format = mlacast.KvFormat.from_name("V41")
    parts = torch.randn(2, 6, 4, 128, dtype=torch.bfloat16)
    lses = torch.randn(2, 4, 6)
    q = torch.randn(6, 4, 192, dtype=torch.bfloat16)
    up = torch.randn(4, 512, 128, dtype=torch.bfloat16)
    lengths = torch.tensor([0, 2, 6], dtype=torch.int32)

    def run(device: str) -> list[Any]:
        cache = kv_format.allocate(3, 64, device=device)
        cache.view(torch.uint8).zero_()
        mlacast.kv_cache_append(latent.to(device), slots.to(device), cache, kv_format)
        gathered = mlacast.kv_cache_gather(cache, slots.to(device).to(torch.int32), kv_format)
        merged = mlacast.merge_attention_states(
            list(parts.to(device)), list(lses.to(device)), out_format=MXFP8
        )
        values = mlacast.v_up_project(latent.to(device)[:, None].expand(6, 4, 512), up.to(device))
        bounds = lengths.to(device)
        rows = q.to(device)
        dense = mlacast.dense_mla_prefill(
            rows,
            rows,
            rows[..., :128],
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=4,
            max_seqlen_k=4,
        )
        return [cache, gathered, merged, values, dense]

    _assert_same(lambda: run("cuda:0"), lambda: run(OTHER))

"""decode_metadata on the device: the contract's vectors, one launch, no waiting, reuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlacast.compat import mate
from mlacast.ops.decode_metadata import decode_metadata
from tests.compat.mate.calls import draw_call
from tests.gpu.cache_steps import kernels_of, replayed
from tests.gpu.steps import CUDA, all_same
from tests.gpu.test_fp8_decode import to_gpu
from tests.schedules import VECTORS, Vector, walk


def assert_schedule(
    plan: tuple[Tensor, Tensor], lengths: list[int], num_parts: int, topk: int | None, overhead: int
) -> None:
    """Compare with the walk as a loop; the last three numbers of a row are zeros."""
    parts, num_splits = (part.cpu() for part in plan)
    rows, expected = walk(lengths, num_parts, topk, overhead)
    assert [tuple(row) for row in parts[:, :5].tolist()] == rows
    assert not parts[:, 5:].any()
    assert num_splits.tolist() == expected


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector.num_parts}_parts")
def test_the_vectors_of_the_contract(vector: Vector) -> None:
    lengths = torch.tensor(vector.lengths, dtype=torch.int32, device=CUDA)
    options: dict[str, Any] = {"num_parts": vector.num_parts, "overhead": vector.overhead}
    parts, num_splits = decode_metadata(lengths, **options, backend="triton")
    rows = [tuple(row) for row in parts[:, :5].tolist()]
    assert rows[: len(vector.rows)] == list(vector.rows)
    # Parts without work: the first request is behind the last.
    batch = len(vector.lengths)
    assert rows[len(vector.rows) :] == [(batch, 0, batch - 1, 0, 0)] * (
        len(rows) - len(vector.rows)
    )
    assert num_splits.tolist() == list(vector.num_splits)


@pytest.mark.parametrize("topk", [None, 0, 64, 2048])
@pytest.mark.parametrize(
    ("batch", "num_parts"),
    [(0, 3), (1, 1), (64, 132), (65, 7), (1024, 132), (1025, 66), (8192, 132)],
)
def test_random_lengths(batch: int, num_parts: int, topk: int | None) -> None:
    """Every size of a program, from one request to as many as it holds; lengths lie apart."""
    wide = torch.randint(-3, 5000, (batch, 2), dtype=torch.int32)
    lengths = wide.to(CUDA)[:, 1]
    plan = decode_metadata(lengths, num_parts=num_parts, topk=topk, backend="triton")
    assert_schedule(plan, wide[:, 1].tolist(), num_parts, topk, 5)


def test_lengths_near_the_end_of_int32() -> None:
    lengths = [2**31 - 1, 0, 2**31 - 1]
    plan = decode_metadata(
        torch.tensor(lengths, dtype=torch.int32, device=CUDA), num_parts=5, backend="triton"
    )
    assert_schedule(plan, lengths, 5, None, 5)


def test_nothing_waits_for_the_device() -> None:
    call = draw_call((64, 10, 0), topk=64, heads=16)
    arguments = to_gpu(call.arguments)
    query, lengths = arguments["query"], arguments["seq_lens"]

    def step() -> object:
        metadata = mate.get_batch_decode_metadata_mla(query, lengths, 64)
        return mate.sparse_mla_fp8_decode(**arguments, metadata=metadata)

    # The first calls compile, and the later ones take another way through the operators.
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode_metadata(lengths, num_parts=132, topk=64)
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_launch() -> None:
    lengths = torch.randint(0, 3000, (300,), dtype=torch.int32, device=CUDA)
    names = kernels_of(lambda: decode_metadata(lengths, num_parts=132, topk=2048))
    assert len(names) == 1 and "decode_metadata" in names[0], names


def test_a_graph_replays_with_other_lengths() -> None:
    lengths = torch.full((100,), 64, dtype=torch.int32, device=CUDA)
    plans: list[tuple[Tensor, Tensor]] = []
    graph = replayed(lambda: plans.append(decode_metadata(lengths, num_parts=20, topk=2048)))
    for bound in (1, 700, 5000):
        changed = torch.randint(0, bound, (100,), dtype=torch.int32)
        lengths.copy_(changed)
        for part in plans[-1]:
            part.fill_(-7)
        graph.replay()
        assert_schedule(plans[-1], changed.tolist(), 20, 2048, 5)


@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (128, 2)])
def test_layers_share_metadata_and_get_the_bits_they_get_without(heads: int, q_len: int) -> None:
    """Layers differ in query, cache, ids and scales; lengths are those of the step."""
    lens = (2048, 1, 0, 700, 64, 9000)
    layers = [
        to_gpu(draw_call(lens, q_len=q_len, heads=heads, topk=2048, pages=9).arguments)
        for _ in range(3)
    ]
    layers[2]["bmm1_scale"] = 0.03
    metadata = mate.get_batch_decode_metadata_mla(layers[0]["query"], layers[0]["seq_lens"], 2048)
    kept = metadata.scheduler_metadata.clone(), metadata.num_splits.clone()
    for arguments in layers:
        without: Any = mate.sparse_mla_fp8_decode(**arguments, return_lse=True)
        shared: Any = mate.sparse_mla_fp8_decode(**arguments, return_lse=True, metadata=metadata)
        assert all_same(shared, without)
    assert torch.equal(metadata.scheduler_metadata, kept[0])
    assert torch.equal(metadata.num_splits, kept[1])

"""The portable scheduler kernel, interpreted, against the walk as a loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlacast.kernels.triton.decode_metadata import launch_decode_metadata
from tests.schedules import VECTORS, Vector, walk


def _plan(
    lengths: Tensor, num_parts: int, topk: int | None, overhead: int = 5
) -> tuple[Tensor, Tensor]:
    parts = torch.full((num_parts, 8), -7, dtype=torch.int32)
    num_splits = torch.full((lengths.shape[0] + 1,), -7, dtype=torch.int32)
    launch_decode_metadata(
        lengths, topk=topk, overhead=overhead, parts=parts, num_splits=num_splits
    )
    assert not parts[:, 5:].any()
    return parts, num_splits


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector.num_parts}_parts")
def test_the_vectors_of_the_contract(vector: Vector) -> None:
    lengths = torch.tensor(vector.lengths, dtype=torch.int32)
    parts, num_splits = _plan(lengths, vector.num_parts, None, vector.overhead)
    rows = [tuple(row) for row in parts[:, :5].tolist()]
    assert rows[: len(vector.rows)] == list(vector.rows)
    assert num_splits.tolist() == list(vector.num_splits)


@pytest.mark.parametrize("topk", [None, 0, 640])
@pytest.mark.parametrize(
    ("batch", "num_parts"), [(0, 2), (1, 1), (7, 132), (64, 8), (65, 3), (1030, 20)]
)
def test_random_lengths(batch: int, num_parts: int, topk: int | None) -> None:
    wide = torch.randint(-3, 3000, (batch, 2), dtype=torch.int32)
    lengths = wide[:, 1]
    parts, num_splits = _plan(lengths, num_parts, topk)
    rows, expected = walk(lengths.tolist(), num_parts, topk, 5)
    assert [tuple(row) for row in parts[:, :5].tolist()] == rows
    assert num_splits.tolist() == expected


def test_lengths_near_the_end_of_int32() -> None:
    lengths = torch.tensor([2**31 - 1, 0, 2**31 - 1], dtype=torch.int32)
    parts, num_splits = _plan(lengths, 5, None)
    rows, expected = walk(lengths.tolist(), 5, None, 5)
    assert [tuple(row) for row in parts[:, :5].tolist()] == rows
    assert num_splits.tolist() == expected

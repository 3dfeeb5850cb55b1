"""decode_metadata: the contract's vectors, the walk as a loop, what every schedule holds."""

from __future__ import annotations

import pytest
import torch

from mlacast.ops.decode_metadata import decode_metadata
from tests.schedules import VECTORS, Vector, walk


def _rows(parts: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in parts[:, :5].tolist()]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector.num_parts}_parts")
def test_the_vectors_of_the_contract(vector: Vector, backend: str) -> None:
    lengths = torch.tensor(vector.lengths, dtype=torch.int32)
    parts, num_splits = decode_metadata(
        lengths, num_parts=vector.num_parts, overhead=vector.overhead, backend=backend
    )
    working, batch = len(vector.rows), len(vector.lengths)
    assert _rows(parts)[:working] == list(vector.rows)
    idle = (batch, 0, batch - 1, 0, 0)
    assert _rows(parts)[working:] == [idle] * (vector.num_parts - working)
    assert num_splits.tolist() == list(vector.num_splits)
    assert not parts[:, 5:].any()
    assert parts.dtype == num_splits.dtype == torch.int32
    assert parts.is_contiguous() and parts.shape[1] == 8


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector.num_parts}_parts")
def test_the_loop_of_the_tests_knows_the_vectors(vector: Vector) -> None:
    rows, num_splits = walk(list(vector.lengths), vector.num_parts, None, vector.overhead)
    assert tuple(rows[: len(vector.rows)]) == vector.rows
    assert tuple(num_splits) == vector.num_splits


@pytest.mark.parametrize("topk", [None, 64, 640, 2048])
@pytest.mark.parametrize("num_parts", [1, 3, 17, 132])
@pytest.mark.parametrize("batch", [1, 2, 7, 60])
def test_random_lengths(batch: int, num_parts: int, topk: int | None, backend: str) -> None:
    lengths = torch.randint(-3, 3000, (batch,), dtype=torch.int32)
    lengths[torch.rand(batch) < 0.2] = 0
    parts, num_splits = decode_metadata(lengths, num_parts=num_parts, topk=topk, backend=backend)
    rows, expected = walk(lengths.tolist(), num_parts, topk, 5)
    assert _rows(parts) == rows
    assert num_splits.tolist() == expected
    # The bound on partial results that buffers are sized by.
    assert int(num_splits[-1]) <= batch + num_parts - 1


def test_no_request() -> None:
    parts, num_splits = decode_metadata(torch.empty(0, dtype=torch.int32), num_parts=2)
    assert _rows(parts) == [(0, 0, -1, 0, 0)] * 2
    assert num_splits.tolist() == [0]


def test_strided_lengths() -> None:
    wide = torch.tensor([[640, 9], [64, 9]], dtype=torch.int32)
    plain = decode_metadata(wide[:, 0].contiguous(), num_parts=4)
    strided = decode_metadata(wide[:, 0], num_parts=4)
    assert torch.equal(plain[0], strided[0]) and torch.equal(plain[1], strided[1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lengths": [1]}, TypeError, "lengths must be a torch.Tensor, got list"),
        ({"lengths": torch.zeros(2)}, ValueError, "lengths must have dtype int32, got float32"),
        (
            {"lengths": torch.zeros(2, 1, dtype=torch.int32)},
            ValueError,
            r"lengths must have shape \[B\], got \[2, 1\]",
        ),
        ({"num_parts": 0}, ValueError, "num_parts must be at least 1, got 0"),
        ({"num_parts": 1.0}, TypeError, "num_parts must be an int, got float"),
        ({"overhead": -1}, ValueError, "overhead must be at least 0, got -1"),
        ({"num_parts": 2**31}, ValueError, "num_parts must be at most 2147483647"),
        ({"overhead": 10**30}, ValueError, "overhead must be at most 2147483647"),
        ({"topk": 2**63}, ValueError, "topk must be at most 2147483647"),
        ({"topk": -64}, ValueError, "topk must be at least 0, got -64"),
        ({"topk": "64"}, TypeError, "topk must be an int or None, got str"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
    ],
)
def test_wrong_calls(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    good: dict[str, object] = {"lengths": torch.ones(2, dtype=torch.int32), "num_parts": 2}
    call = {**good, **arguments}
    with pytest.raises(error, match=f"decode_metadata: {message}"):
        decode_metadata(call.pop("lengths"), **call)  # type: ignore[arg-type]


def test_lengths_outside_of_topk_are_found_on_request(validate: None) -> None:
    lengths = torch.tensor([65, 3], dtype=torch.int32)
    decode_metadata(lengths, num_parts=2)
    with pytest.raises(ValueError, match=r"lengths must have values in \[0, 64\]"):
        decode_metadata(lengths, num_parts=2, topk=64)

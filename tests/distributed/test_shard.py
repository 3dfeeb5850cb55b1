"""KvShard against counting positions one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlacast.distributed import KvShard
from tests.distributed.sharded_steps import positions_of

WORLDS = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 2), (4, 1), (8, 16)]
LENGTH = 300


@pytest.mark.parametrize(("world", "interleave"), WORLDS)
def test_every_position_has_one_owner_and_the_next_free_index(world: int, interleave: int) -> None:
    found: dict[int, tuple[int, int]] = {}
    for rank in range(world):
        shard = KvShard(rank, world, interleave)
        for index, position in enumerate(positions_of(shard, LENGTH)):
            found[position] = (shard.owner(position), shard.local_index(position))
            assert found[position] == (rank, index)
    assert sorted(found) == list(range(LENGTH))


@pytest.mark.parametrize(("world", "interleave"), WORLDS)
def test_local_lengths_count_the_positions_before(world: int, interleave: int) -> None:
    for rank in range(world):
        shard = KvShard(rank, world, interleave)
        wanted = [len(positions_of(shard, length)) for length in range(LENGTH)]
        assert [shard.local_length(length) for length in range(LENGTH)] == wanted


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tensors_give_what_numbers_give(dtype: torch.dtype) -> None:
    numbers = torch.arange(LENGTH, dtype=dtype).view(3, 100)
    for rank in range(3):
        shard = KvShard(rank, 3, 5)
        for name in ("owner", "local_index", "local_length"):
            function = getattr(shard, name)
            found = function(numbers)
            assert found.dtype == dtype
            assert found.flatten().tolist() == [function(number) for number in range(LENGTH)]


def test_by_hand() -> None:
    """Two ranks, three positions together: 0 1 2 | 3 4 5 | 6 7 8 | 9."""
    second = KvShard(1, 2, 3)
    assert [second.owner(position) for position in (2, 3, 5, 6, 9)] == [0, 1, 1, 0, 1]
    assert [second.local_index(position) for position in (3, 5, 9)] == [0, 2, 3]
    assert [second.local_length(length) for length in (3, 4, 6, 9, 10)] == [0, 1, 3, 3, 4]
    assert second.on_rank(0) == KvShard(0, 2, 3)


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ({"rank": -1}, ValueError, "rank must be at least 0, got -1"),
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"interleave": 0}, ValueError, "interleave must be at least 1, got 0"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be below world_size=2, got 2"),
        ({"interleave": 1.0}, TypeError, "interleave must be an int, got float"),
    ],
)
def test_bad_numbers(numbers: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        KvShard(**numbers)

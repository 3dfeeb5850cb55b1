"""Slots of a rank: where new tokens go, and which selected ones are here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.distributed import KvShard, local_indices, local_slots
from tests.distributed.sharded_steps import positions_of

PAGE = 4
TABLE = torch.tensor([[7, 2, 5], [3, -1, 1]], dtype=torch.int32)


def slot_by_counting(shard: KvShard, request: int, position: int) -> int:
    """-1 for what is kept elsewhere, has no page, or has one that does not exist."""
    kept = positions_of(shard, max(position, 0) + 1)
    if position < 0 or not kept or kept[-1] != position:
        return -1
    entry, offset = divmod(len(kept) - 1, PAGE)
    if entry >= TABLE.shape[1] or TABLE[request, entry] < 0:
        return -1
    return int(TABLE[request, entry]) * PAGE + offset


@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (2, 3), (3, 4)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_of_new_tokens(world: int, interleave: int, dtype: torch.dtype) -> None:
    positions = torch.arange(-1, 40, dtype=dtype).repeat(2)
    requests = torch.tensor([0, 1], dtype=dtype).repeat_interleave(41)
    for rank in range(world):
        shard = KvShard(rank, world, interleave)
        slots = local_slots(positions, requests, TABLE, PAGE, shard)
        assert slots.dtype == torch.int64
        rows = zip(requests.tolist(), positions.tolist(), strict=True)
        assert slots.tolist() == [slot_by_counting(shard, *row) for row in rows]


def test_ranks_append_every_token_once() -> None:
    latents = torch.randn(11, 576).bfloat16()
    positions, requests = torch.arange(11), torch.zeros(11, dtype=torch.int64)
    for rank in range(2):
        shard = KvShard(rank, 2, 2)
        cache = torch.zeros(9, PAGE, 576, dtype=torch.bfloat16)
        slots = local_slots(positions, requests, TABLE, PAGE, shard)
        mlacast.kv_cache_append(latents, slots, cache, mlacast.KvFormat.BF16)
        kept = positions_of(shard, 11)
        in_order = cache[TABLE[0].long()].flatten(0, 1)[: len(kept)]
        assert torch.equal(in_order, latents[kept])
        assert int(cache.any(dim=-1).sum()) == len(kept)


def test_slots_past_two_billion() -> None:
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    assert local_slots(zero + 3, zero, table, 64, KvShard()).tolist() == [(2**31 - 1) * 64 + 3]


def test_selections_are_packed_in_their_order() -> None:
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(-2, 24, (6, 9), generator=generator, dtype=torch.int32)
    positions[0] = -1
    requests = torch.tensor([0, 1, 0, 0, 1, 0])
    lengths = torch.tensor([9, 9, 9, 0, 4, 12], dtype=torch.int32)
    for given in (None, lengths):
        for rank in range(2):
            shard = KvShard(rank, 2, 2)
            indices, counts = local_indices(positions, requests, TABLE, PAGE, shard, given)
            assert indices.dtype == counts.dtype == torch.int32
            assert indices.is_contiguous()
            for row in range(6):
                columns = 9 if given is None else int(given[row])
                slots = [
                    slot_by_counting(shard, int(requests[row]), position)
                    for position in positions[row, :columns].tolist()
                ]
                wanted = [slot for slot in slots if slot >= 0]
                assert counts[row] == len(wanted)
                assert indices[row].tolist() == wanted + [-1] * (9 - len(wanted))


def test_requests_and_pages_outside_the_table_give_no_slot() -> None:
    """BC-22, vllm-project/vllm#55637: a mapper read past the block table for stale request rows.

    A table of 2 x 3, requests [0, 1, 2, -1] and positions up to ten pages on.
    """
    table = torch.tensor([[7, 2, 5], [3, 0, 1]], dtype=torch.int32)
    positions = torch.arange(0, 10 * PAGE, 3, dtype=torch.int32).expand(4, -1)
    for dtype in (torch.int32, torch.int64):
        requests = torch.tensor([0, 1, 2, -1], dtype=dtype)
        indices, counts = local_indices(positions, requests, table, PAGE, KvShard())
        for request, row, count in zip([0, 1, 2, -1], indices.tolist(), counts, strict=True):
            inside = range(0, 3 * PAGE, 3) if request in (0, 1) else ()
            wanted = [int(table[request, at // PAGE]) * PAGE + at % PAGE for at in inside]
            assert count == len(wanted)
            assert row == wanted + [-1] * (len(row) - len(wanted))
        slots = local_slots(positions, requests, table, PAGE, KvShard())
        assert bool((slots[2:] == -1).all()) and bool((slots[:2, :4] >= 0).all())
        extremes = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32).to(dtype)
        nowhere = local_slots(torch.zeros(2).to(dtype), extremes, table, PAGE, KvShard())
        assert nowhere.tolist() == [-1, -1]


def test_a_table_without_requests() -> None:
    none = torch.zeros(0, 3, dtype=torch.int32)
    padding = torch.tensor([-1], dtype=torch.int32)
    assert local_slots(padding + 1, padding, none, PAGE, KvShard()).tolist() == [-1]


def test_the_first_selection_past_the_length_does_not_count() -> None:
    positions = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]], dtype=torch.int32)
    lengths = torch.tensor([0, 2], dtype=torch.int32)
    requests = torch.zeros(2, dtype=torch.int32)
    indices, counts = local_indices(positions, requests, TABLE, PAGE, KvShard(), lengths)
    assert counts.tolist() == [0, 2]
    assert indices.tolist() == [[-1] * 4, [2 * PAGE, 2 * PAGE + 1, -1, -1]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_selected(shape: tuple[int, int]) -> None:
    positions = torch.zeros(shape, dtype=torch.int32)
    requests = torch.zeros(shape[0], dtype=torch.int32)
    indices, counts = local_indices(positions, requests, TABLE, PAGE, KvShard(1, 2))
    assert indices.shape == shape
    assert counts.tolist() == [0] * shape[0]


def test_requests_without_pages() -> None:
    none = torch.zeros(1, 0, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    assert local_slots(zero, zero, none, PAGE, KvShard()).tolist() == [-1]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"positions": [1]}, TypeError, "local_slots: positions must be a torch.Tensor"),
        ({"positions": torch.zeros(2)}, ValueError, "positions must have dtype int32 or int64"),
        ({"requests": torch.zeros(3).int()}, ValueError, "requests must have shape .n. with n=2"),
        ({"block_table": TABLE.long()}, ValueError, "block_table must have dtype int32"),
        ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
        ({"page_size": 4.0}, TypeError, "page_size must be an int"),
        ({"shard": (0, 2)}, TypeError, "shard must be a mlacast.distributed.KvShard"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    two: Tensor = torch.zeros(2, dtype=torch.int32)
    good = {
        "positions": two,
        "requests": two,
        "block_table": TABLE,
        "page_size": PAGE,
        "shard": KvShard(),
    }
    with pytest.raises(error, match=message):
        local_slots(**{**good, **changes})


def test_a_length_for_each_row() -> None:
    positions, requests = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    short = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="topk_length must have shape .n. with n=2"):
        local_indices(positions, requests, TABLE, PAGE, KvShard(), short)

"""Slots of a rank's own cache, from positions in a request. Nothing waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlacast.distributed.shard import KvShard
from mlacast.errors import check_tensor, check_type, fail

_INTEGERS = (torch.int32, torch.int64)


def local_slots(
    positions: Tensor, requests: Tensor, block_table: Tensor, page_size: int, shard: KvShard
) -> Tensor:
    """Return where this rank keeps tokens, for `kv_cache_append` and `kv_cache_gather`.

    Args:
        positions: [n] or [n, k] int32 or int64: positions of tokens in their request.
        requests: [n] int32 or int64: the row of ``block_table`` for each row of ``positions``.
            Rows outside the table, like the -1 of graph padding, keep nothing and are not read.
        block_table: [B, pages] int32: pages of each request in the cache of this rank, which hold
            the tokens that it keeps, one behind the other.
        page_size: Tokens of a page.
        shard: What this rank keeps.

    Returns:
        int64 like ``positions``: ``page * page_size + offset``, or -1 for tokens that other ranks
        keep, negative positions, positions past the pages of the request, and requests outside the
        table. No tokens give none.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype or device breaks the contract.
    """
    return _slots("local_slots", positions, requests, block_table, page_size, shard)


def local_indices(
    positions: Tensor,
    requests: Tensor,
    block_table: Tensor,
    page_size: int,
    shard: KvShard,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn selected positions into what sparse attention of this rank takes.

    The selections that this rank keeps come first, in their order, so that the ranks divide the
    work among them.

    Args:
        positions: [n, topk] int32 or int64: positions selected for each query token. Negative ones
            do not count.
        requests: [n] int32 or int64: request of each query token. Nothing counts for one outside
            the table.
        block_table: As in `local_slots`.
        page_size: Tokens of a page.
        shard: What this rank keeps.
        topk_length: [n] int32 or None: entries of each row that count.

    Returns:
        indices: [n, topk] int32 slots; -1 behind those that count.
        topk_length: [n] int32, how many count.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype or device breaks the contract.
    """
    op = "local_indices"
    sizes: dict[str, Any] = {}
    check_tensor(op, "positions", positions, "n topk", sizes, dtype=_INTEGERS)
    slots = _slots(op, positions, requests, block_table, page_size, shard)
    counts = slots >= 0
    if topk_length is not None:
        check_tensor(
            op,
            "topk_length",
            topk_length,
            "n",
            sizes,
            dtype=torch.int32,
            device=positions.device,
        )
        columns = torch.arange(positions.shape[1], device=positions.device)
        counts &= columns < topk_length[:, None]
    places = counts.cumsum(1) - 1
    # What does not count goes to a column of its own, which is cut off.
    places = torch.where(counts, places, positions.shape[1])
    packed = torch.full(
        (positions.shape[0], positions.shape[1] + 1),
        -1,
        dtype=torch.int32,
        device=positions.device,
    )
    packed.scatter_(1, places, torch.where(counts, slots, -1).to(torch.int32))
    return packed[:, :-1].contiguous(), counts.sum(1, dtype=torch.int32)


def _slots(
    op: str,
    positions: Tensor,
    requests: Tensor,
    block_table: Tensor,
    page_size: int,
    shard: KvShard,
) -> Tensor:
    sizes: dict[str, Any] = {}
    check_tensor(op, "positions", positions, ("n", "n k"), sizes, dtype=_INTEGERS)
    device = positions.device
    check_tensor(op, "requests", requests, "n", sizes, dtype=_INTEGERS, device=device)
    check_tensor(op, "block_table", block_table, "B pages", sizes, dtype=torch.int32, device=device)
    check_type(op, "page_size", page_size, int, "an int")
    if page_size < 1:
        fail(op, "page_size", "be at least 1", page_size)
    check_type(op, "shard", shard, KvShard, "a mlacast.distributed.KvShard")
    num_requests, pages = block_table.shape
    if positions.numel() == 0 or pages == 0 or num_requests == 0:
        return torch.full_like(positions, -1, dtype=torch.int64)
    wide = positions.to(torch.int64)
    index = shard.local_index(wide)
    entry = index // page_size
    rows = requests.to(torch.int64).view(-1, *[1] * (positions.dim() - 1))
    known = (rows >= 0) & (rows < num_requests)
    here = known & (wide >= 0) & (shard.owner(wide) == shard.rank) & (entry < pages)
    page = block_table[rows.clamp(0, num_requests - 1), entry.clamp(0, pages - 1)].to(torch.int64)
    return torch.where(here & (page >= 0), page * page_size + index % page_size, -1)

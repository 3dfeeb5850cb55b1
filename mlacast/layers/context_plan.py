"""The launches of the rows that prefill, planned on the host once for all layers of a step.

Rows of requests with cached context are attended twice: to the new tokens, and to the context,
which is up-projected in chunks of a bounded number of tokens. Rows of requests without go to the
output at once. How the context of a request is cut depends on its length alone, so a row has the
same bits whatever else is in the batch. Where a cache is spread over ranks, all of them make the
same plan, and each has its own slots in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from mlacast.distributed.shard import KvShard


@dataclass(frozen=True)
class Piece:
    """Cached tokens ``first`` to ``first + length`` of a request; the last one ends it."""

    request: int
    first: int
    length: int
    is_last: bool


@dataclass(frozen=True, eq=False)
class ContextChunk:
    """Attention of the rows of consecutive requests to up to a workspace of their cached tokens.

    Attributes:
        start: First row, counted from the first that prefills.
        stop: Row after the last.
        begun_stop: Row after the first request if earlier chunks hold a part of its context, else
            ``start``.
        is_last: Whether no later chunk has more context of these rows; if False they are of one
            request.
        cu_seqlens_q: [requests + 1] int32 from 0 to stop - start.
        cu_seqlens_k: [requests + 1] int32: the cached tokens of each request in this chunk.
        max_seqlen_q: Most rows of a request.
        max_seqlen_k: Most cached tokens of a request.
        slots: int64: slots of those cached tokens that this rank keeps, and -1 up to the most that
            any rank keeps. On one rank [cu_seqlens_k[-1]], all of them.
        order: [cu_seqlens_k[-1]] int64: where each cached token stands among the rows of all ranks,
            one rank behind the other. None on one rank.
    """

    start: int
    stop: int
    begun_stop: int
    is_last: bool
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    slots: Tensor
    order: Tensor | None


@dataclass(frozen=True, eq=False)
class Run:
    """Rows of consecutive requests of which all have cached context, or none.

    Attributes:
        start: First row, counted from the first that prefills.
        stop: Row after the last.
        cu_seqlens: [requests + 1] int32, from 0 to stop - start.
        max_seqlen: Most new tokens of a request.
        chunks: The cached context, in order of rows; empty without.
    """

    start: int
    stop: int
    cu_seqlens: Tensor
    max_seqlen: int
    chunks: tuple[ContextChunk, ...]


def plan_prefill(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_table: Tensor,
    page_size: int,
    workspace_tokens: int,
    shard: KvShard,
) -> tuple[Run, ...]:
    """Plan the launches of the requests that prefill, in order of rows.

    Args:
        query_lens: New tokens of each request. Those without any are left out.
        context_lens: Cached tokens of each request.
        block_table: [requests, pages] int32, on the device that attends: pages of this rank.
        page_size: Tokens of a page.
        workspace_tokens: Most cached tokens of a chunk, at least 1.
        shard: Which of the cached tokens this rank keeps.
    """
    runs: list[list[int]] = []
    for request, new in enumerate(query_lens):
        if new == 0:
            continue
        if runs and bool(context_lens[runs[-1][0]]) == bool(context_lens[request]):
            runs[-1].append(request)
        else:
            runs.append([request])
    starts = list(accumulate(query_lens, initial=0))
    device = block_table.device
    planned = []
    for requests in runs:
        lengths = [query_lens[request] for request in requests]
        chunks = [
            _chunk(pieces, query_lens, starts, block_table, page_size, shard)
            for pieces in split_context(requests, context_lens, workspace_tokens)
        ]
        start = starts[requests[0]]
        stop = start + sum(lengths)
        planned.append(Run(start, stop, _offsets(lengths, device), max(lengths), tuple(chunks)))
    return tuple(planned)


def split_context(
    requests: Sequence[int], context_lens: Sequence[int], workspace_tokens: int
) -> list[list[Piece]]:
    """Cut each context into pieces of ``workspace_tokens`` and a rest, and fill chunks with them.

    A piece goes into the chunk of the one before if it fits there, and is never cut for it.
    """
    chunks: list[list[Piece]] = []
    room = 0
    for request in requests:
        cached = context_lens[request]
        for first in range(0, cached, workspace_tokens):
            length = min(workspace_tokens, cached - first)
            if length > room:
                chunks.append([])
                room = workspace_tokens
            chunks[-1].append(Piece(request, first, length, first + length == cached))
            room -= length
    return chunks


def _chunk(
    pieces: Sequence[Piece],
    query_lens: Sequence[int],
    starts: Sequence[int],
    block_table: Tensor,
    page_size: int,
    shard: KvShard,
) -> ContextChunk:
    """Lay out the pieces of one chunk, each of another request."""
    queries = [query_lens[piece.request] for piece in pieces]
    keys = [piece.length for piece in pieces]
    start = starts[pieces[0].request]
    device = block_table.device
    slots, order = _rows(pieces, block_table, page_size, shard)
    return ContextChunk(
        start,
        start + sum(queries),
        start + queries[0] if pieces[0].first > 0 else start,
        pieces[-1].is_last,
        _offsets(queries, device),
        _offsets(keys, device),
        max(queries),
        max(keys),
        slots,
        order,
    )


def _rows(
    pieces: Sequence[Piece], block_table: Tensor, page_size: int, shard: KvShard
) -> tuple[Tensor, Tensor | None]:
    """Return the slots to read on this rank, and the order of the rows that all ranks read."""
    if shard.world_size == 1:
        return _slots(pieces, block_table, page_size), None
    kept = [
        [_kept(piece, shard.on_rank(rank)) for piece in pieces] for rank in range(shard.world_size)
    ]
    # Ranks that keep fewer send rows of nothing, because all send the same number.
    share = max(sum(piece.length for piece in of_rank) for of_rank in kept)
    slots = _slots(kept[shard.rank], block_table, page_size)
    slots = pad(slots, (0, share - slots.shape[0]), value=-1)
    # In their own order, whichever ranks keep them, tokens give the bits that one rank would give.
    lengths = [piece.length for piece in pieces]
    begins = list(accumulate(lengths, initial=0))
    rows = [
        [piece.first - begin, piece.length]
        for piece, begin in zip(pieces, begins[:-1], strict=True)
    ]
    for rank, of_rank in enumerate(kept):
        before = accumulate((piece.length for piece in of_rank), initial=rank * share)
        # What to add to a local index of this rank for its place among all rows.
        for row, piece, begin in zip(rows, of_rank, before, strict=False):
            row.append(begin - piece.first)
    table = torch.tensor(rows, dtype=torch.int64, device=block_table.device)
    per_token = table.repeat_interleave(table[:, 1], dim=0, output_size=begins[-1])
    positions = torch.arange(begins[-1], device=table.device) + per_token[:, 0]
    owner = shard.owner(positions)
    offset = per_token[:, 2:].gather(1, owner[:, None]).squeeze(1)
    return slots, offset + shard.local_index(positions)


def _kept(piece: Piece, shard: KvShard) -> Piece:
    """Return what a rank keeps of a piece, counted in the tokens that it keeps."""
    first = shard.local_length(piece.first)
    stop = shard.local_length(piece.first + piece.length)
    return replace(piece, first=first, length=stop - first)


def _slots(pieces: Sequence[Piece], block_table: Tensor, page_size: int) -> Tensor:
    """Return the cache slots of pieces, one after the other, without waiting for the device."""
    device = block_table.device
    lengths = [piece.length for piece in pieces]
    begins = list(accumulate(lengths, initial=0))
    # Row of the block table, what to add to the place in the chunk for a position, tokens.
    rows = [
        (piece.request, piece.first - begin, piece.length)
        for piece, begin in zip(pieces, begins[:-1], strict=True)
    ]
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    per_token = table[:, :2].repeat_interleave(table[:, 2], dim=0, output_size=begins[-1])
    positions = torch.arange(begins[-1], device=device) + per_token[:, 1]
    pages = block_table[per_token[:, 0], positions // page_size].to(torch.int64)
    return pages * page_size + positions % page_size


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)

"""What one step of an MLA layer attends to: requests, their new and cached tokens, their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mlacast.distributed.shard import KvShard
from mlacast.errors import check_tensor, check_type, fail
from mlacast.layers.context_plan import Run, plan_prefill
from mlacast.layers.live_metadata import number_of

OP = "MLAMetadata.build"
Lengths = Sequence[int] | Tensor


@dataclass(frozen=True, eq=False)
class MLAMetadata:
    """A batch of requests, those that decode first; use `build`.

    The tokens of a step stand in request order. Lengths are known on the host. What kernels read of
    the decodes lives on the device in ``decode_table`` and ``decode_seq_lens``: a captured graph of
    a step that only decodes is replayed for other requests of the same query lengths by copying
    theirs into these two tensors. A sequence length of 0 gives rows of zeros.

    Attributes:
        query_lens: New tokens of each request.
        context_lens: Tokens of each request that were cached before this step.
        block_table: [B, pages] int32 pages of each request, on this rank.
        page_size: Tokens of a page.
        shard: Which tokens of a request this rank keeps; all in a world of 1.
        num_decodes: Requests that attend in absorbed form.
        num_decode_tokens: Their tokens, the first rows of the step.
        decode_query_len: Tokens of each row of the two tensors below: those of a decoding request
            if all have the same, else 1, and 1 where tokens are spread over ranks: what one of them
            sees of a rank's tokens does not grow by one for the next.
        decode_table: [num_decode_tokens / decode_query_len, pages] int32.
        decode_seq_lens: As many, int32: cached tokens that the last token of a row sees, of
            those that this rank keeps.
        number: By which the operator of a layer finds the metadata; None for metadata made in a
            function that is being compiled.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_table: Tensor
    page_size: int
    shard: KvShard
    num_decodes: int
    num_decode_tokens: int
    decode_query_len: int
    decode_table: Tensor
    decode_seq_lens: Tensor
    number: Tensor | None = field(init=False, repr=False)
    _runs: dict[int, tuple[Run, ...]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", number_of(self))

    def __setstate__(self, state: dict[str, object]) -> None:
        # A copy, or one that was pickled, is metadata of its own.
        self.__dict__.update(state)
        object.__setattr__(self, "number", number_of(self))

    @staticmethod
    def build(
        query_lens: Lengths,
        context_lens: Lengths,
        block_table: Tensor,
        page_size: int,
        decode_threshold: int = 1,
        dcp_rank: int = 0,
        dcp_world_size: int = 1,
        dcp_interleave: int = 1,
    ) -> MLAMetadata:
        """Describe a step.

        Args:
            query_lens: New tokens of each request, a sequence of ints or an integer tensor on the
                host. Requests of at most ``decode_threshold`` tokens come before all others; those
                of 0 tokens may stand anywhere.
            context_lens: Tokens of each request in the cache before this step, likewise.
            block_table: [B, pages] int32, contiguous rows, on the device of the layer. A page
                number outside of the cache does not count. With more ranks than one, the pages of
                this rank, which hold the tokens that it keeps, one behind the other.
            page_size: Tokens of a page, as in the cache.
            decode_threshold: Most new tokens of a request that attends in absorbed form, at least
                1; more than 1 for speculative decoding.
            dcp_rank: Rank of this process in the ``dcp_group`` of the layer.
            dcp_world_size: Ranks of that group. All of them build metadata of the same lengths.
            dcp_interleave: Neighbouring tokens of a request that stay on one rank: position p is on
                rank ``p // dcp_interleave % dcp_world_size``.

        Returns:
            The metadata. No requests are allowed.

        Raises:
            TypeError: An argument is not of the Python type above.
            ValueError: Lengths that are negative, unequal in number, on a device, out of order or
                beyond the pages of their request, or numbers out of their range.
        """
        queries = _lengths("query_lens", query_lens)
        contexts = _lengths("context_lens", context_lens)
        if len(contexts) != len(queries):
            fail(OP, "context_lens", f"have {len(queries)} lengths like query_lens", len(contexts))
        sizes = {"B": len(queries)}
        check_tensor(
            OP,
            "block_table",
            block_table,
            "B pages",
            sizes,
            dtype=torch.int32,
            last_dim_contiguous=True,
        )
        for name, number, lowest in (
            ("page_size", page_size, 1),
            ("decode_threshold", decode_threshold, 1),
            ("dcp_rank", dcp_rank, 0),
            ("dcp_world_size", dcp_world_size, 1),
            ("dcp_interleave", dcp_interleave, 1),
        ):
            check_type(OP, name, number, int, "an int")
            if number < lowest:
                fail(OP, name, f"be at least {lowest}", number)
        if dcp_rank >= dcp_world_size:
            fail(OP, "dcp_rank", f"be below dcp_world_size={dcp_world_size}", dcp_rank)
        shard = KvShard(dcp_rank, dcp_world_size, dcp_interleave)
        room = block_table.shape[1] * page_size
        for request, (new, cached) in enumerate(zip(queries, contexts, strict=True)):
            if shard.local_length(new + cached) > room:
                requirement = f"leave request {request} within the {room} tokens of its pages"
                actual = f"{cached} + {new} tokens"
                if dcp_world_size > 1:
                    actual += f" of which {shard.local_length(new + cached)} are kept here"
                fail(OP, "block_table", requirement, actual)
        num_decodes = _leading_decodes(queries, decode_threshold)
        return _with_decodes(queries, contexts, block_table, page_size, shard, num_decodes)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, graph padding not counted."""
        return sum(self.query_lens)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens behind those of the decodes."""
        return self.num_tokens - self.num_decode_tokens

    @property
    def device(self) -> torch.device:
        """Where the block table lives."""
        return self.block_table.device

    def prefill_runs(self, workspace_tokens: int) -> tuple[Run, ...]:
        """Return the launches of the prefill rows, made by the first layer that asks.

        Args:
            workspace_tokens: Most cached tokens that are attended to at a time.
        """
        runs = self._runs.get(workspace_tokens)
        if runs is None:
            first = self.num_decodes
            runs = plan_prefill(
                self.query_lens[first:],
                self.context_lens[first:],
                self.block_table[first:],
                self.page_size,
                workspace_tokens,
                self.shard,
            )
            self._runs[workspace_tokens] = runs
        return runs


def _lengths(argument: str, lengths: object) -> tuple[int, ...]:
    """Return lengths as ints, without waiting for a device."""
    if isinstance(lengths, Tensor):
        if lengths.device.type != "cpu":
            fail(OP, argument, "be on the host (reading it would wait)", lengths.device)
        if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
            actual = f"{lengths.dtype} of shape {list(lengths.shape)}"
            fail(OP, argument, "be a vector of integers", actual)
        lengths = lengths.tolist()
    check_type(OP, argument, lengths, (list, tuple), "a sequence of ints or a tensor")
    assert isinstance(lengths, (list, tuple)), "check_type let something else pass"
    for length in lengths:
        check_type(OP, argument, length, int, "a sequence of ints or a tensor")
        if length < 0:
            fail(OP, argument, "not be negative", length)
    return tuple(lengths)


def _leading_decodes(query_lens: Sequence[int], decode_threshold: int) -> int:
    """Count the requests before the first one that is too long to decode, and check the rest."""
    long = (at for at, new in enumerate(query_lens) if new > decode_threshold)
    first = next(long, len(query_lens))
    for request, new in enumerate(query_lens[first:], first):
        if 0 < new <= decode_threshold:
            requirement = (
                f"name requests of at most decode_threshold={decode_threshold} tokens first"
            )
            fail(OP, "query_lens", requirement, f"{new} tokens for request {request}")
    return first


def _with_decodes(
    queries: tuple[int, ...],
    contexts: tuple[int, ...],
    block_table: Tensor,
    page_size: int,
    shard: KvShard,
    num_decodes: int,
) -> MLAMetadata:
    """Fill in what the decode launch reads: a row for each request, or for each token if uneven."""
    device = block_table.device
    active = [request for request in range(num_decodes) if queries[request] > 0]
    lengths = {queries[request] for request in active}
    per_row = lengths.pop() if len(lengths) == 1 and shard.world_size == 1 else 1
    owners, seen = [], []
    for request in active:
        for stop in range(per_row, queries[request] + 1, per_row):
            owners.append(request)
            seen.append(shard.local_length(contexts[request] + stop))
    if owners == list(range(len(owners))):
        # A view, so that who captures a graph may write to either.
        table = block_table[: len(owners)]
    else:
        table = block_table[torch.tensor(owners, dtype=torch.int64, device=device)]
    return MLAMetadata(
        queries,
        contexts,
        block_table,
        page_size,
        shard,
        num_decodes,
        sum(queries[:num_decodes]),
        per_row,
        table,
        torch.tensor(seen, dtype=torch.int32, device=device),
    )

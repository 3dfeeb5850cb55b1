"""MLAMetadata and the plan of prefill launches, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlacast.distributed import KvShard
from mlacast.layers import MLAMetadata
from mlacast.layers.context_plan import ContextChunk, Piece, Run, split_context


def table(requests: int, pages: int = 4) -> torch.Tensor:
    """Pages 10, 11, ... for the first request, 20, 21, ... for the second."""
    rows = 10 * torch.arange(1, requests + 1)[:, None] + torch.arange(pages)
    return rows.to(torch.int32)


def rows_of(run: Run) -> tuple[int, int, list[int], int]:
    assert run.cu_seqlens.dtype == torch.int32
    return run.start, run.stop, run.cu_seqlens.tolist(), run.max_seqlen


def marks(chunk: ContextChunk) -> tuple[int, int, int, bool]:
    return chunk.start, chunk.begun_stop, chunk.stop, chunk.is_last


def test_decodes_come_first_and_share_a_launch() -> None:
    metadata = MLAMetadata.build([1, 1, 5], [7, 0, 3], table(3), 4)
    assert metadata.num_tokens == 7
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 2)
    assert metadata.num_prefill_tokens == 5
    assert metadata.decode_query_len == 1
    assert metadata.decode_seq_lens.tolist() == [8, 1]
    assert metadata.decode_table.tolist() == [[10, 11, 12, 13], [20, 21, 22, 23]]
    assert metadata.decode_seq_lens.dtype == metadata.decode_table.dtype == torch.int32


def test_several_tokens_per_decode_stay_one_row_if_all_have_as_many() -> None:
    metadata = MLAMetadata.build([3, 3], [4, 0], table(2), 4, decode_threshold=3)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 6)
    assert metadata.decode_query_len == 3
    assert metadata.decode_seq_lens.tolist() == [7, 3]
    # Replays of a captured graph copy into the block table itself.
    assert metadata.decode_table.data_ptr() == metadata.block_table.data_ptr()


def test_requests_without_tokens_do_not_make_decodes_uneven() -> None:
    for lengths, owners in (([2, 2, 0], [10, 20]), ([2, 0, 2], [10, 30])):
        metadata = MLAMetadata.build(lengths, [4, 1, 1], table(3), 4, decode_threshold=2)
        assert (metadata.num_decode_tokens, metadata.decode_query_len) == (4, 2)
        assert metadata.decode_table[:, 0].tolist() == owners
        assert metadata.decode_seq_lens.tolist() == [6, 3]


def test_uneven_decodes_become_a_row_per_token() -> None:
    metadata = MLAMetadata.build([2, 0, 1], [4, 2, 6], table(3), 4, decode_threshold=2)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 3)
    assert metadata.decode_query_len == 1
    assert metadata.decode_seq_lens.tolist() == [5, 6, 7]
    assert metadata.decode_table[:, 0].tolist() == [10, 10, 30]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens(lengths: list[int]) -> None:
    metadata = MLAMetadata.build(lengths, [0] * len(lengths), table(len(lengths)), 4)
    assert (metadata.num_tokens, metadata.num_decode_tokens) == (0, 0)
    assert metadata.decode_seq_lens.shape == (0,)
    assert metadata.decode_table.shape == (0, 4)
    assert metadata.prefill_runs(8) == ()


def test_host_tensors_are_lengths() -> None:
    metadata = MLAMetadata.build(torch.tensor([1, 4]), torch.tensor([2, 0]), table(2), 4)
    assert (metadata.query_lens, metadata.context_lens) == ((1, 4), (2, 0))


def test_prefill_without_context_is_one_launch() -> None:
    (run,) = MLAMetadata.build([1, 2, 0, 4], [5, 0, 3, 0], table(4), 4).prefill_runs(8)
    assert rows_of(run) == (0, 6, [0, 2, 6], 4)
    assert run.chunks == ()


def test_only_rows_of_requests_with_context_are_merged() -> None:
    lengths = ([2, 3, 4, 0, 5, 6, 7], [0, 2, 3, 0, 1, 0, 0])
    before, within, behind = MLAMetadata.build(*lengths, table(7), 4).prefill_runs(8)
    assert rows_of(before) == (0, 2, [0, 2], 2)
    assert rows_of(within) == (2, 14, [0, 3, 7, 12], 5)
    assert rows_of(behind) == (14, 27, [0, 6, 13], 7)
    assert before.chunks == behind.chunks == ()
    (chunk,) = within.chunks
    assert marks(chunk) == (2, 2, 14, True)
    assert chunk.cu_seqlens_q.tolist() == [0, 3, 7, 12]
    assert chunk.cu_seqlens_k.tolist() == [0, 2, 5, 6]
    assert (chunk.max_seqlen_q, chunk.max_seqlen_k) == (5, 3)
    # Pages 20, 30 and 50 of four tokens.
    assert chunk.slots.tolist() == [80, 81, 120, 121, 122, 200]


def test_how_a_context_is_cut_depends_on_its_length_alone() -> None:
    assert split_context([1, 3, 4, 6], [0, 3, 0, 9, 1, 0, 2], 4) == [
        [Piece(1, 0, 3, True)],
        [Piece(3, 0, 4, False)],
        [Piece(3, 4, 4, False)],
        [Piece(3, 8, 1, True), Piece(4, 0, 1, True), Piece(6, 0, 2, True)],
    ]
    assert split_context([0, 1], [0, 0], 4) == []


def test_a_request_of_many_chunks_is_written_by_its_last() -> None:
    (run,) = MLAMetadata.build([2, 4, 5], [3, 10, 1], table(3), 4).prefill_runs(4)
    assert rows_of(run) == (0, 11, [0, 2, 6, 11], 5)
    # Tokens 0-2 of the first request; of the second 0-3, 4-7, 8-9; beside those the third.
    assert [marks(chunk) for chunk in run.chunks] == [
        (0, 0, 2, True),
        (2, 2, 6, False),
        (2, 6, 6, False),
        (2, 6, 11, True),
    ]
    assert [chunk.cu_seqlens_q.tolist() for chunk in run.chunks] == [
        [0, 2],
        [0, 4],
        [0, 4],
        [0, 4, 9],
    ]
    assert [chunk.cu_seqlens_k.tolist() for chunk in run.chunks] == [
        [0, 3],
        [0, 4],
        [0, 4],
        [0, 2, 3],
    ]
    assert [chunk.slots.tolist() for chunk in run.chunks] == [
        [40, 41, 42],
        [80, 81, 82, 83],
        [84, 85, 86, 87],
        [88, 89, 120],
    ]


def test_decodes_on_two_ranks_see_what_is_kept_there() -> None:
    """Tokens 0 1 of a request are on rank 0, 2 3 on rank 1, 4 5 on rank 0, and so on."""
    arguments = ([2, 2, 4], [3, 0, 6], table(3), 4, 2)
    kept = [MLAMetadata.build(*arguments, rank, 2, 2).decode_seq_lens.tolist() for rank in (0, 1)]
    # Lengths of 4, 5, 1 and 2 tokens, those of a token each.
    assert kept == [[2, 3, 1, 2], [2, 2, 0, 0]]
    metadata = MLAMetadata.build(*arguments, 1, 2, 2)
    assert metadata.shard == KvShard(1, 2, 2)
    assert metadata.decode_query_len == 1
    assert metadata.decode_table[:, 0].tolist() == [10, 10, 20, 20]


def test_a_context_on_two_ranks_is_put_in_order() -> None:
    """Rank 0 keeps tokens 0 1 4 5 8 9 of the first request, rank 1 keeps 2 3 6 7."""
    arguments = ([2, 3], [10, 3], table(2), 4, 1)
    chunks = [
        MLAMetadata.build(*arguments, rank, 2, 2).prefill_runs(7)[0].chunks for rank in (0, 1)
    ]
    # Tokens 0-6; then 7-9 with tokens 0-2 of the second request, of which rank 1 keeps the last.
    assert [chunk.slots.tolist() for chunk in chunks[0]] == [[40, 41, 42, 43], [44, 45, 80, 81]]
    assert [chunk.slots.tolist() for chunk in chunks[1]] == [[40, 41, 42, -1], [43, 80, -1, -1]]
    for one, other in zip(*chunks, strict=True):
        assert one.order is not None
        assert other.order is not None
        assert one.order.tolist() == other.order.tolist()
        assert one.cu_seqlens_k.tolist() == other.cu_seqlens_k.tolist()
    orders = [chunk.order.tolist() for chunk in chunks[0] if chunk.order is not None]
    assert orders == [[0, 1, 4, 5, 2, 3, 6], [4, 0, 1, 2, 3, 5]]


def test_pages_hold_what_is_kept() -> None:
    """A page of four tokens for 8 on two ranks; 9 are one too many on the first of them."""
    one_page = table(1, 1)
    MLAMetadata.build([1], [7], one_page, 4, 1, 0, 2)
    MLAMetadata.build([1], [8], one_page, 4, 1, 1, 2)
    with pytest.raises(ValueError, match="within the 4 tokens of its pages, got 8 . 1 tokens of"):
        MLAMetadata.build([1], [8], one_page, 4, 1, 0, 2)


def test_runs_are_planned_once() -> None:
    metadata = MLAMetadata.build([4], [4], table(1), 4)
    assert metadata.prefill_runs(2) is metadata.prefill_runs(2)
    assert [len(metadata.prefill_runs(size)[0].chunks) for size in (2, 3, 4)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query_lens": [3, 1]}, ValueError, "at most decode_threshold=1 tokens first, got 1 tok"),
        ({"query_lens": [1, -1]}, ValueError, "query_lens must not be negative, got -1"),
        ({"query_lens": [1, 2.0]}, TypeError, "query_lens must be a sequence of ints"),
        ({"query_lens": 3}, TypeError, "query_lens must be a sequence of ints"),
        ({"query_lens": torch.tensor([1.0, 2.0])}, ValueError, "be a vector of integers"),
        ({"query_lens": torch.ones(2, device="meta").int()}, ValueError, "be on the host"),
        ({"context_lens": [1]}, ValueError, "have 2 lengths like query_lens, got 1"),
        ({"context_lens": [1, 13]}, ValueError, "leave request 1 within the 16 tokens"),
        ({"block_table": table(3)}, ValueError, "block_table must have shape"),
        ({"block_table": table(2).long()}, ValueError, "block_table must have dtype int32"),
        ({"page_size": 0}, ValueError, "page_size must be at least 1"),
        ({"decode_threshold": 0}, ValueError, "decode_threshold must be at least 1"),
        ({"dcp_world_size": 2, "dcp_rank": 2}, ValueError, "dcp_rank must be below dcp_world_"),
        ({"dcp_world_size": 0}, ValueError, "dcp_world_size must be at least 1"),
        ({"dcp_interleave": 0}, ValueError, "dcp_interleave must be at least 1"),
        ({"dcp_interleave": 2.0}, TypeError, "dcp_interleave must be an int"),
        ({"dcp_rank": 1}, ValueError, "dcp_rank must be below dcp_world_size=1"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "query_lens": [1, 4],
        "context_lens": [3, 2],
        "block_table": table(2),
        "page_size": 4,
    }
    with pytest.raises(error, match=message):
        MLAMetadata.build(**{**arguments, **changes})

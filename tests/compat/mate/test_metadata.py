"""get_batch_decode_metadata_mla: MATE's fields, counts and rows; wrong calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlacast.compat import mate
from mlacast.compat.mate import metadata as metadata_module
from tests.schedules import walk

GET = mate.get_batch_decode_metadata_mla


def _query(batch: int, q_len: int = 1, heads: int = 3) -> Tensor:
    return torch.zeros(batch, q_len, heads, 576, dtype=torch.float8_e4m3fn)


@pytest.fixture
def multiprocessors(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let the CPU have 132 of them."""
    monkeypatch.setattr(metadata_module, "num_multiprocessors", lambda device: 132)
    return 132


@pytest.mark.parametrize(
    ("q_len", "heads", "topk", "parts", "max_num_splits"),
    [
        (1, 3, 2048, 132, 32),
        (1, 64, 64, 132, 1),
        (2, 64, 2048, 66, 32),
        (1, 128, 8192, 66, 64),
        (8, 128, 2048, 8, 8),
        (133, 1, 2048, 1, 1),
        (3, 192, 640, 14, 10),
    ],
)
def test_counts(
    q_len: int, heads: int, topk: int, parts: int, max_num_splits: int, multiprocessors: int
) -> None:
    lens = torch.tensor([topk, 3, 0], dtype=torch.int32)
    metadata = GET(_query(3, q_len, heads), lens, topk)
    assert metadata.num_scheduler_ctas == parts
    assert metadata.max_num_splits == max_num_splits
    config = metadata.config
    assert (config.batch, config.q_len, config.heads, config.topk) == (3, q_len, heads, topk)
    assert metadata.scheduler_metadata.shape == (parts, 8)
    assert metadata.num_splits.shape == (4,)
    assert metadata.scheduler_metadata.dtype == metadata.num_splits.dtype == torch.int32


def test_rows_are_those_of_the_walk(multiprocessors: int) -> None:
    lens = [2048, 0, 70, 5000, -1, 640]
    metadata = GET(_query(6, 2), torch.tensor(lens, dtype=torch.int32), 2048)
    rows, num_splits = walk(lens, 66, 2048, 5)
    assert [tuple(row) for row in metadata.scheduler_metadata[:, :5].tolist()] == rows
    assert metadata.num_splits.tolist() == num_splits


def test_both_shapes_of_lengths_and_any_dtype_of_the_query(multiprocessors: int) -> None:
    lens = torch.tensor([640, 64], dtype=torch.int32)
    plain = GET(_query(2), lens, 640)
    column = GET(_query(2).float(), lens[:, None], 640)
    assert torch.equal(plain.scheduler_metadata, column.scheduler_metadata)


def test_without_multiprocessors_there_is_one_part() -> None:
    metadata = GET(_query(2), torch.tensor([640, 64], dtype=torch.int32), 640)
    assert (metadata.num_scheduler_ctas, metadata.max_num_splits) == (1, 1)
    assert metadata.scheduler_metadata.tolist() == [[0, 0, 1, 1, 0, 0, 0, 0]]
    assert metadata.num_splits.tolist() == [0, 1, 2]


def test_later_changes_of_the_lengths_do_not_reach_the_metadata() -> None:
    lens = torch.tensor([640, 64], dtype=torch.int32)
    metadata = GET(_query(2), lens, 640)
    lens.zero_()
    assert metadata.seq_lens.tolist() == [640, 64]


LENS = torch.tensor([5, 6], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": [1]}, TypeError, "query must be a torch.Tensor, got list"),
        ({"query": _query(2)[0]}, ValueError, r"query must have shape \[B, Q, H, 576\], got"),
        ({"query": _query(2)[..., :512]}, ValueError, r"query must have shape .*576\].* got .*512"),
        ({"query": _query(2)[:, :0]}, ValueError, "query must have Q of at least 1"),
        ({"query": _query(2)[:, :, :0]}, ValueError, "query must have H of at least 1"),
        ({"query": _query(2, 1, 65)}, ValueError, "query must have at most 64 heads or a multiple"),
        ({"query": _query(2).to("meta")}, ValueError, "seq_lens must be on meta .* got cpu"),
        ({"sparse_mla_top_k": 0}, ValueError, "sparse_mla_top_k must be positive, got 0"),
        ({"sparse_mla_top_k": 65}, ValueError, "sparse_mla_top_k must be a multiple of 64, got 65"),
        ({"sparse_mla_top_k": 64.0}, TypeError, "sparse_mla_top_k must be an int, got float"),
        ({"seq_lens": None}, TypeError, "seq_lens must be a torch.Tensor, got NoneType"),
        ({"seq_lens": LENS[:1]}, ValueError, r"seq_lens must have shape \[B\] or \[B, 1\] .*B=2"),
        ({"seq_lens": LENS.expand(2, 2)}, ValueError, "seq_lens must have shape"),
        ({"seq_lens": LENS.long()}, TypeError, "seq_lens must have dtype int32, got int64"),
        ({"seq_lens": LENS.to("meta")}, ValueError, "seq_lens must be on cpu like query, got meta"),
        (
            {"seq_lens": torch.zeros(4, dtype=torch.int32)[::2]},
            ValueError,
            "seq_lens must be contiguous",
        ),
    ],
)
def test_wrong_calls(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {"query": _query(2), "seq_lens": LENS, "sparse_mla_top_k": 64, **changes}
    with pytest.raises(error, match=f"get_batch_decode_metadata_mla: {message}"):
        GET(**call)

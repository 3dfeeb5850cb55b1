"""Index columns read from masks: compared with loops over the mask, entry by entry."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from mlacast.integrations.transformers.selection import (
    SelectionMemo,
    compact_columns,
    compressed_columns,
    to_rows,
    window_columns,
)

CPU = torch.device("cpu")
LOWEST = torch.finfo(torch.float32).min


def open_columns(mask: Tensor) -> list[list[list[int]]]:
    """For each request and query the columns with a zero, by looking at every entry."""
    return [
        [[c for c, value in enumerate(row.tolist()) if value == 0] for row in request[0]]
        for request in mask
    ]


def listed(columns: Tensor) -> list[list[list[int]]]:
    """The columns without the -1 entries."""
    return [[[c for c in row if c >= 0] for row in request] for request in columns.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_window_columns_are_the_zeros_of_the_mask(dtype: torch.dtype) -> None:
    zeros = torch.rand(3, 1, 7, 19) < 0.4
    zeros[1, 0, 2] = False
    mask = torch.where(zeros, 0.0, torch.finfo(dtype).min).to(dtype)
    columns = window_columns(mask, 3, 7, 19, CPU)
    assert columns.dtype == torch.int32
    assert listed(columns) == open_columns(mask)
    assert columns.shape[-1] == max(len(row) for request in open_columns(mask) for row in request)


def test_holes_come_last() -> None:
    mask = torch.tensor([[LOWEST, 0.0, 0.0], [LOWEST, LOWEST, 0.0], [LOWEST, LOWEST, LOWEST]])
    columns = window_columns(mask[None, None], 1, 3, 3, CPU)
    assert columns.tolist() == [[[1, 2], [2, -1], [-1, -1]]]


def test_a_mask_for_one_request_serves_the_batch() -> None:
    mask = torch.tensor([[0.0, LOWEST], [0.0, 0.0]])[None, None]
    assert window_columns(mask, 2, 2, 2, CPU).tolist() == [[[0, -1], [0, 1]]] * 2


def test_no_mask_opens_every_column() -> None:
    assert window_columns(None, 2, 2, 3, CPU).tolist() == [[[0, 1, 2]] * 2] * 2


@pytest.mark.parametrize("blocked", [-1.0e4, -1.0e9, -torch.inf])
def test_usual_blocking_values_are_understood(blocked: float) -> None:
    mask = torch.tensor([[[[0.0, blocked]]]])
    assert window_columns(mask, 1, 1, 2, CPU).tolist() == [[[0]]]


@pytest.mark.parametrize("bias", [1.0, -0.5, -9.9e3, torch.nan])
def test_a_bias_is_refused(bias: float) -> None:
    with pytest.raises(ValueError, match=r"attention_mask must hold only 0 and values of -10000"):
        window_columns(torch.tensor([[[[0.0, bias]]]]), 1, 1, 2, CPU)


def test_a_boolean_mask_is_refused() -> None:
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attention_mask must be additive.*got bool"):
        window_columns(mask, 1, 2, 2, CPU)


@pytest.mark.parametrize("shape", [(2, 1, 3, 5), (3, 1, 3, 4), (2, 4, 3, 4), (3, 4)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[2 or 1, 1, 3, 4\]"):
        window_columns(torch.zeros(shape), 2, 3, 4, CPU)


@pytest.mark.parametrize("width", [None, 3, 6, 40])
def test_compressed_columns_are_the_zeros_of_the_bias(width: int | None) -> None:
    bias = torch.full((2, 1, 5, 13), -torch.inf)
    for request in range(2):
        for query in range(5):
            chosen = torch.randperm(13)[: min(3, query)]
            bias[request, 0, query, chosen] = 0.0
    columns = compressed_columns(bias, 2, 5, 13, CPU, width=width)
    assert listed(columns) == open_columns(bias)
    assert columns.shape[-1] == (13 if width is None else min(width, 13))


def test_no_bias_opens_every_entry() -> None:
    columns = compressed_columns(None, 2, 1, 4, CPU, width=None)
    assert columns.tolist() == [[[0, 1, 2, 3]]] * 2
    assert compressed_columns(None, 2, 3, 0, CPU, width=8).shape == (2, 3, 0)


def test_compaction_of_nothing() -> None:
    assert compact_columns(torch.zeros(2, 3, dtype=torch.bool), 0).shape == (2, 0)
    assert compact_columns(torch.zeros(2, 0, dtype=torch.bool), 0).shape == (2, 0)


def test_rows_count_through_the_batch() -> None:
    columns = torch.tensor([[[0, 2, -1]], [[1, -1, -1]]], dtype=torch.int32)
    assert to_rows(columns, 10).tolist() == [[0, 2, -1], [11, -1, -1]]
    assert to_rows(columns, 10, first_row=4).tolist() == [[4, 6, -1], [15, -1, -1]]


def test_memo_computes_once_per_mask_and_notices_changes() -> None:
    memo = SelectionMemo()
    mask = torch.tensor([[[[0.0, 0.0]]]])
    first = memo.window_columns(mask, 1, 1, 2, CPU)
    assert memo.window_columns(mask, 1, 1, 2, CPU) is first
    mask[..., 0] = LOWEST
    assert memo.window_columns(mask, 1, 1, 2, CPU).tolist() == [[[1]]]
    assert memo.window_columns(mask.clone(), 1, 1, 2, CPU).tolist() == [[[1]]]
    assert memo.window_columns(mask, 2, 1, 2, CPU).tolist() == [[[1]], [[1]]]
    assert copy.deepcopy(memo).window_columns(mask, 1, 1, 2, CPU).tolist() == [[[1]]]


def test_memo_does_not_trust_a_mask_without_version() -> None:
    memo = SelectionMemo()
    with torch.inference_mode():
        mask = torch.tensor([[[[0.0, 0.0]]]])
        assert memo.window_columns(mask, 1, 1, 2, CPU).tolist() == [[[0, 1]]]
        mask[..., 0] = LOWEST
        assert memo.window_columns(mask, 1, 1, 2, CPU).tolist() == [[[1]]]

"""Row-major scales: a token's scales side by side, no padding."""

from __future__ import annotations

import pytest
import torch

from mlacast.layouts.sf_row_major import (
    allocate_row_major,
    from_row_major,
    row_major_offset,
    row_major_strides,
    to_row_major,
)


def counted(num_tokens: int, num_groups: int, words: int) -> torch.Tensor:
    """int32 [T, groups, words] holding 1, 2, 3, ... in row-major order."""
    count = num_tokens * num_groups * words
    return torch.arange(1, count + 1, dtype=torch.int32).reshape(num_tokens, num_groups, words)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 129])
def test_strides_and_allocation(num_tokens: int, poisoned_empty: None) -> None:
    assert row_major_strides(num_tokens, 3, 4) == (12, 4, 1)
    view = allocate_row_major(num_tokens, 3, 4, torch.float32, "cpu")
    assert view.dtype == torch.float32
    assert view.shape == (num_tokens, 3, 4)
    assert view.is_contiguous()
    assert view.untyped_storage().nbytes() == num_tokens * 3 * 4 * 4
    assert bool((view == 0).all())


def test_golden_elements() -> None:
    transposed = counted(3, 2, 2).transpose(0, 2)
    view = to_row_major(transposed)
    assert view.flatten().tolist() == [1, 5, 9, 3, 7, 11, 2, 6, 10, 4, 8, 12]
    assert view.stride() == (6, 3, 1)


def test_offset_is_where_the_view_points() -> None:
    source = counted(5, 2, 3)
    flat = to_row_major(source).flatten()
    for token in range(5):
        for group in range(2):
            for word in range(3):
                offset = row_major_offset(token, group, word, 2, 3)
                assert offset == token * 6 + group * 3 + word
                assert flat[offset] == source[token, group, word]


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 129])
def test_round_trip(num_tokens: int) -> None:
    source = counted(num_tokens, 2, 3)
    assert torch.equal(from_row_major(to_row_major(source)), source)

"""MN-major scales: stride 1 along tokens, columns padded to four tokens, padding zero."""

from __future__ import annotations

import pytest
import torch

from mlacast.layouts.sf_mn_major import (
    allocate_mn_major,
    from_mn_major,
    mn_major_offset,
    mn_major_strides,
    to_mn_major,
)

# tokens -> padded column
COLUMNS = {0: 0, 1: 4, 2: 4, 3: 4, 4: 4, 5: 8, 63: 64, 64: 64, 66: 68, 127: 128, 128: 128, 129: 132}


def storage_of(view: torch.Tensor) -> torch.Tensor:
    """Every element of the storage behind a view, in memory order."""
    size = view.untyped_storage().nbytes() // view.element_size()
    return view.as_strided((size,), (1,), 0)


def counted(num_tokens: int, num_groups: int, words: int) -> torch.Tensor:
    """int32 [T, groups, words] holding 1, 2, 3, ... in row-major order."""
    count = num_tokens * num_groups * words
    return torch.arange(1, count + 1, dtype=torch.int32).reshape(num_tokens, num_groups, words)


@pytest.mark.parametrize(("num_tokens", "column"), COLUMNS.items())
def test_strides(num_tokens: int, column: int) -> None:
    assert mn_major_strides(num_tokens, 8, 32) == (1, 32 * column, column)
    assert mn_major_strides(num_tokens, 1, 1) == (1, column, column)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "column"), COLUMNS.items())
def test_allocation(num_tokens: int, column: int, dtype: torch.dtype, poisoned_empty: None) -> None:
    view = allocate_mn_major(num_tokens, 3, 4, dtype, "cpu")
    assert view.dtype == dtype
    assert view.shape == (num_tokens, 3, 4)
    assert view.stride() == (1, 4 * column, column)
    assert view.storage_offset() == 0
    storage = storage_of(view)
    assert storage.numel() == 3 * 4 * column
    assert bool((storage == 0).all())


def test_golden_elements(poisoned_empty: None) -> None:
    # 5 tokens, 2 groups, 1 word: two columns of 8, three zeros behind each.
    view = to_mn_major(counted(5, 2, 1))
    assert storage_of(view).tolist() == [1, 3, 5, 7, 9, 0, 0, 0, 2, 4, 6, 8, 10, 0, 0, 0]


def test_golden_bytes_of_packed_words() -> None:
    # Word 1 of token 1 has the little-endian bytes 0x11 0x22 0x33 0x44, at element 1 * 4 + 1.
    words = torch.zeros(2, 1, 2, dtype=torch.int32)
    words[1, 0, 1] = 0x44332211
    raw = storage_of(to_mn_major(words)).view(torch.uint8).tolist()
    assert raw[20:24] == [0x11, 0x22, 0x33, 0x44]
    assert sum(byte != 0 for byte in raw) == 4


@pytest.mark.parametrize("num_tokens", COLUMNS)
def test_offset_is_where_the_view_points(num_tokens: int) -> None:
    groups, words = 2, 3
    source = counted(num_tokens, groups, words)
    storage = storage_of(to_mn_major(source))
    seen = set()
    for token in range(num_tokens):
        for group in range(groups):
            for word in range(words):
                offset = mn_major_offset(token, group, word, num_tokens, words)
                assert offset == (group * words + word) * COLUMNS[num_tokens] + token
                assert storage[offset] == source[token, group, word]
                seen.add(offset)
    assert len(seen) == num_tokens * groups * words
    padding = [index for index in range(storage.numel()) if index not in seen]
    assert bool((storage[padding] == 0).all())


@pytest.mark.parametrize("num_tokens", COLUMNS)
def test_round_trip(num_tokens: int) -> None:
    source = counted(num_tokens, 2, 3)
    view = to_mn_major(source)
    assert view.stride() == mn_major_strides(num_tokens, 2, 3)
    back = from_mn_major(view)
    assert back.is_contiguous()
    assert torch.equal(back, source)


def test_strided_source() -> None:
    source = counted(3, 4, 5).permute(2, 0, 1)
    assert torch.equal(to_mn_major(source), source)
    assert to_mn_major(source).stride() == (1, 4 * 8, 8) == (1, 32, 8)
    words_of_three = to_mn_major(counted(6, 2, 3)[::2])
    assert torch.equal(words_of_three, counted(6, 2, 3)[::2])

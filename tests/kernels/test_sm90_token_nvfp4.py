"""Places in shared memory of the Hopper store of Nvfp4 rows."""

from __future__ import annotations

import collections

import pytest

pytest.importorskip("triton", reason="the layout stands beside its kernel")

from mlacast.kernels.common.sm90_token_nvfp4 import STAGE_LAYOUT  # noqa: E402

ROWS, COLUMNS = 64, 32


def _places() -> dict[tuple[int, int], int]:
    """Word of every row and column."""
    places = {}
    for word in range(ROWS * COLUMNS):
        row = column = 0
        for bit, (of_row, of_column) in enumerate(STAGE_LAYOUT.value.offset_bases):
            if word >> bit & 1:
                row, column = row ^ of_row, column ^ of_column
        places[row, column] = word
    return places


def _most_words_of_a_bank(words: list[int]) -> int:
    return max(collections.Counter(word % 32 for word in words).values())


def test_every_element_has_a_place() -> None:
    expected = {(row, column) for row in range(ROWS) for column in range(COLUMNS)}
    assert set(_places()) == expected


def test_accumulators_meet_no_bank_twice() -> None:
    """16 lanes at once store 8 bytes each: four rows, four neighbouring pairs of columns."""
    places = _places()
    for row in range(0, ROWS, 4):
        for column in range(0, COLUMNS, 8):
            words = [places[row + i, column + j] for i in range(4) for j in range(8)]
            assert _most_words_of_a_bank(words) == 1


def test_groups_meet_no_bank_twice() -> None:
    """8 lanes at once load 16 bytes each: four rows, the same quarter of two groups."""
    places = _places()
    for row in range(0, ROWS, 4):
        for quarter in range(0, 16, 4):
            columns = [group + quarter + i for group in (0, 16) for i in range(4)]
            words = [places[row + i, column] for i in range(4) for column in columns]
            assert _most_words_of_a_bank(words) == 1
            for i in range(4):
                for group in (0, 16):
                    start = places[row + i, group + quarter]
                    assert start % 4 == 0
                    assert [places[row + i, group + quarter + j] - start for j in range(4)] == [
                        0,
                        1,
                        2,
                        3,
                    ]

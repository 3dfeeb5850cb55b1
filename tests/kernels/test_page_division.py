"""Dividing slots by the page size with a multiplication gives the quotient, for every slot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the launcher imports triton")

from mlacast.kernels.common.record_places import page_division  # noqa: E402


def divide(slot: int, page_size: int) -> int:
    """What the kernel does with unsigned 32-bit numbers."""
    multiplier, shift = page_division(page_size)
    assert -(2**31) <= multiplier < 2**31, "comes as an int32"
    return (2 * slot * (multiplier % 2**32) >> 32) >> shift


@pytest.mark.parametrize("page_size", [1, 2, 3, 17, 64, 100, 127, 128, 2**20 - 1, 2**30 + 1])
def test_around_every_kind_of_page(page_size: int) -> None:
    last = (2**31 - 1) // page_size * page_size
    for slot in (0, 1, page_size - 1, page_size, page_size + 1, last - 1, last, 2**31 - 1):
        if 0 <= slot < 2**31:
            assert divide(slot, page_size) == slot // page_size


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_any_slot_and_page_size(slot: int, page_size: int) -> None:
    assert divide(slot, page_size) == slot // page_size


@given(st.integers(1, 2**15), st.integers(1, 2**16))
def test_ends_of_pages(page_size: int, page: int) -> None:
    if page * page_size < 2**31:
        assert divide(page * page_size, page_size) == page
        assert divide(page * page_size - 1, page_size) == page - 1

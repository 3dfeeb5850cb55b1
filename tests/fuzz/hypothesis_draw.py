"""Draws through hypothesis, which shrinks what fails; a file apart, as seeded runs need none."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from tests.fuzz.draw import Draw

T = TypeVar("T")


@functools.cache
def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


class HypothesisDraw(Draw):
    """Draws through ``st.data()``."""

    def __init__(self, data: Any) -> None:
        self._data = data

    @property
    def fixed(self) -> Draw:
        """Nothing is compiled: every choice is free."""
        return self

    def integer(self, low: int, high: int) -> int:
        """A number, both bounds included."""
        return int(self._data.draw(_integers(low, high)))

    def choice(self, options: Sequence[T]) -> T:
        """One of the options, drawn as its place."""
        return options[self.integer(0, len(options) - 1)]

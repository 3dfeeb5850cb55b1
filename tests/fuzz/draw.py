"""Where the choices of a drawn call come from: hypothesis, or a seed.

A subject is one function of a ``Draw``, so the same calls are drawn under hypothesis (which
shrinks what fails) and by a seeded run on a GPU (where drawing has to be cheap).
"""

from __future__ import annotations

import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Draw(ABC):
    """Choices of one call.

    Choices that a compiled kernel is specialised on are made through ``fixed``: a run on a GPU
    draws them from a bounded list of configurations, everything else anew for each call.
    """

    @property
    @abstractmethod
    def fixed(self) -> Draw:
        """Draws what kernels are compiled for."""

    @abstractmethod
    def integer(self, low: int, high: int) -> int:
        """A number, both bounds included."""

    @abstractmethod
    def choice(self, options: Sequence[T]) -> T:
        """One of the options; what is simplest comes first."""

    def chance(self, percent: int = 50) -> bool:
        """True in about ``percent`` of 100 draws."""
        return self.integer(0, 99) >= 100 - percent

    def seed(self) -> int:
        """Seed of a tensor's values."""
        return self.integer(0, 2**31 - 1)


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


class SeededDraw(Draw):
    """Draws from two generators, one of them for what kernels are compiled for."""

    def __init__(self, seed: str, fixed_seed: str | None = None) -> None:
        self._random = random.Random(seed)
        self._fixed = self if fixed_seed is None else SeededDraw(fixed_seed)

    @property
    def fixed(self) -> Draw:
        """Draws that depend on the configuration alone."""
        return self._fixed

    def integer(self, low: int, high: int) -> int:
        """A number, both bounds included."""
        return self._random.randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self._random.randrange(len(options))]

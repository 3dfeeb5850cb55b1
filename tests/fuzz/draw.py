"""Where the choices of a drawn call come from: hypothesis, or a seed.

A subject is one function of a ``Draw``, so the same calls are drawn under hypothesis (which
shrinks what fails) and by a seeded run on a GPU (where drawing has to be cheap).
"""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
# Files that draw whole calls.
OUTSIDE = ("seeded.py", "subjects.py")


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


class FixedDraw(Draw):
    """Choices of a configuration, each by where in the sources it is made.

    So a choice stays what it is for all calls of a configuration, also where another one, that
    depends on a call's free choices, comes or does not come before it.
    """

    # The choice itself, who asks for it, and two callers of that: a helper is used for many things.
    FRAMES = 4

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._seen: Counter[tuple[object, ...]] = Counter()

    @property
    def fixed(self) -> Draw:
        """Itself."""
        return self

    def _random(self) -> random.Random:
        place: list[object] = []
        frame: FrameType | None = sys._getframe(2)
        # Whoever asks for a whole call must not matter, or none could be repeated.
        while frame is not None and len(place) < 2 * self.FRAMES:
            if Path(frame.f_code.co_filename).name in OUTSIDE:
                break
            if frame.f_code.co_filename != __file__:
                place += [frame.f_code.co_name, frame.f_lineno]
            frame = frame.f_back
        key = tuple(place)
        self._seen[key] += 1
        return random.Random(f"{self._seed}:{key}:{self._seen[key]}")

    def integer(self, low: int, high: int) -> int:
        """A number, both bounds included."""
        return self._random().randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self._random().randrange(len(options))]


class SeededDraw(Draw):
    """Draws by seed; ``configuration`` is the seed of what kernels are compiled for."""

    def __init__(self, seed: str, configuration: str | None = None) -> None:
        self._random = random.Random(seed)
        self._fixed: Draw = self if configuration is None else FixedDraw(configuration)

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

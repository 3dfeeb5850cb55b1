"""The program that keeps the nearest slot above another one gives the least unsigned distance."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="the program stands beside its kernel")

from mlacast.kernels.triton import kv_cache_append_twins  # noqa: E402
from tests.kernels.ptx_words import run  # noqa: E402


def test_the_nearest_of_slots_above() -> None:
    """Slots below the start of a range, and those that are -1, are farther than any range is."""
    rng = np.random.default_rng(0)
    slots = np.concatenate((rng.integers(-1, 100, 1000), [-1, 0, 2**31 - 1]))
    low = np.concatenate((rng.integers(0, 100, 1000), [2**31 - 1, 0, 5]))
    nearest = np.concatenate((rng.integers(0, 60, 1000), [2**32 - 1, 0, 2**32 - 1]))
    words = [numbers.astype(np.int64).astype(np.uint32) for numbers in (slots, low, nearest)]
    (out,) = run(kv_cache_append_twins._NEARER.value, 1, words)
    above = [(int(slot) - int(start)) % 2**32 for slot, start in zip(slots, low, strict=True)]
    assert out.tolist() == [min(pair) for pair in zip(above, nearest.tolist(), strict=True)]

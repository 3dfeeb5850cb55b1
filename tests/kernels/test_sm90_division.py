"""Divisions of the Hopper kernels without a division instruction: bits of IEEE quotients."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="the programs stand beside their kernels")

from mlacast.kernels.common import sm90_division  # noqa: E402
from tests.kernels.ptx_words import Words, run  # noqa: E402

LARGEST = np.finfo(np.float32).max


def _words(number: np.float32, like: Words) -> Words:
    return np.full(like.shape, number, np.float32).view(np.uint32)


@pytest.mark.parametrize("amax", [1e-10, 0.3, 1.0, 447.9999, 1.9e5, LARGEST])
def test_accumulators_over_a_scale(amax: float) -> None:
    """For what a group with this largest magnitude can hold, and both zeros."""
    scale = np.float32(amax) / np.float32(448.0)
    rng = np.random.default_rng(0)
    size = np.float32(amax) * np.exp2(-rng.uniform(0, 40, 50_000)).astype(np.float32)
    # Quotients near ties of the codes: odd multiples of the scale over 32.
    ties = scale * (np.arange(1, 2000, 2, dtype=np.float32) / np.float32(32.0))
    x = np.concatenate((size, ties, [np.float32(0.0), np.float32(amax)])).astype(np.float32)
    x = np.concatenate((x, -x))
    words = x.view(np.uint32)
    program = "mov.b32 $0, $1; " + sm90_division._divide_in_place("$0", "$2", "$3")
    inverse = np.float32(1.0) / scale
    (found,) = run(program, 1, [words, _words(scale, words), _words(inverse, words)])
    with np.errstate(under="ignore"):
        assert np.array_equal(found, (x / scale).view(np.uint32))


def test_the_largest_scale_says_that_there_may_be_an_infinity() -> None:
    (scale,) = run(sm90_division._OVER_448.value, 1, [np.array([LARGEST]).view(np.uint32)])
    assert f"0f{scale[0]:08X}" == sm90_division._LARGEST_SCALE.value

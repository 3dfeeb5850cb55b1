"""Divisions of the Hopper kernels without a division instruction: bits of IEEE quotients."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="the programs stand beside their kernels")

from mlacast.kernels.common import sm90_division, sm90_rotation  # noqa: E402
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


def _given_reciprocal(program: str, register: str, operand: str, place: str) -> str:
    """A program that finds an approximate reciprocal among its operands."""
    step = f"rcp.approx.ftz.f32 {register}, {operand}; "
    program = " ".join(program.split())
    assert program.count(step) == 1
    return program.replace(step, f"mov.b32 {register}, {place}; ")


def _neighbours(x: Words) -> list[Words]:
    """What an approximation within one of the last place may give."""
    return [x - np.uint32(1), x, x + np.uint32(1)]


@pytest.mark.parametrize("exponent", [-120, 0, 125])
def test_over_6_without_float64(exponent: int) -> None:
    """Every mantissa."""
    bits = np.arange(1 << 23, dtype=np.uint32) | np.uint32((exponent + 127) << 23)
    (found,) = run(sm90_division._OVER_6_IN_FLOAT32.value, 1, [bits])
    assert np.array_equal(found, (bits.view(np.float32) / np.float32(6)).view(np.uint32))


def test_over_6_of_what_is_too_small_is_small() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 7 << 23, 50_000).astype(np.uint32)
    (found,) = run(sm90_division._OVER_6_IN_FLOAT32.value, 1, [bits])
    assert found.view(np.float32).max() < 2.0**-122


@pytest.mark.parametrize("dividend", [-108, 0, 100])
@pytest.mark.parametrize("code", [1, 3, 7, 8, 9, 11, 13, 15, 0x77, 0x7E])
def test_over_a_scale(code: int, dividend: int) -> None:
    """A scale of e4m3 times 2**-8, as float16 has it, under numbers of every size."""
    divisor = np.array([code << 7], np.uint16).view(np.float16).astype(np.float32)
    rng = np.random.default_rng(code)
    x = rng.integers(0, 1 << 23, 60_000).astype(np.uint32) | np.uint32((dividend + 127) << 23)
    x |= rng.integers(0, 2, x.size).astype(np.uint32) << np.uint32(31)
    expected = (x.view(np.float32) / divisor).view(np.uint32)
    program = _given_reciprocal(sm90_division._OVER_SHORT.value, "inverse", "$2", "$3")
    for inverse in _neighbours((np.float32(1) / divisor).view(np.uint32)):
        divisors = np.full_like(x, divisor.view(np.uint32)[0])
        (found,) = run(program, 1, [x, divisors, np.full_like(x, inverse[0])])
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 16, 96, 127, 128, 4095, (1 << 20) - 1])
def test_groups_of_heads(heads: int) -> None:
    """Heads around all ends of groups, up to 2**20."""
    ends = np.arange(0, 1 << 20, heads)[:, None] + np.array([-1, 0, 1])
    head = np.unique(ends[(ends >= 0) & (ends < 1 << 20)]).astype(np.uint32)
    program = _given_reciprocal(sm90_rotation._DIVIDE_HEADS.value, "heads", "heads", "$3")
    for inverse in _neighbours((np.float32(1) / np.array([heads], np.float32)).view(np.uint32)):
        operands = [head, np.full_like(head, heads), np.full_like(head, inverse[0])]
        (found,) = run(program, 1, operands)
        assert np.array_equal(found, head // np.uint32(heads))

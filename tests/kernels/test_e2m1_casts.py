"""The program that turns float32 into pairs of E2M1 codes rounds once, to the nearest even code."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("triton", reason="the program stands beside its kernel")

from mlacast.kernels.common import e2m1_casts  # noqa: E402
from tests.kernels.ptx_words import run  # noqa: E402

# Where the nearest code changes: between two codes, of which the even one gets the number itself.
BOUNDARIES = np.array((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
SIGN = 0x80000000
Floats = NDArray[np.float32]


def _codes(x: Floats, factor: Floats, kept: int = SIGN) -> NDArray[np.uint8]:
    """Codes by the program: of every eight numbers the first four become low halves of bytes."""
    words = x.view(np.uint32).reshape(-1, 8)
    factors = factor.view(np.uint32).reshape(-1, 8)
    inputs = [words[:, at].copy() for at in range(8)]
    inputs += [factors[:, at].copy() for at in range(4)]
    inputs += [np.full_like(words[:, 0], kept)] * 4
    (out,) = run(e2m1_casts._TO_E2M1.value, 1, inputs)
    found = out.view(np.uint8).reshape(-1, 4)
    codes: NDArray[np.uint8] = np.concatenate((found & 0xF, found >> 4), 1).ravel()
    return codes


def _expected(product: Floats) -> NDArray[np.uint8]:
    magnitude = np.abs(product).astype(np.float64)[:, None]
    odd = np.arange(7) % 2 == 1
    above = np.where(odd, magnitude >= BOUNDARIES, magnitude > BOUNDARIES)
    codes: NDArray[np.uint8] = above.sum(1).astype(np.uint8) | (np.signbit(product) << 3)
    return codes


def _alike(numbers: Floats) -> Floats:
    """Numbers whose products with one factor a byte's two halves share."""
    return numbers[: numbers.shape[0] // 8 * 8]


def test_numbers_around_every_boundary_and_code() -> None:
    around = np.concatenate((BOUNDARIES, (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0)))
    bits = around.astype(np.float32).view(np.int32)[:, None] + np.arange(-512, 512)
    x = bits.astype(np.int32).view(np.float32).ravel()
    for sign in (np.float32(1.0), np.float32(-1.0)):
        assert np.array_equal(_codes(sign * x, np.ones_like(x)), _expected(sign * x))


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_any_number_and_factor() -> None:
    """What is rounded is the product as float32."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    any_number = bits[np.isfinite(bits.view(np.float32))].view(np.float32)
    near = (rng.standard_normal(1 << 18) * 4).astype(np.float32)
    for numbers in (_alike(any_number), near):
        for exponent in (-100, -3, 0, 20):
            factor = np.float32(np.float32(1.3) * np.float32(2.0**exponent))
            x = numbers if numbers is not near else (near / factor).astype(np.float32)
            assert np.array_equal(_codes(x, np.full_like(x, factor)), _expected(x * factor))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_groups_that_do_not_count() -> None:
    bits = np.random.default_rng(2).integers(0, 1 << 32, 1 << 12, dtype=np.uint32)
    x = bits.view(np.float32)
    finite = np.where(np.isfinite(x), x, np.float32(-1.0))
    assert not _codes(finite, np.zeros_like(x), 0).any(), "no sign without a scale"
    assert (_codes(x, np.full_like(x, np.nan), 0) == 7).all(), "no number gets the largest code"
    assert (_codes(np.full_like(x, np.inf), np.ones_like(x)) == 7).all()
    assert (_codes(np.full_like(x, -np.inf), np.ones_like(x)) == 15).all()

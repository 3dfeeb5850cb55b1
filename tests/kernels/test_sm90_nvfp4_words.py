"""The program of the Hopper kernels that makes words of E2M1 codes, for every float32 number.

Rounded sums, products with positive numbers and minima never fall where their operand rises, and
codes of the format do not either. So numbers on both sides of each of its seven boundaries, and the
ends, speak for all between them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton", reason="the program stands beside its kernel")

from mlacast.formats.block_scaled import quantize_nvfp4  # noqa: E402
from mlacast.kernels.common.sm90_nvfp4 import (  # noqa: E402
    _WORD_OF_E2M1,
    _WORD_OF_E2M1_BY_PRODUCTS,
)
from tests.kernels.ptx_words import run  # noqa: E402

BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# Where pieces of the program meet, what is clamped, and the ends of float32.
OTHERS = (0.0, 2.0, 4.0, 6.0, 7.0, 8.0, 1e30, 3.4028235e38, np.inf, 1e-45, 1e-38)

Numbers = NDArray[np.float32]
Codes = NDArray[np.uint32]


def _numbers() -> Numbers:
    """Neighbours of all special numbers, and random ones, of both signs."""
    bits = np.array([*BOUNDARIES, *OTHERS], np.float32).view(np.uint32).astype(np.int64)
    near = (bits[:, None] + np.arange(-5, 6)).ravel()
    near = near[(near >= 0) & (near <= 0x7F800000)].astype(np.uint32).view(np.float32)
    rng = np.random.default_rng(0)
    drawn = rng.uniform(0, 8, 40_000).astype(np.float32)
    spread = np.exp2(rng.uniform(-140, 127, 5_000)).astype(np.float32)
    positive = np.concatenate((near, drawn, spread))
    both = rng.permutation(np.concatenate((positive, -positive)))
    out: Numbers = both[: both.size // 8 * 8]
    return out


def _run(x: Numbers, first: Numbers, last: Numbers) -> Codes:
    """Codes of numbers, eight to a word; factors of the first and the last four of each."""
    elements = [x[at::8].copy().view(np.uint32) for at in range(8)]
    factors = [np.broadcast_to(f, elements[0].shape).copy().view(np.uint32) for f in (first, last)]
    with np.errstate(invalid="ignore"):
        (words,) = run(_WORD_OF_E2M1.value, 1, [*elements, *factors])
    nibbles = [(words >> np.uint32(4 * at)) & np.uint32(0xF) for at in range(8)]
    return np.stack(nibbles, 1).ravel()


def _expected(scaled: Numbers) -> Codes:
    """Ties go up where the upper code is even."""
    x = np.abs(scaled)
    codes = sum(
        ((x >= b) if at % 2 else (x > b)).astype(np.uint32) for at, b in enumerate(BOUNDARIES)
    )
    out: Codes = codes | (np.signbit(scaled).astype(np.uint32) << np.uint32(3))
    return out


@pytest.mark.parametrize("factors", [(1.0, 1.0), (2.0, 0.5), (0.7391, 3.1e-3), (1e-40, 1e35)])
def test_codes_of_products(factors: tuple[float, float]) -> None:
    x = _numbers()
    first, last = (np.float32(factor) for factor in factors)
    of_element = np.where(np.arange(x.size) % 8 < 4, first, last)
    with np.errstate(over="ignore", under="ignore"):
        scaled = x * of_element
    assert np.array_equal(_run(x, -first, -last), _expected(scaled))


def test_a_zero_keeps_its_sign_unless_its_scale_is_zero() -> None:
    x = np.tile(np.array([0.0, -0.0, -1e-45, 1.0], np.float32), 2)
    assert _run(x, np.float32(-0.5), np.float32(0.0)).tolist() == [0, 8, 8, 1, 0, 0, 0, 0]


def test_a_factor_that_underflows_leaves_signs() -> None:
    """Beside an infinity the scale is 448, and a subnormal global scale over it is zero."""
    x = np.array([np.inf, -1.0, 1.0, -0.0, 0.0, -3e38, 3e38, -1e-45] * 2, np.float32)
    global_scale = np.float32(1e-44)
    codes, scales = quantize_nvfp4(torch.from_numpy(x), float(global_scale))
    assert scales.tolist() == [0x7E]
    factor = global_scale / np.float32(448.0)
    assert factor == 0.0 and codes.tolist() == [7, 8, 0, 8, 0, 8, 0, 8] * 2
    assert _run(x, -factor, -factor).tolist() == codes.tolist()


def test_a_group_with_a_nan_has_the_largest_code() -> None:
    x = np.array([1.0, -1.0, np.nan, -np.inf, 1.0, -6.0, 2.0, -3.0], np.float32)
    nan = np.float32("nan")
    for factor in (nan, -nan):
        assert _run(x, factor, np.float32(-1.0)).tolist() == [7, 7, 7, 7, 2, 15, 4, 13]


SIGNS = np.uint32(0x88888888)


def _run_by_products(x: Numbers, factor: np.float32, signs: np.uint32, fill: np.uint32) -> Codes:
    """Codes of groups that have one factor."""
    lanes = list(x.reshape(-1, 8).T.copy().view(np.uint32))
    like = np.ones_like(lanes[0])
    eighth = (factor * np.float32(0.125)).view(np.uint32)
    operands = [*lanes, like * eighth, like * signs, like * fill]
    (words,) = run(_WORD_OF_E2M1_BY_PRODUCTS.value, 1, operands)
    places = np.arange(0, 32, 4, dtype=np.uint32)
    codes: Codes = (words[:, None] >> places & np.uint32(0xF)).ravel()
    return codes


@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5, 0.7391, 3.1e-3, 7.3e-33, 1e30])
def test_codes_by_products(factor: float) -> None:
    x = _numbers()
    number = np.float32(factor)
    with np.errstate(over="ignore", under="ignore"):
        scaled = x * number
    found = _run_by_products(x, number, SIGNS, np.uint32(0))
    assert np.array_equal(found, _expected(scaled))


def test_by_products_a_group_with_a_nan_has_the_largest_code_and_one_without_a_scale_zeros() -> (
    None
):
    x = np.array([1.0, -1.0, np.nan, -np.inf, 1.0, -6.0, 0.0, -3.0] * 2, np.float32)
    none, nan = np.uint32(0), np.float32("nan")
    for factor in (np.float32(0.3), nan):
        assert _run_by_products(x, factor, none, np.uint32(0x77777777)).tolist() == [7] * 16
    assert _run_by_products(x, nan, none, none).tolist() == [0] * 16

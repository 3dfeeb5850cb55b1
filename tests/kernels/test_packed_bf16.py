"""Programs on pairs of bfloat16 give the codes of the formats, for every number and scale."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton", reason="the programs stand beside their kernels")

from mlacast.kernels.common import packed_bf16  # noqa: E402
from tests.kernels.ptx_words import run  # noqa: E402

BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
NUMBERS = np.arange(1 << 16, dtype=np.uint32)
# Those below the normal ones, and two exponents of these, the last among them.
CODES = (*range(1, 16), *range(119, 127))
SCALES: NDArray[np.float32] = (
    torch.tensor(CODES, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
)


def _value(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Numbers of bfloat16 bits."""
    numbers: NDArray[np.float32] = (bits << np.uint32(16)).view(np.float32)
    return numbers


FINITE = NUMBERS[np.isfinite(_value(NUMBERS))]


def _pairs(bits: NDArray[np.uint32]) -> list[NDArray[np.uint32]]:
    """Every fourth pair of neighbours: four words of a thread, [n / 8] each."""
    words = bits[0::2] | (bits[1::2] << np.uint32(16))
    return [words[at::4].copy() for at in range(4)]


def _nearest_even(above: list[NDArray[np.bool_]]) -> NDArray[np.int64]:
    """E2M1 magnitudes: how many boundaries lie below."""
    count: NDArray[np.int64] = np.sum(np.stack(above), 0)
    return count


def _e2m1(
    x: NDArray[np.uint32], power: int, most: int, inverse: np.float16, nudge: int, signs: int
) -> NDArray[np.uint32]:
    """Codes of numbers of a group; all else as ``cast_bf16_to_e2m1`` takes it."""
    words = _pairs(x)
    halves = [half * 0x10001 for half in (int(inverse.view(np.uint16)), nudge)]
    # What four numbers have one of comes four times, in halves of words where it is 16 bits.
    operands = [power, *[0] * 3, most, *[0] * 3, halves[0], 0, halves[1], 0, signs, *[0] * 3]
    factors = [np.full_like(words[0], operand) for operand in operands]
    found = [
        run(packed_bf16._TO_E2M1.value, 1, [*two, *factors])[0] for two in (words[:2], words[2:])
    ]
    codes = np.stack(found, 1).view(np.uint8).ravel()
    out: NDArray[np.uint32] = codes.astype(np.uint32)
    return out


def _of_scale(
    scale: np.float32, *, is_product: bool = False
) -> Iterator[tuple[int, int, np.float16, int]]:
    """Factors of a scale as ``encode_fp4`` makes them, of whichever reciprocal a device has."""
    bits = int(scale.view(np.uint32))
    mantissa = bits & 0x7FFFFF
    is_large = is_product and mantissa == 0x700000
    less = 0xB000 if is_large else 0x200
    rest = np.uint32(0x43800000 + mantissa - less).view(np.float32)
    most = int((rest * np.float32(6 * 2.0**-120)).view(np.uint32))
    exact = np.float32(1.0) / rest
    for one in (exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(1))):
        power = 0x47000000 - (bits & 0x7F800000)
        yield power, most, np.float16(one), 0x8024 if is_large else 0


def _numbers_of(scale: np.float32) -> NDArray[np.uint32]:
    """Finite numbers of groups with this scale: any with the largest, else up to nine times it."""
    within = np.abs(_value(FINITE)) <= (np.inf if scale == 448 else 9 * scale)
    kept = FINITE[within]
    out: NDArray[np.uint32] = kept[: kept.shape[0] // 8 * 8]
    return out


def _signed(x: NDArray[np.uint32], magnitude: NDArray[np.int64]) -> NDArray[np.uint32]:
    out: NDArray[np.uint32] = magnitude.astype(np.uint32) | ((x >> np.uint32(12)) & np.uint32(8))
    return out


def test_e2m1_of_quotients() -> None:
    """Ties go to the even code exactly where a number is a boundary times its scale."""
    for scale in SCALES:
        numbers = _numbers_of(scale)
        x = np.abs(_value(numbers).astype(np.float64))
        bounds = [boundary * np.float64(scale) for boundary in BOUNDARIES]
        above = [(x >= b) if at % 2 else (x > b) for at, b in enumerate(bounds)]
        expected = _signed(numbers, _nearest_even(above))
        for factors in _of_scale(scale):
            assert np.array_equal(_e2m1(numbers, *factors, 0x08080808), expected), scale


def test_e2m1_of_products() -> None:
    """Where float32 makes a little more of a tie, it goes up."""
    for scale in SCALES:
        numbers = _numbers_of(scale)
        with np.errstate(over="ignore"):
            product = np.abs(_value(numbers)) * (np.float32(1.0) / scale)
        above = [(product >= b) if at % 2 else (product > b) for at, b in enumerate(BOUNDARIES)]
        expected = _signed(numbers, _nearest_even(above))
        for factors in _of_scale(scale, is_product=True):
            assert np.array_equal(_e2m1(numbers, *factors, 0x08080808), expected), scale


def test_e2m1_of_groups_that_do_not_count() -> None:
    finite = FINITE[: FINITE.shape[0] // 8 * 8]
    for scale in (np.float32(1.0), np.float32(1.5)):
        for _, most, inverse, nudge in _of_scale(scale):
            codes = _e2m1(finite, 0, most, inverse, nudge, 0)
            assert not codes.any(), "no sign without a scale"
            codes = _e2m1(NUMBERS, 0x7FC00000, most, inverse, nudge, 0)
            assert (codes == 7).all(), "no number: the largest code"


def test_two_codes_are_a_byte() -> None:
    words = np.arange(1 << 16, dtype=np.uint32)
    low, high = words & np.uint32(0x0F0F), (words >> np.uint32(4)) & np.uint32(0x0F0F)
    (out,) = run(packed_bf16._PAIRED.value, 1, [low | (high << np.uint32(16)), high])
    assert np.array_equal(out & np.uint32(0xFFFF), words)
    assert np.array_equal(out >> np.uint32(16), high)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("exponent", [-120, -20, -9, -1, 0, 3, 13])
def test_e4m3_of_products_with_powers_of_two(exponent: int) -> None:
    factor = np.float32(2.0**exponent)
    expected = torch.from_numpy(_value(NUMBERS).astype(np.float64) * 2.0**exponent)
    codes = expected.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.masked_fill(expected.isnan(), 0x7F)
    words = np.full(NUMBERS.shape[0] // 8, factor.view(np.uint32) >> np.uint32(16))
    pair = (words | (words << np.uint32(16))).astype(np.uint32)
    out = run(packed_bf16._TO_E4M3.value, 2, [*_pairs(NUMBERS), *[pair] * 4])
    assert np.array_equal(np.stack(out, 1).view(np.uint8).ravel(), codes.numpy())


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_e4m3_of_infinite_groups() -> None:
    """0.0 makes infinities NaN and the rest signed zeros; NaN makes all NaN."""
    for factor, expected in ((0x0000, None), (0x7FC0, 0x7F)):
        pair = np.full(NUMBERS.shape[0] // 8, factor * 0x10001, np.uint32)
        out = run(packed_bf16._TO_E4M3.value, 2, [*_pairs(NUMBERS), *[pair] * 4])
        codes = np.stack(out, 1).view(np.uint8).ravel()
        signs = (NUMBERS >> 8) & 0x80
        zeros = np.where(np.isfinite(_value(NUMBERS)), signs, 0x7F)
        assert np.array_equal(codes, zeros if expected is None else np.full_like(codes, expected))


def test_the_larger_of_two() -> None:
    """Magnitudes decide, NaN wins, whichever side it is on."""
    x = np.random.default_rng(0).permutation(NUMBERS)
    both = (NUMBERS | (x << np.uint32(16)), x | (NUMBERS << np.uint32(16)))
    (out,) = run(packed_bf16._LARGER.value, 1, list(both))
    for half in (out & np.uint32(0x7FFF), (out >> np.uint32(16)) & np.uint32(0x7FFF)):
        one, other = np.abs(_value(NUMBERS)), np.abs(_value(x))
        wanted = np.maximum(one, other)
        found = _value(half)
        assert np.array_equal(found, wanted, equal_nan=True)


def test_the_largest_of_a_pair() -> None:
    """Both outputs are float32 bits of the larger magnitude, NaN above infinity."""
    x = np.random.default_rng(0).permutation(NUMBERS)
    out = run(packed_bf16._LARGEST.value, 2, [NUMBERS | (x << np.uint32(16))])
    assert np.array_equal(out[0], out[1])
    with np.errstate(invalid="ignore"):
        wanted = np.maximum(np.abs(_value(NUMBERS)), np.abs(_value(x)))
    assert np.array_equal(out[0].view(np.float32), wanted, equal_nan=True)


def test_a_sixth_decides_scales_like_a_quotient() -> None:
    """For numbers of eight bits, what ``encode_fp4`` takes for the ratio gives the same code."""
    x = torch.from_numpy(_value(FINITE[FINITE < 0x8000]).copy())
    codes = [
        ratio.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        for ratio in (x / 6.0, x * torch.tensor(0.16666667163372040))
    ]
    assert torch.equal(*codes)


def test_one_nan() -> None:
    """A conversion makes one NaN, of which another one becomes; all else stays."""
    converted = np.append(NUMBERS[~np.isnan(_value(NUMBERS))], np.uint32(0x7FFF))
    expected = np.where(converted == 0x7FFF, np.uint32(0x7FC0), converted)
    other = np.random.default_rng(0).permutation(converted.shape[0])
    words = converted | (converted[other] << np.uint32(16))
    (out,) = run(packed_bf16._WITH_ONE_NAN.value, 1, [words])
    assert np.array_equal(out & np.uint32(0xFFFF), expected)
    assert np.array_equal(out >> np.uint32(16), expected[other])


def test_choice_by_bits() -> None:
    x, y, mask = np.random.default_rng(0).integers(0, 1 << 32, (3, 1000), dtype=np.uint32)
    (out,) = run(packed_bf16._CHOSEN.value, 1, [mask, x, y])
    assert np.array_equal(out, (x & mask) | (y & ~mask))

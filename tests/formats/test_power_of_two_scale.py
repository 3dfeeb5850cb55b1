"""Power-of-two scales by bits: exponent of float32(amax / 448), plus 1 with any mantissa bit.

The golden pairs are exact powers (which frexp doubles), values one float32 step above a power
(which log2 in float32 rounds down) and values that a detour over bfloat16 moves to another binade.
"""

from __future__ import annotations

import pytest
import torch

from mlacast.formats.block_scaled import quantize_fp8_group
from tests.hand_codes import f32_down, f32_up

GOLDEN = [
    (448.0, 127),
    (3.5, 120),
    (7.0, 121),
    (0.875, 118),
    (448.0 * 2.0**-20, 107),
    (3.0, 120),
    (449.0, 128),
    (458752.0, 137),
    (f32_up(458752.0), 138),
    (f32_up(448.0), 128),
    (f32_down(448.0), 127),
    (f32_up(3.5), 121),
    (448.0 * 2.0**118, 245),
    (f32_up(448.0 * 2.0**-20), 108),
    (1.0, 119),
]


def one_peak(amax: float, size: int) -> torch.Tensor:
    """[1, size] with one element of magnitude amax, negative, and a smaller one."""
    x = torch.zeros(1, size)
    x[0, size - 1] = -amax
    x[0, 0] = amax / 4
    return x


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize(("amax", "byte"), GOLDEN)
def test_golden_bytes(amax: float, byte: int, size: int) -> None:
    _, scales = quantize_fp8_group(one_peak(amax, size), size, "ue8m0")
    assert scales.tolist() == [[byte]]


@pytest.mark.parametrize(("amax", "byte"), GOLDEN)
def test_golden_float32_powers(amax: float, byte: int) -> None:
    _, scales = quantize_fp8_group(one_peak(amax, 32), 32, "float32_pow2")
    assert scales.dtype == torch.float32
    assert scales.tolist() == [[2.0 ** (byte - 127)]]


def test_exact_multiples_of_448_and_their_neighbours() -> None:
    exponents = range(-20, 119)
    peaks = [448.0 * 2.0**exponent for exponent in exponents]
    near = [value for peak in peaks for value in (f32_down(peak), peak, f32_up(peak))]
    _, scales = quantize_fp8_group(torch.cat([one_peak(value, 32) for value in near]), 32, "ue8m0")
    expected = [127 + exponent + step for exponent in exponents for step in (0, 0, 1)]
    assert scales.flatten().tolist() == expected


def test_every_bfloat16_amax() -> None:
    """448 times the scale covers amax and half of that does not, for every bfloat16 amax."""
    bits = torch.arange(0x2F00, 0x7F80, dtype=torch.int32)
    amax = (bits << 16).view(torch.float32)
    x = torch.zeros(amax.numel(), 32)
    x[:, 5] = amax
    _, scales = quantize_fp8_group(x, 32, "float32_pow2")
    covered = scales[:, 0].double() * 448.0
    assert bool((covered >= amax.double()).all())
    assert bool((covered / 2 < amax.double()).all())


@pytest.mark.parametrize("sf", ["float32_pow2", "ue8m0"])
def test_mxfp8_floor_is_2_to_the_minus_22(sf: str) -> None:
    # 1e-4 / 448 = 2.23e-7 lies below 2^-22 = 2.38e-7, which covers amax up to 448 * 2^-22.
    values = [0.0, 1e-9, 1e-4, 448.0 * 2.0**-22, f32_up(448.0 * 2.0**-22)]
    x = torch.cat([one_peak(value, 32) for value in values])
    _, scales = quantize_fp8_group(x, 32, sf, amax_floor=1e-4)
    expected = [105, 105, 105, 105, 106]
    if sf == "float32_pow2":
        assert scales.flatten().tolist() == [2.0 ** (byte - 127) for byte in expected]
    else:
        assert scales.flatten().tolist() == expected

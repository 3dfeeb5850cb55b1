"""Per-group e4m3 against loops: float32, power-of-two and ue8m0 scales, groups of 128, 64 and 32.

The last column of the cases is the amax floor: 1e-10, or the 1e-4 of Mxfp8.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from mlacast.formats.block_scaled import dequantize_fp8_group, quantize_fp8_group
from tests.hand_codes import (
    E4M3_MAGNITUDES,
    FLOAT32_MAX,
    INF,
    NAN,
    e4m3_code,
    e4m3_value,
    f32,
    f32_down,
    f32_up,
    floats,
    same_bits,
    ue8m0_byte,
    ue8m0_value,
)


@dataclass(frozen=True)
class GroupCase:
    """One quantiser configuration."""

    group_size: int
    sf: str
    amax_floor: float = 1e-10

    def __str__(self) -> str:
        return f"g{self.group_size}-{self.sf}-floor{self.amax_floor:g}"


REGULAR = [
    GroupCase(group_size, sf)
    for group_size in (128, 64, 32)
    for sf in ("float32", "float32_pow2", "ue8m0")
]
MXFP8 = GroupCase(32, "ue8m0", 1e-4)
ALL_CASES = [*REGULAR, MXFP8]

# Made at import: under flushed denormals the conversion of a Python float would already give zero.
TINY = floats([5e-37, 2.0**-126, 2.0**-149, 1e-30])


@dataclass(frozen=True)
class HandGroup:
    """Codes of one group, its stored scale (value or byte) and the factor that dequantises."""

    codes: list[int]
    stored: float
    factor: float


def by_hand(values: list[float], case: GroupCase) -> HandGroup:
    """Quantise one group by the written rule."""
    has_nan = any(value != value for value in values)
    amax = max(max(abs(value) for value in values if value == value), 0.0)
    if case.sf == "float32":
        ratio = f32(max(min(amax, FLOAT32_MAX), f32(case.amax_floor)) / 448.0)
        stored = factor = NAN if has_nan else ratio
    else:
        byte = 254 if has_nan else ue8m0_byte(f32(max(amax, f32(case.amax_floor)) / 448.0))
        factor = ue8m0_value(byte)
        stored = byte if case.sf == "ue8m0" else factor
    if has_nan:
        return HandGroup([0x7F] * len(values), stored, factor)
    return HandGroup([e4m3_code(f32(value / factor)) for value in values], stored, factor)


def signed(values: list[float], size: int) -> list[float]:
    """Cut or fill with zeros to ``size`` values of alternating sign."""
    filled = (values + [0.0] * size)[:size]
    return [-value if index % 2 else value for index, value in enumerate(filled)]


def interesting_groups(size: int) -> list[list[float]]:
    """Groups of ``size`` values: every magnitude, exact powers, ties, zeros, denormals."""
    rng = random.Random(size)
    groups = [
        [f32(rng.gauss(0.0, 1.0) * 10.0**exponent) for _ in range(size)]
        for exponent in range(-36, 37, 3)
    ]
    # Every rounding boundary of the group's own scale with its neighbours, cut into groups.
    for amax in (448.0, 3.0, 0.3, 1234.5, 7.0e-3):
        scale = f32(f32(amax) / 448.0)
        middles = [
            f32((low + high) / 2 * scale)
            for low, high in zip(E4M3_MAGNITUDES, E4M3_MAGNITUDES[1:], strict=False)
        ]
        near = [point for middle in middles for point in (f32_down(middle), middle, f32_up(middle))]
        for start in range(0, len(near), size - 1):
            groups.append(signed([f32(amax), *near[start : start + size - 1]], size))
    groups += [signed([amax, amax / 3], size) for amax in (448.0, 3.5, 7.0, 0.875, 449.0, 3.0)]
    groups += [[0.0] * size, [-0.0] * size, signed([], size)]
    groups += [signed([amax], size) for amax in (5e-37, 2.0**-126, 2.0**-149, 1e-30, 1e-10, 1e-4)]
    groups += [signed([FLOAT32_MAX, 1.0, 1e30], size)]
    return [[f32(value) for value in group] for group in groups]


def stacked(groups: list[list[float]]) -> torch.Tensor:
    """[n, 2 * size]: two groups a row, an even number of groups."""
    even = groups + groups[:1] if len(groups) % 2 else groups
    return torch.tensor(even, dtype=torch.float32).reshape(len(even) // 2, -1)


def scale_bits(scales: torch.Tensor, case: GroupCase) -> list[float]:
    """Stored scales as Python numbers."""
    assert scales.dtype == (torch.uint8 if case.sf == "ue8m0" else torch.float32)
    values: list[float] = scales.flatten().tolist()
    return values


def quantize(values: torch.Tensor, case: GroupCase) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantiser under test; the floor is passed only where it is not the default."""
    if case.amax_floor == 1e-10:
        return quantize_fp8_group(values, case.group_size, case.sf)
    return quantize_fp8_group(values, case.group_size, case.sf, amax_floor=case.amax_floor)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_codes_and_scales_equal_the_loops(case: GroupCase) -> None:
    x = stacked(interesting_groups(case.group_size))
    codes, scales = quantize(x, case)
    assert codes.dtype == torch.uint8
    assert codes.shape == x.shape
    assert scales.shape == (x.shape[0], 2)
    expected = [by_hand(group, case) for group in x.reshape(-1, case.group_size).tolist()]
    assert scale_bits(scales, case) == [group.stored for group in expected]
    assert codes.reshape(-1, case.group_size).tolist() == [group.codes for group in expected]


def test_the_groups_above_tell_a_division_from_a_product() -> None:
    differing = 0
    for group in interesting_groups(128):
        scale = by_hand(group, GroupCase(128, "float32")).factor
        reciprocal = f32(1.0 / scale)
        differing += sum(
            e4m3_code(f32(value / scale)) != e4m3_code(f32(value * reciprocal)) for value in group
        )
    assert differing >= 20


def test_the_groups_above_tell_nearest_even_ties() -> None:
    # amax 448 gives scale 1, so the boundaries are exact ties; rounding them up would differ.
    group = [448.0, (1.0 + 1.125) / 2, (1.125 + 1.25) / 2, *[0.0] * 29]
    for sf in ("float32", "float32_pow2", "ue8m0"):
        codes, _ = quantize_fp8_group(floats(group)[None], 32, sf)
        assert codes[0, :3].tolist() == [0x7E, 0x38, 0x3A]


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_zero_groups(case: GroupCase) -> None:
    size = case.group_size
    x = floats([0.0] * size + [-0.0] * size).reshape(1, 2 * size)
    codes, scales = quantize(x, case)
    assert codes[0].tolist() == [0x00] * size + [0x80] * size
    floor = f32(f32(case.amax_floor) / 448.0)
    # 1e-10 / 448 = 2.23e-13 <= 2^-42 (byte 85); 1e-4 / 448 = 2.23e-7 <= 2^-22 (byte 105).
    power = -42 if case.amax_floor == 1e-10 else -22
    stored = {"float32": floor, "float32_pow2": 2.0**power, "ue8m0": 127 + power}[case.sf]
    assert scale_bits(scales, case) == [stored, stored]
    back = dequantize_fp8_group(codes, scales, size)
    assert bool((back == 0.0).all())
    assert torch.equal(torch.signbit(back), torch.signbit(x))


def check_tiny_groups(case: GroupCase) -> None:
    """One tiny value of each sign a group: zero codes and the scale of a zero group."""
    x = torch.zeros(4, case.group_size)
    x[:, 0], x[:, 1] = TINY, -TINY
    codes, scales = quantize(x, case)
    assert codes[:, :2].tolist() == [[0x00, 0x80]] * 4
    assert bool((codes[:, 2:] == 0).all())
    zero_scale = quantize(torch.zeros(1, case.group_size), case)[1].item()
    assert scale_bits(scales, case) == [zero_scale] * 4
    assert bool((dequantize_fp8_group(codes, scales, case.group_size) == 0.0).all())


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_tiny_groups_become_zero_codes(case: GroupCase) -> None:
    check_tiny_groups(case)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_tiny_groups_with_denormals_flushed(case: GroupCase, flushed_denormals: None) -> None:
    check_tiny_groups(case)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_nan_marks_its_whole_group_and_no_other(case: GroupCase) -> None:
    size = case.group_size
    x = torch.ones(3, 2 * size)
    x[1, size + 3] = NAN
    x[2, 0], x[2, 1] = NAN, INF
    codes, scales = quantize(x, case)
    clean_codes, clean_scales = quantize(torch.ones(1, 2 * size), case)
    assert torch.equal(codes[0], clean_codes[0])
    assert torch.equal(codes[1, :size], clean_codes[0, :size])
    assert torch.equal(codes[2, size:], clean_codes[0, size:])
    assert bool((codes[1, size:] == 0x7F).all())
    assert bool((codes[2, :size] == 0x7F).all())
    assert torch.equal(scales[0], clean_scales[0])
    assert scales[1, 0] == clean_scales[0, 0]
    for marked in (scales[1, 1], scales[2, 0]):
        if case.sf == "float32":
            assert bool(marked.isnan())
        else:
            assert marked.item() == (254 if case.sf == "ue8m0" else 2.0**127)
    assert bool(dequantize_fp8_group(codes, scales, size)[1, size:].isnan().all())


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_infinity_saturates(case: GroupCase) -> None:
    size = case.group_size
    group = [INF, -INF, FLOAT32_MAX, -FLOAT32_MAX, 2.0**120, 1.0, -1.0, 0.0, -0.0]
    group += [0.0] * (size - len(group))
    codes, scales = quantize(floats(group)[None], case)
    expected = by_hand(group, case)
    assert codes[0, :2].tolist() == [0x7E, 0xFE]
    assert codes[0].tolist() == expected.codes
    assert scale_bits(scales, case) == [expected.stored]
    stored = {"float32": f32(FLOAT32_MAX / 448.0), "float32_pow2": 2.0**127, "ue8m0": 254}
    assert scales.item() == stored[case.sf]


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_older_cast_changes_nothing(case: GroupCase, cast_gives_nan_above_448: None) -> None:
    # Infinite elements are the ones that pass 448 after the division.
    group = [INF, -INF, 1.0] + [0.0] * (case.group_size - 3)
    codes, _ = quantize(floats(group)[None], case)
    assert codes[0, :2].tolist() == [0x7E, 0xFE]
    finite = stacked(interesting_groups(case.group_size))
    assert bool(((quantize(finite, case)[0] & 0x7F) != 0x7F).all())


@pytest.mark.parametrize("case", REGULAR, ids=str)
def test_leading_dimensions_and_empty_tensors(case: GroupCase) -> None:
    size = case.group_size
    x = torch.randn(2, 3, 2 * size, generator=torch.Generator().manual_seed(1))
    codes, scales = quantize(x, case)
    assert codes.shape == (2, 3, 2 * size)
    assert scales.shape == (2, 3, 2)
    flat_codes, flat_scales = quantize(x.reshape(6, 2 * size), case)
    assert torch.equal(codes.reshape(6, -1), flat_codes)
    assert torch.equal(scales.reshape(6, -1), flat_scales)
    empty_codes, empty_scales = quantize(torch.empty(0, 2 * size), case)
    assert empty_codes.shape == (0, 2 * size)
    assert empty_scales.shape == (0, 2)
    assert scale_bits(empty_scales, case) == []


@pytest.mark.parametrize("case", REGULAR, ids=str)
def test_strided_input_is_read_through_its_strides_and_left_alone(case: GroupCase) -> None:
    parent = torch.randn(2 * case.group_size, 7, generator=torch.Generator().manual_seed(2))
    before = parent.clone()
    view = parent.t()[1::2]
    codes, scales = quantize(view, case)
    dense_codes, dense_scales = quantize(view.contiguous(), case)
    assert torch.equal(codes, dense_codes)
    assert torch.equal(scales, dense_scales)
    assert torch.equal(parent, before)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_dequantise_is_code_times_scale(case: GroupCase) -> None:
    size = case.group_size
    codes = (torch.arange(4 * size) % 256).to(torch.uint8).reshape(2, 2 * size)
    if case.sf == "ue8m0":
        stored = [0, 114, 127, 200]
        scales = torch.tensor(stored, dtype=torch.uint8).reshape(2, 2)
        factors = [ue8m0_value(byte) for byte in stored]
    else:
        factors = [f32(value) for value in (0.3, 2.0**-42, 1.0, 3e30)]
        scales = floats(factors).reshape(2, 2)
    expected = floats(
        f32(e4m3_value(code) * factor)
        for group, factor in zip(codes.reshape(4, size).tolist(), factors, strict=True)
        for code in group
    )
    back = dequantize_fp8_group(codes, scales, size)
    assert back.dtype == torch.float32
    assert same_bits(back, expected.reshape(2, 2 * size))

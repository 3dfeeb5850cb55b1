"""Inputs for number formats: every code, and float32 values around every rounding boundary."""

from __future__ import annotations

import torch
from torch import Tensor

from mlacast import formats
from tests.kernels import probes
from tests.quantizers import E2M1_MAGNITUDES, E4M3_MAGNITUDES


def neighbours(values: Tensor, steps: int = 3) -> Tensor:
    """Non-negative float32 values with their ``steps`` float32 neighbours on both sides."""
    bits = values.float().view(torch.int32)
    around = bits[:, None] + torch.arange(-steps, steps + 1, dtype=torch.int32)[None, :]
    return around.clamp(0, 0x7F7FFFFF).view(torch.float32).flatten()


def with_signs_and_specials(values: Tensor) -> Tensor:
    """Both signs, zeros, infinities, NaNs of both signs, and random bit patterns."""
    specials = torch.tensor([0.0, float("inf"), float("nan"), 3.4e38, 1e-45, 1e-38])
    positive = torch.cat((values, specials))
    random = torch.randint(-(2**31), 2**31, (20000,)).to(torch.int32).view(torch.float32)
    return torch.cat((positive, -positive, random))


def boundary_values(magnitudes: list[float]) -> Tensor:
    """Table values and the ties between neighbours, each with its float32 surroundings."""
    table = torch.tensor(magnitudes, dtype=torch.float64)
    ties = (table[1:] + table[:-1]) / 2
    past = torch.tensor([magnitudes[-1] * factor for factor in (1.03, 1.0625, 1.2, 2.0)])
    return neighbours(torch.cat((table, ties, past.double())).float())


def ratios() -> Tensor:
    """Every power of two of float32 with its surroundings, subnormals, zero and infinity."""
    exponents = torch.arange(255, dtype=torch.int32) << 23
    subnormals = (torch.ones(23, dtype=torch.int32) << torch.arange(23, dtype=torch.int32)).view(
        torch.float32
    )
    powers = neighbours(exponents.view(torch.float32))
    return torch.cat((powers, subnormals, torch.rand(2000), torch.tensor([float("inf")])))


def assert_encodes_like_the_library(helper: str, x: Tensor, device: str) -> None:
    """A device encoder against ``mlacast.formats``: every code equal."""
    codes = probes.apply_helper(helper, x.to(device)).cpu()
    expected = getattr(formats, helper)(x).to(torch.int32)
    wrong = codes != expected
    assert not bool(wrong.any()), [
        (float(value), hex(int(got)), hex(int(want)))
        for value, got, want in zip(
            x[wrong][:5], codes[wrong][:5], expected[wrong][:5], strict=True
        )
    ]


def assert_decodes_like_the_library(helper: str, count: int, device: str) -> None:
    """A device decoder against ``mlacast.formats``: every bit equal, NaN where it is NaN.

    Zeros may differ in sign: keys and values only enter sums that start at +0.
    """
    codes = torch.arange(count).to(torch.uint8)
    values = probes.apply_helper(helper, codes.to(device)).cpu()
    expected = getattr(formats, helper)(codes)
    assert torch.equal(values.isnan(), expected.isnan())
    assert bool(((values == 0) == (expected == 0)).all())
    real = ~expected.isnan() & (expected != 0)
    assert torch.equal(values[real].view(torch.int32), expected[real].view(torch.int32))


def check_encode_e4m3(device: str) -> None:
    """All boundaries of e4m3."""
    x = with_signs_and_specials(boundary_values(E4M3_MAGNITUDES))
    assert_encodes_like_the_library("encode_e4m3", x, device)


def check_encode_e2m1(device: str) -> None:
    """All boundaries of e2m1."""
    x = with_signs_and_specials(boundary_values(E2M1_MAGNITUDES))
    assert_encodes_like_the_library("encode_e2m1", x, device)


def check_encode_ue8m0(device: str) -> None:
    """All boundaries of ue8m0."""
    assert_encodes_like_the_library("encode_ue8m0", ratios(), device)

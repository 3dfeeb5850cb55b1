"""Compare a result with the oracle: the float32 budget must explain every difference."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.compat.flash_mla.element_orders import natural_codes, natural_scale_bytes
from tests.compat.flash_mla.number_grid import (
    E4M3_NAN,
    code_rank,
    e4m3_rank,
    e4m3_values,
    power_of_two,
    ue8m0_byte,
)
from tests.compat.flash_mla.oracle import UNIT, Attended


def assert_within(actual: Tensor, exact: Tensor, budget: Tensor, what: str) -> None:
    """Finite entries within ``budget`` of float64 ``exact``; infinite ones equal; never NaN."""
    assert actual.dtype == torch.float32, what
    assert actual.shape == exact.shape, f"{what}: {tuple(actual.shape)} != {tuple(exact.shape)}"
    finite = exact.isfinite()
    assert torch.equal(actual.double()[~finite], exact[~finite]), f"{what}: infinities differ"
    error = (actual.double() - exact)[finite].abs()
    bound = budget[finite]
    worst = error.numel() and float((error / bound).max())
    assert bool((error <= bound).all()), f"{what}: error is {worst:.2f} times its budget"


def assert_bf16_output(out: Tensor, attended: Attended) -> None:
    """bf16 output lies between the roundings of both ends of the interval: rounding is monotone."""
    assert out.dtype == torch.bfloat16
    assert out.shape == attended.out.shape
    low = (attended.out - attended.out_budget).bfloat16().double()
    high = (attended.out + attended.out_budget).bfloat16().double()
    value = out.double()
    inside = (low <= value) & (value <= high)
    assert bool(inside.all()), f"{int((~inside).sum())} of {inside.numel()} outputs unexplained"


def assert_mxfp8_output(out_fp8: Tensor, out_sf: Tensor, w: int, attended: Attended) -> None:
    """Codes and scale bytes of a fused call, after putting them back into natural order.

    A scale byte may be either of two only where amax / 448 is within float32 error of a power of
    two. A code may differ from the oracle's only where the budget reaches the boundary between the
    two, and by one step unless the rounding of the rotated query itself was open.
    """
    codes, sf_bytes = natural_codes(out_fp8, w), natural_scale_bytes(out_sf, w)
    assert codes.shape == attended.out.shape
    exact, budget = (torch.unflatten(x, -1, (16, 32)) for x in (attended.out, attended.out_budget))

    amax, slack = exact.abs().amax(-1), budget.amax(-1)
    # The division by 448 rounds once more.
    low_byte = ue8m0_byte((amax - slack) * (1 - 2 * UNIT))
    high_byte = ue8m0_byte((amax + slack) * (1 + 2 * UNIT))
    right = (low_byte <= sf_bytes) & (sf_bytes <= high_byte)
    assert bool(right.all()), f"{int((~right).sum())} of {right.numel()} scale bytes unexplained"

    assert not bool(((codes & 0x7F) == E4M3_NAN).any())
    scale = power_of_two(sf_bytes)[..., None]
    grouped = torch.unflatten(codes, -1, (16, 32))
    rank = code_rank(grouped)
    low, high = e4m3_rank((exact - budget) / scale), e4m3_rank((exact + budget) / scale)
    explained = (low <= rank) & (rank <= high)
    steps = (rank - e4m3_rank(exact / scale)).abs()
    assert bool(explained.all()), f"{int((~explained).sum())} of {rank.numel()} codes unexplained"
    assert not bool((steps[~attended.open_rounding] > 1).any())

    # Nearest of 4 significant bits is off by 2**-4, below the normal range by half of 2**-9.
    error = (e4m3_values(grouped) * scale - exact).abs()
    assert bool((error <= budget + torch.maximum(exact.abs() * 2.0**-4, scale * 2.0**-10)).all())


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor's elements as bytes, whatever its strides."""
    packed = torch.empty(tensor.numel(), dtype=tensor.dtype)
    packed.copy_(tensor.reshape(-1))
    return packed.view(torch.uint8)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal shapes, dtypes and bits (NaN and signed zeros included)."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert torch.equal(_bytes(actual), _bytes(expected))

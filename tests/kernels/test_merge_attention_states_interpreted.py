"""The portable merge, interpreted: parts, layouts, head widths, empty parts, outputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.kernels.triton.merge_attention_states import launch_merge_attention_states
from tests import oracles
from tests.format_cases import FAMILIES, NVFP4, QUANTISED, FormatCase, case_id
from tests.kernels import launches, store_cases

Parts = tuple[list[Tensor], list[Tensor]]


def draw(
    tokens: int, heads: int, width: int, count: int, dtype: torch.dtype = torch.float32
) -> Parts:
    """Parts whose sums are token-major; some are empty, and hold NaN there."""
    outs = [torch.randn(tokens, heads, width).to(dtype) for _ in range(count)]
    lses = [torch.randn(tokens, heads) * 2 for _ in range(count)]
    for part, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        empty = torch.rand(tokens, heads) < 0.25
        lse[empty] = math.inf if part % 2 else -math.inf
        out[empty] = math.nan
    return outs, lses


def run(parts: Parts, out: mlacast.QuantizedTensor, layout: str = "th") -> Tensor:
    """Run the launcher; returns lse [T, h]."""
    outs, lses = parts
    given = [lse.t().contiguous() if layout == "ht" else lse for lse in lses]
    lse = torch.full_like(given[0], launches.POISON)
    launch_merge_attention_states(outs, given, lse_layout=layout, out=out, lse=lse)
    return lse.t() if layout == "ht" else lse


def merge(parts: Parts, layout: str = "th") -> tuple[Tensor, Tensor]:
    """The kernel's float32 output and lse."""
    tokens, heads, width = parts[0][0].shape
    buffer = launches.float32_buffer(tokens, heads, features=width)
    lse = run(parts, buffer, layout)
    return buffer.data, lse


def assert_merged(parts: Parts, out: Tensor, lse: Tensor) -> None:
    """Compare with float64.

    Weights are good to about 40 u (u = 2**-24: exponents up to 16, exp, sum, division, and once
    more for each launch that a long list takes), times outputs below 8.
    """
    expected, expected_lse = oracles.merge_parts(*parts)
    rounds = 1 + max(len(parts[0]) - 2, 0) // 3
    bound = 40 * 2.0**-24 * rounds
    assert float((out.double() - expected).abs().max()) <= 2 * bound * 8
    finite = expected_lse.isfinite()
    assert torch.equal(lse[~finite].double(), expected_lse[~finite])
    assert bool(((lse.double() - expected_lse)[finite].abs() <= bound * 8).all())
    assert not out[~finite].any() and not torch.signbit(out[~finite]).any()


@pytest.mark.parametrize("layout", ["ht", "th"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8])
def test_any_number_of_parts(count: int, layout: str) -> None:
    parts = draw(9, 3, 128, count)
    assert_merged(parts, *merge(parts, layout))


@pytest.mark.parametrize("width", [1, 24, 64, 80, 128, 200, 256, 512])
@pytest.mark.parametrize("heads", [1, 5, 9])
def test_any_width_of_a_head(heads: int, width: int) -> None:
    parts = draw(3, heads, width, 2)
    assert_merged(parts, *merge(parts))


def test_parts_in_float16_and_float32_together() -> None:
    outs, lses = draw(5, 2, 128, 3)
    outs[1] = outs[1].half()
    assert_merged((outs, lses), *merge((outs, lses)))


def test_parts_and_sums_through_their_strides() -> None:
    outs, lses = draw(9, 4, 128, 2)
    expected, expected_lse = merge((outs, lses))
    wide = torch.full((9, 4, 256), float("nan"))
    wide[..., 64:192] = outs[1]
    turned = outs[0].transpose(0, 1).contiguous().transpose(0, 1)
    sums = torch.stack(lses, -1)
    buffer = launches.float32_buffer(9, 4, features=128)
    lse = torch.full((9, 4), launches.POISON)
    launch_merge_attention_states(
        [turned, wide[..., 64:192]],
        [sums[..., 0], sums[..., 1]],
        lse_layout="th",
        out=buffer,
        lse=lse,
    )
    assert oracles.same_bits(buffer.data, expected)
    assert oracles.same_bits(lse, expected_lse)


@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("width", [80, 128])
def test_a_lone_live_part_comes_back_bit_for_bit(width: int, count: int) -> None:
    live, lse = torch.randn(4, 3, width), torch.randn(4, 3) * 30
    live[0, 0, ::3], live[0, 1, ::3] = -0.0, 1e-42
    for place in range(count):
        outs = [torch.full_like(live, float("nan")) for _ in range(count)]
        lses = [torch.full_like(lse, -math.inf if at % 2 else math.inf) for at in range(count)]
        outs[place], lses[place] = live, lse
        out, merged = merge((outs, lses))
        assert oracles.same_bits(out, live)
        assert oracles.same_bits(merged, lse)


def test_a_nan_sum_stays_in_its_row() -> None:
    outs, lses = draw(4, 2, 128, 2)
    lses[1][2, 1] = float("nan")
    out, lse = merge((outs, lses))
    assert bool(out[2, 1].isnan().all()) and bool(lse[2, 1].isnan())
    out[2, 1], lse[2, 1] = 0.0, 0.0
    assert not out.isnan().any() and not lse.isnan().any()


def check_store(
    case: FormatCase, parts: Parts, groups: int, first: int = 0, total: int | None = None
) -> None:
    """Rows ``first``.. of a buffer: codes and scales of the float32 output, nothing else."""
    tokens, heads, width = parts[0][0].shape
    rows = tokens if total is None else total
    actual, expected = (
        store_cases.empty_buffer(case, rows, groups, heads * width // groups, "cpu")
        for _ in range(2)
    )
    run(parts, actual[first : first + tokens])
    values = merge(parts)[0].reshape(tokens, groups, heads * width // groups)
    mlacast.reference.quantize_output(values, expected[first : first + tokens])
    store_cases.assert_same_storages(actual, expected)


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_bytes_of_every_format_in_a_range(case: FormatCase) -> None:
    check_store(case, draw(9, 8, 128, 2), 2, 2, 14)
    check_store(case, draw(3, 4, 512, 3), 2, 2, 7)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_the_last_range_clears_the_padding(case: FormatCase) -> None:
    for tokens in (11, 16):
        check_store(case, draw(tokens, 4, 128, 2), 1, 58, 58 + tokens)


@pytest.mark.parametrize("case", [case for case in FAMILIES if case.order == "head"], ids=case_id)
def test_scales_across_heads_and_columns_that_pad(case: FormatCase) -> None:
    """640 features in 8 heads of 80, groups of 128; 480 are 30 columns of NVFP4 in 8 tiles."""
    check_store(case, draw(3, 8, 80, 2), 5, 1, 4)
    if case.kind in ("Nvfp4", "Mxfp8", "Fp8Tensor"):
        check_store(case, draw(3, 20, 24, 2), 1, 0, 3)
        check_store(case, draw(3, 20, 24, 2), 5, 1, 9)


@pytest.mark.parametrize("first", [0, 120, 127])
def test_swizzled_scales_across_tiles_of_rows(first: int) -> None:
    check_store(NVFP4, draw(9, 4, 128, 2), 1, first, first + 9)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_groups_around_every_power_of_two(case: FormatCase) -> None:
    """One part with the sum zero is stored as it is."""
    group = {"Mxfp8": 32, "Nvfp4": 16, "Fp8Tensor": 64}.get(case.kind, case.group)
    x = store_cases.hostile_rows(group, 16)
    tokens = x.shape[0]
    actual = store_cases.empty_buffer(case, tokens, 1, 16 * 512, "cpu")
    expected = store_cases.empty_buffer(case, tokens, 1, 16 * 512, "cpu")
    run(([x.reshape(tokens, 64, 128)], [torch.zeros(tokens, 64)]), actual)
    mlacast.reference.quantize_output(x.reshape(tokens, 1, 16 * 512), expected)
    store_cases.assert_same_storages(actual, expected)

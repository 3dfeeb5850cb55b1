"""The storing epilogue, interpreted: bytes equal the reference's for given accumulators."""

from __future__ import annotations

import pytest
import torch

from tests.format_cases import FAMILIES, NVFP4, QUANTISED, FormatCase, case_id
from tests.kernels import store_cases


def _group_of(case: FormatCase) -> int:
    return {"Mxfp8": 32, "Nvfp4": 16, "Fp8Tensor": 64}.get(case.kind, case.group)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_groups_around_every_power_of_two(case: FormatCase) -> None:
    x = store_cases.hostile_rows(_group_of(case), 16)
    store_cases.check_store(case, x, 1, "cpu", block_h=16)


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_every_format_in_ranges_of_a_shared_buffer(case: FormatCase) -> None:
    """Three ranges; two rows that nobody writes keep their bytes, and so does the padding."""
    x = torch.randn(5, 6, 512)
    store_cases.check_store(case, x, 2, "cpu", bounds=(0, 2, 3, 5), total=7)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_the_last_range_clears_the_padding(case: FormatCase) -> None:
    store_cases.check_store(case, torch.randn(5, 3, 512), 1, "cpu", bounds=(0, 2, 5))


@pytest.mark.parametrize("case", [case for case in QUANTISED if case.order == "head"], ids=case_id)
def test_groups_that_are_not_whole_heads(case: FormatCase) -> None:
    """Down to one scale a group: the unused bytes of a packed word are zero."""
    for heads, groups in ((3, 4), (1, 4)):
        store_cases.check_store(case, torch.randn(2, heads, 512), groups, "cpu")


@pytest.mark.parametrize("heads", [2, 4, 10])
def test_chunk32_with_any_number_of_heads_per_group(heads: int) -> None:
    case = FormatCase("Mxfp8", order="chunk32")
    for groups in (1, 2):
        store_cases.check_store(case, torch.randn(2, heads, 512), groups, "cpu")


def test_swizzled_scales_across_a_row_tile() -> None:
    """Rows 127 and 128 are in different tiles, and the last tile has 125 rows to clear."""
    store_cases.check_store(NVFP4, torch.randn(131, 1, 512), 1, "cpu", bounds=(126, 131), total=131)


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), -float("inf"), 1e-42])
@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_rows_of_one_special_value(case: FormatCase, value: float) -> None:
    x = torch.randn(2, 2, 512)
    x[0] = value
    x[1, 1, ::3] = value
    store_cases.check_store(case, x, 1, "cpu", total=3)

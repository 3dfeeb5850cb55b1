"""Storing epilogues of the Hopper kernels on the device: bytes equal the reference's.

As functions on given accumulators, which kernels fill from memory; the accumulator has the layout
that the products of a warp group have.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlacast
from tests.format_cases import MXFP8_CHUNK32, MXFP8_HEAD, NVFP4, FormatCase
from tests.gpu.hopper_cases import on_hopper
from tests.gpu.hopper_stores import (
    FAMILIES,
    boundary_rows,
    check_store,
    draw_factors,
    family_id,
    special_rows,
)
from tests.gpu.steps import CUDA

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from tests.kernels import sm90_probes  # noqa: E402

pytestmark = on_hopper


def _scaled(x: Tensor, factors: Tensor, out: mlacast.QuantizedTensor) -> None:
    sm90_probes.store_scaled(x, factors, out, masked=False)


def _masked(x: Tensor, factors: Tensor, out: mlacast.QuantizedTensor) -> None:
    sm90_probes.store_scaled(x, factors, out, masked=True)


STORES = {"scaled": _scaled, "masked": _masked}
# Each is a variant of its kernel.
TILES = [("scaled", 128), ("scaled", 40), ("masked", 128), ("masked", 40)]


@pytest.mark.parametrize(("store", "heads"), TILES)
@pytest.mark.parametrize("family", FAMILIES, ids=family_id)
def test_bytes(store: str, heads: int, family: tuple[FormatCase, ...]) -> None:
    """Two tiles of heads, or one that is not full; 8 heads are a group."""
    function = STORES[store]
    for case in family:
        for x in (boundary_rows(case, heads), special_rows(heads)):
            check_store(function, case, x, torch.ones(x.shape[:2]), heads // 8, CUDA)
            scaled, factors = draw_factors(x)
            if store == "masked":
                factors[torch.rand(factors.shape) < 0.2] = 0.0
            check_store(function, case, scaled, factors, heads // 8, CUDA)
        x = torch.randn(5, heads, 512)
        ones = torch.ones(x.shape[:2])
        # Rows that nobody writes keep their bytes; the range that ends a buffer clears its padding.
        check_store(function, case, x, ones, heads // 8, CUDA, (2, 3, 5), 7)
        check_store(function, case, x, ones, heads // 8, CUDA, (2, 5))


@pytest.mark.parametrize("store", ["scaled", "masked"])
@pytest.mark.parametrize(("heads", "groups"), [(64, 1), (6, 1), (64, 64), (66, 33)])
@pytest.mark.parametrize("case", [MXFP8_HEAD, MXFP8_CHUNK32, NVFP4], ids=lambda case: case.id)
def test_any_number_of_heads_in_a_group(
    case: FormatCase, heads: int, groups: int, store: str
) -> None:
    """A word of scales belongs to four heads, to four blocks of one, or to fewer of both."""
    check_store(STORES[store], case, torch.randn(3, heads, 512), torch.ones(3, heads), groups, CUDA)


@pytest.mark.parametrize("store", ["scaled", "masked"])
@pytest.mark.parametrize("heads", [64, 6])
def test_swizzled_scales_of_ranges_that_cut_tiles_of_128_rows(heads: int, store: str) -> None:
    x = torch.randn(300, heads, 512)
    ones = torch.ones(x.shape[:2])
    for bounds, total in (((300,), 300), ((100, 130, 257, 300), 300), ((127, 129), 520)):
        part = x[: bounds[-1]]
        check_store(STORES[store], NVFP4, part, ones[: len(part)], 1, CUDA, bounds, total)

"""The Hopper decode kernel on the device: numbers, neighbours, repeats, splits, batches, caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mlacast
from tests.cache_writers import draw_records
from tests.gpu.hopper_cases import (
    EMPTY_TOKEN,
    ENDS,
    MIDDLE,
    MX,
    MX32,
    NVFP4,
    Case,
    Shape,
    case_id,
    on_hopper,
    spoil_angles,
    spoil_query,
)
from tests.gpu.hopper_checks import Written, assert_right, assert_same
from tests.gpu.hopper_decode_calls import check_call, check_decode, draw_decode, draw_growing
from tests.gpu.hopper_pools import (
    Geometry,
    build_pool,
    draw_edge_records,
    layout_of,
    minus_zeros,
)
from tests.gpu.steps import CUDA

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from mlacast.kernels.gluon.sm90.sparse_mla_decode import launch_sparse_mla_decode  # noqa: E402

pytestmark = on_hopper

V4, V41, V32 = ("V4",), ("V41",), ("V32",)
V4_V4, V41_V41, V41_FP4 = ("V4", "V4"), ("V41", "V41"), ("V41", "V41_FP4")
INLINE, INLINE_FP4 = ("V41_INLINE", "V41_INLINE"), ("V41_INLINE", "V41_FP4_INLINE")
GROUP_128 = mlacast.Fp8Group(128, "float32", "mn_major")
PACKED_128 = mlacast.Fp8Group(128, "ue8m0_packed", "mn_major")
POW2_64 = mlacast.Fp8Group(64, "float32_pow2", "row_major")
GROUP_32 = mlacast.Fp8Group(32, "float32", "row_major")
TENSOR = mlacast.Fp8Tensor(0.002)
PLAIN = Case("v41-bf16", pools=V41)
CASES = (
    PLAIN,
    Case("v41-inline-h96", 96, sink=True, lengths=True, pools=INLINE),
    Case("v41-v41-fused", 64, MX, 8, "interleaved", True, True, True, pools=V41_V41),
    Case("v41-v41-chunk-h128", 128, MX32, 16, "half", True, True, True, "chunk16", V41_V41, ENDS),
    Case("v4-v4-fused", 64, MX, 8, "interleaved", True, True, True, pools=V4_V4, places=ENDS),
    Case("v4-chunk-h16", 16, MX32, 2, "interleaved", True, False, False, "chunk16", V4, MIDDLE),
    Case("v41-fp4-fused", 64, MX32, 8, "interleaved", True, True, True, "chunk16", V41_FP4, MIDDLE),
    Case("inline-fp4-inline", 32, TENSOR, 4, lengths=True, pools=INLINE_FP4),
    Case("v4-group128", 128, GROUP_128, 8, "half", pools=V4_V4, places=ENDS),
    Case("v32-bf16", 128, pools=V32),
    Case("v32-fused", 64, MX, 8, "interleaved", False, True, True, pools=V32, places=ENDS),
    Case("v32-group64-h48", 48, POW2_64, 6, "half", lengths=True, pools=V32),
    Case("v41-group32", 64, GROUP_32, 8, "half", pools=V41),
    Case("v41-packed", 128, PACKED_128, 16, pools=V41_V41, places=MIDDLE),
    Case("v41-nvfp4-fused", 64, NVFP4, 8, "interleaved", True, True, True, pools=V41_V41),
    Case("v4-nvfp4-h40", 40, NVFP4, 1, "half", pools=V4, places=MIDDLE),
    Case("v32-nvfp4", 128, NVFP4, 16, lengths=True, pools=V32, places=ENDS),
)
# The store of a split call is that of the merge: test_hopper_merge.py has every kind of it.
SPLIT = [case for case in CASES if case.name.endswith(("fused", "v41-bf16", "fp4-inline"))]
FUSED = Case("fused-bf16", 64, mlacast.Bf16(), 1, "half", True, True, True, "chunk16", V41_V41)
SMALL = Geometry(8, 17, gap=16)
WIDE = Geometry(40, 17, gap=16)
WIDER = Geometry(40, 17, gap=48, start=64)
ALONE = Geometry(680, 1, gap=32)
EDGES = [Case("+".join(pools), pools=pools) for pools in (V4, V41, V41_FP4, INLINE_FP4, V32)]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_one_split_against_float64(case: Case) -> None:
    for shape in (Shape(6, 128, case.places[0], 512), Shape(290, 64, case.places[1], 128)):
        check_decode(launch_sparse_mla_decode, case, shape, CUDA)


@pytest.mark.parametrize("case", SPLIT, ids=case_id)
def test_splits_against_float64(case: Case) -> None:
    """Few and many tokens (the merge has another program for those), empty main lists."""
    for shape in (
        Shape(6, 128, extra_topk=512, num_splits=3),
        Shape(38, 192, extra_topk=64, num_splits=2),
        Shape(6, 0, extra_topk=128, num_splits=2),
        Shape(6, 256, extra_topk=256, num_splits=None),
    ):
        check_decode(launch_sparse_mla_decode, case, shape, CUDA)


@pytest.mark.parametrize("widths", [(100, 70), (1, 0)])
def test_lists_that_are_no_whole_blocks(widths: tuple[int, int]) -> None:
    case = Case("v41-fp4", pools=V41_FP4)
    for tokens, width, extra_width in ((278, *widths), (6, *widths)):
        check_decode(
            launch_sparse_mla_decode, case, Shape(tokens, width, extra_topk=extra_width), CUDA
        )


@pytest.mark.parametrize(("extra_topk", "splits"), [(256, 1), (512, 2)])
def test_batch_invariant_rows_equal_batches_of_one(extra_topk: int, splits: int) -> None:
    """The merge of the batch takes eight heads at a time, that of one token a single head."""
    call = draw_decode(FUSED, Shape(38, 128, extra_topk=extra_topk), CUDA)

    def run(rows: slice, num_splits: int | None = None) -> Written:
        options: dict[str, Any] = {"num_splits": num_splits, "batch_invariant": True}
        return call.run(launch_sparse_mla_decode, FUSED, rows=rows, **options)

    together = run(slice(None))
    assert_same(together, run(slice(None), splits))
    for row in (0, EMPTY_TOKEN, 8, 36):
        alone = slice(row, row + 1)
        assert_same(together.rows(alone), run(alone), "a batch of one")
    assert_right(FUSED, True, together, call.expected())


def test_the_number_of_splits_does_not_matter() -> None:
    """Each within its bound; the logarithms, whose scores are the same, closer to each other."""
    call = draw_decode(FUSED, Shape(6, 256, extra_topk=384), CUDA)
    expected = call.expected()
    one = call.run(launch_sparse_mla_decode, FUSED)
    for num_splits in (2, 3, 7, 33):
        several = call.run(launch_sparse_mla_decode, FUSED, num_splits=num_splits)
        # 640 positive weights are added in blocks: at most 6 steps in a block, 10 blocks and 33
        # splits, so 49 roundings at random, 4 * sqrt(49) * 2**-24 = 1.7e-6. Exponentials, which
        # rescale sums too now and then, are right to 2**-22: as much again. Twice, for two runs.
        assert torch.allclose(several.lse, one.lse, rtol=2.0**-20, atol=2.0**-17)
        assert_right(FUSED, True, several, expected)
    assert_right(FUSED, True, one, expected)


@pytest.mark.parametrize("case", EDGES, ids=case_id)
def test_caches(case: Case) -> None:
    """One item for each format, since all of it is one variant of the kernel."""
    _check_one_slot_many_times(case)
    _check_pages_of_any_size_and_distance(case)
    _check_zeros_of_both_signs_and_the_largest_codes(case)


def _check_one_slot_many_times(case: Case) -> None:
    """128 equal weights are exact, so the output is the row itself; also without any column."""
    pools = [build_pool(name, SMALL, [5]) for name in case.pools]
    call = draw_decode(case, Shape(6, 128, extra_topk=64), CUDA, (SMALL, SMALL), pools)
    call.indices.fill_(5)
    if call.options["extra_indices"] is not None:
        call.options["extra_indices"].fill_(-1)
    written = call.run(launch_sparse_mla_decode, case)
    row = call.pools[0].rows[5, :512].bfloat16()
    assert torch.equal(written.out.data.view(6, case.heads, 512), row.expand(6, case.heads, 512))
    assert_right(case, True, written, call.expected())
    check_decode(launch_sparse_mla_decode, case, Shape(6, 0), CUDA)


def _check_pages_of_any_size_and_distance(case: Case) -> None:
    """The same records in pages of 17 tokens and of one, with gaps between them."""
    call = draw_decode(case, Shape(38, 128, extra_topk=128), "cpu", (WIDE, WIDE))
    slots = [(~pool.rows[:, 0].isnan()).nonzero()[:, 0].tolist() for pool in call.pools]
    records = [
        draw_records(layout_of(name), len(used))
        for name, used in zip(case.pools, slots, strict=True)
    ]
    results = []
    for geometry in (WIDE, WIDER, ALONE):
        pools = tuple(
            build_pool(name, geometry, used, drawn)
            for name, used, drawn in zip(case.pools, slots, records, strict=True)
        )
        placed = replace(call, pools=pools).on(CUDA)
        results.append(placed.run(launch_sparse_mla_decode, case))
        assert_same(results[0], results[-1], "another place of the pages")
    assert_right(case, True, results[-1], placed.expected())


def _check_zeros_of_both_signs_and_the_largest_codes(case: Case) -> None:
    shape = Shape(38, 128, extra_topk=128)
    every = range(SMALL.slots)
    for draw in (draw_edge_records, minus_zeros):
        pools = [build_pool(name, SMALL, every, draw(name, SMALL.slots)) for name in case.pools]
        call = draw_decode(case, shape, CUDA, (SMALL, SMALL), pools)
        call.q[:, ::2] = -0.0
        check_call(launch_sparse_mla_decode, case, shape, call)


def test_scores_that_grow_along_a_row() -> None:
    """The base of the weights moves many times, and what came before is rescaled each time."""
    call = draw_growing(PLAIN, CUDA)
    expected = call.expected()
    for num_splits in (1, 3):
        written = call.run(launch_sparse_mla_decode, PLAIN, num_splits=num_splits)
        assert_right(PLAIN, True, written, expected)


@pytest.mark.parametrize("spoil", ["query", "angles"])
def test_an_empty_token_ignores_what_it_has(spoil: str) -> None:
    call = draw_decode(FUSED, Shape(14, 128, extra_topk=64), CUDA)
    if spoil == "angles":
        call = replace(call, options=spoil_angles(call.options))
    spoilt = replace(call, q=spoil_query(call.q)) if spoil == "query" else call
    expected = call.expected()
    for num_splits in (1, 3):
        written = spoilt.run(launch_sparse_mla_decode, FUSED, num_splits=num_splits)
        assert_right(FUSED, True, written, expected)

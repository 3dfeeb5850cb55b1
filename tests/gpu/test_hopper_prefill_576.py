"""The Hopper prefill kernel for d_qk 576 on the device: numbers, neighbours, repeats, lone rows."""

from __future__ import annotations

import pytest

import mlacast
from tests.gpu.hopper_cases import ENDS, MX, MX32, NVFP4, Case, Shape, case_id, on_hopper
from tests.gpu.hopper_prefill_calls import (
    check_case,
    check_empty_token,
    check_growing,
    check_prefill,
)
from tests.gpu.steps import CUDA

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576 import (  # noqa: E402
    launch_sparse_mla_prefill_576,
)

pytestmark = on_hopper

PLAIN = Case("bf16", 128)
ROTATED = Case("bf16-interleaved", 128, pairing="interleaved")
GROUP_128 = mlacast.Fp8Group(128, "float32", "mn_major")
PACKED_128 = mlacast.Fp8Group(128, "ue8m0_packed", "mn_major")
POW2_64 = mlacast.Fp8Group(64, "float32_pow2", "row_major")
GROUP_32 = mlacast.Fp8Group(32, "float32", "row_major")
CASES = (
    PLAIN,
    Case("bf16-h64-length-sink", 64, sink=True, lengths=True),
    ROTATED,
    Case("bf16-h96-half", 96, pairing="half", sink=True),
    Case("bf16-h1", 1, pairing="interleaved", lengths=True),
    Case("mx-head", 128, MX, 16, "interleaved", sink=True, lengths=True),
    Case("mx-chunk-h16-half", 16, MX32, 2, "half", sink=True, lengths=True, places=ENDS),
    Case("group128-f32", 64, GROUP_128, 8, "interleaved", places=ENDS),
    Case("group128-packed", 128, PACKED_128, 8, "half", places=ENDS),
    Case("group64-pow2", 40, POW2_64, 5, sink=True),
    Case("group32-f32", 64, GROUP_32, 4, lengths=True),
    Case("fp8-tensor", 64, mlacast.Fp8Tensor(0.001), 8, "interleaved"),
    Case("nvfp4", 128, NVFP4, 16, "interleaved", sink=True, lengths=True, places=ENDS),
    Case("nvfp4-h40-half", 40, NVFP4, 1, "half"),
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_against_float64(case: Case) -> None:
    check_case(launch_sparse_mla_prefill_576, case, 576, CUDA)


@pytest.mark.parametrize("widths", [(100, 33), (1, 0)])
def test_lists_that_are_no_whole_blocks(widths: tuple[int, int]) -> None:
    for tokens, topk in zip((278, 6), widths, strict=True):
        check_prefill(launch_sparse_mla_prefill_576, PLAIN, Shape(tokens, topk), 576, CUDA)


def test_scores_that_grow_along_a_row() -> None:
    check_growing(launch_sparse_mla_prefill_576, PLAIN, 576, CUDA)


@pytest.mark.parametrize("spoil", ["query", "angles"])
def test_an_empty_token_ignores_what_it_has(spoil: str) -> None:
    check_empty_token(launch_sparse_mla_prefill_576, ROTATED, spoil, 576, CUDA)

"""The Hopper prefill kernel for d_qk 512 on the device: numbers, neighbours, repeats, lone rows."""

from __future__ import annotations

import pytest

import mlacast
from tests.gpu.hopper_cases import (
    ENDS,
    MIDDLE,
    MX,
    MX32,
    NVFP4,
    Case,
    Shape,
    case_id,
    on_hopper,
)
from tests.gpu.hopper_prefill_calls import (
    check_case,
    check_empty_token,
    check_growing,
    check_prefill,
    check_shared_tiles,
    share_tiles,
)
from tests.gpu.steps import CUDA

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from mlacast.kernels.gluon.sm90.sparse_mla_prefill import launch_sparse_mla_prefill  # noqa: E402

pytestmark = on_hopper

PLAIN = Case("bf16")
FUSED = Case("fused-bf16", 64, pairing="interleaved", norm=True, order="chunk16")
GROUP_128 = mlacast.Fp8Group(128, "float32", "mn_major")
PACKED_128 = mlacast.Fp8Group(128, "ue8m0_packed", "mn_major")
POW2_64 = mlacast.Fp8Group(64, "float32_pow2", "row_major")
GROUP_32 = mlacast.Fp8Group(32, "float32", "row_major")
CASES = (
    PLAIN,
    Case("bf16-h128-length-sink", 128, sink=True, lengths=True),
    Case("mx-head", 64, MX, 8, "interleaved", True),
    Case("mx-chunk", 64, MX32, 8, "interleaved", True, True, True, "chunk16", places=ENDS),
    Case("mx-chunk-h128-half", 128, MX32, 16, "half", True, True, False, "chunk16", places=ENDS),
    Case("mx-head-h128", 128, MX, 16, "half", True, True, True, places=MIDDLE),
    Case("mx-chunk-h16", 16, MX32, 2, "interleaved", True, True, True, "chunk16", places=MIDDLE),
    Case("bf16-h96", 96, pairing="half", norm=True, sink=True),
    Case("group128-f32", 64, GROUP_128, 8, "interleaved", True, places=ENDS),
    Case("group128-f32-sink", 64, GROUP_128, 8, "half", True, True, True),
    Case("group128-packed", 128, PACKED_128, 8, "half", places=ENDS),
    Case("group64-pow2", 40, POW2_64, 5, sink=True),
    Case("group32-f32", 64, GROUP_32, 4, lengths=True),
    Case("fp8-tensor", 64, mlacast.Fp8Tensor(0.001), 8, "interleaved", True),
    Case("nvfp4", 64, NVFP4, 8, "interleaved", True, True, True, "chunk16", places=ENDS),
    Case("nvfp4-h128-half", 128, NVFP4, 1, "half", True, places=MIDDLE),
    Case("nvfp4-h40", 40, NVFP4, 5, sink=True, lengths=True),
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_against_float64(case: Case) -> None:
    check_case(launch_sparse_mla_prefill, case, 512, CUDA)


@pytest.fixture(params=[1, 2], ids=["own-tiles", "shared-tiles"])
def programs_a_tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens by programs with tiles of their own, and by two a tile."""
    share_tiles(monkeypatch, request.param)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_programs_that_share_a_tile_store_the_same_bytes(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_shared_tiles(launch_sparse_mla_prefill, case, monkeypatch, CUDA)


@pytest.mark.parametrize("widths", [(100, 33), (1, 0)])
def test_lists_that_are_no_whole_blocks(widths: tuple[int, int]) -> None:
    for tokens, topk in zip((278, 6), widths, strict=True):
        check_prefill(launch_sparse_mla_prefill, PLAIN, Shape(tokens, topk), 512, CUDA)


@pytest.mark.usefixtures("programs_a_tile")
def test_scores_that_grow_along_a_row() -> None:
    check_growing(launch_sparse_mla_prefill, PLAIN, 512, CUDA)


@pytest.mark.usefixtures("programs_a_tile")
@pytest.mark.parametrize("spoil", ["query", "angles"])
def test_an_empty_token_ignores_what_it_has(spoil: str) -> None:
    check_empty_token(launch_sparse_mla_prefill, FUSED, spoil, 512, CUDA)

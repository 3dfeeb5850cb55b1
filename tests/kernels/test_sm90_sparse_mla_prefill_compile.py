"""The Hopper prefill kernel compiles for sm_90a as its pipeline needs it; no GPU is used.

A spill in a role, an ignored register count or a serialised wgmma costs more than any tuning wins,
and each is a silent note of ptxas.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.sm90_build import build, needs_gated_triton

pytestmark = needs_gated_triton

PLAIN = {
    "HEAD_BLOCKS": 1,
    "FULL_TILES": True,
    "CHUNK16": False,
    "HAS_NORM": False,
    "HAS_ROPE": False,
    "HALF_PAIRING": False,
    "HAS_SINK": False,
    "HAS_LENGTH": False,
    "KIND": 0,
    "GROUP": 512,
    "F": 32768,
    "CHUNK32": False,
    "AMAX_FLOOR": 0.0,
}
FUSED = PLAIN | {"HAS_NORM": True, "HAS_ROPE": True, "HAS_SINK": True, "HAS_LENGTH": True}


def _fp8(kind: int, group: int, **constants: bool) -> dict[str, Any]:
    """Everything fused, eight heads to a group of the output, one scale to ``group`` values."""
    scaled = {"KIND": kind, "GROUP": group, "F": 4096, "AMAX_FLOOR": 1e-4}
    return FUSED | scaled | constants


# What dispatch sends here, with the bytes that a thread may spill: once per tile, and none in a
# loop over keys. Decision 010 says where they come from.
CASES = {
    "plain-bf16": (PLAIN, 0),
    "fused-bf16": (FUSED, 0),
    "fused-fp8-tensor": (_fp8(1, 512), 0),
    "fused-mxfp8": (_fp8(4, 32), 4),
    "fused-chunk16-chunk32-mxfp8": (_fp8(4, 32, CHUNK16=True, CHUNK32=True), 4),
    "fused-half-pairing-mxfp8": (_fp8(4, 32, HALF_PAIRING=True), 20),
    "fused-partial-tile-mxfp8": (_fp8(4, 32, FULL_TILES=False), 4),
    "fused-group128-float32": (_fp8(2, 128), 20),
    "fused-group128-packed": (_fp8(4, 128), 8),
    "fused-group64-pow2": (_fp8(3, 64), 8),
    "fused-group32-float32": (_fp8(2, 32), 176),
    "fused-nvfp4": (_fp8(5, 16), 4),
    "fused-half-pairing-partial-tile-nvfp4": (_fp8(5, 16, HALF_PAIRING=True, FULL_TILES=False), 4),
}


@pytest.mark.parametrize(("constants", "spill_bytes"), CASES.values(), ids=CASES)
def test_compiles_without_serialised_wgmma_or_spills_in_key_loops(
    constants: dict[str, Any], spill_bytes: int
) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_prefill import OPTIONS, sparse_mla_prefill_kernel

    built = build(sparse_mla_prefill_kernel, OPTIONS, constants)
    assert built.spilled_bytes <= spill_bytes
    assert set(built.products) == {"64x64", "64x128"}, "scores and output"
    assert built.copy_bits == {"128"}, "rows travel in 16-byte pieces"
    # Stores of single numbers, where the compiler no longer sees neighbours, double the time of a
    # bfloat16 output.
    assert "STG.E.U16" not in built.sass
    if constants["KIND"] == 0:
        assert built.sass.count("STG.E.128") == 32

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


# What dispatch sends here: every kind of output, and each option with some of them.
CASES = {
    "plain-bf16": PLAIN,
    "fused-half-pairing-partial-tile-bf16": FUSED | {"HALF_PAIRING": True, "FULL_TILES": False},
    "fused-chunk16-bf16": FUSED | {"CHUNK16": True},
    "fused-fp8-tensor": _fp8(1, 512),
    "fused-mxfp8": _fp8(4, 32),
    "fused-chunk16-chunk32-mxfp8": _fp8(4, 32, CHUNK16=True, CHUNK32=True),
    "fused-half-pairing-partial-tile-mxfp8": _fp8(4, 32, HALF_PAIRING=True, FULL_TILES=False),
    "fused-group128-float32": _fp8(2, 128),
    "fused-group128-packed": _fp8(4, 128),
    "fused-half-pairing-partial-tile-group64-float32": _fp8(
        2, 64, HALF_PAIRING=True, FULL_TILES=False
    ),
    "fused-group64-pow2": _fp8(3, 64),
    "fused-group32-float32": _fp8(2, 32),
    "fused-nvfp4": _fp8(5, 16),
    "fused-half-pairing-partial-tile-nvfp4": _fp8(5, 16, HALF_PAIRING=True, FULL_TILES=False),
}
# Of 64 heads of 512 a thread stores 256 numbers: bfloat16, codes of 4 bits, else of 8.
STORES = {0: {"128": 32}, 5: {"128": 8}}


@pytest.mark.parametrize("constants", CASES.values(), ids=CASES)
def test_compiles_without_serialised_wgmma_or_spills(constants: dict[str, Any]) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_prefill import OPTIONS, sparse_mla_prefill_kernel
    from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import UNALIGNED

    built = build(sparse_mla_prefill_kernel, OPTIONS, constants, UNALIGNED)
    assert set(built.products) == {"64x64", "64x128"}, "scores and output"
    assert built.copy_bits == {"128"}, "rows travel in 16-byte pieces"
    # Where the compiler no longer sees neighbours it stores single numbers, and a bfloat16 output
    # takes twice the time.
    assert built.wide_stores == STORES.get(constants["KIND"], {"64": 32})

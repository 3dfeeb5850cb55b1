"""The Hopper prefill kernel for d_qk 576 compiles for sm_90a as its pipeline needs it; no GPU used.

Registers and shared memory are both all but exhausted: a spilled query or one barrier too many
costs more than any tuning wins.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.sm90_build import build, needs_gated_triton

pytestmark = needs_gated_triton

PLAIN = {
    "HEAD_BLOCKS": 2,
    "FULL_TILES": True,
    "HAS_ROPE": False,
    "HALF_PAIRING": False,
    "HAS_SINK": False,
    "HAS_LENGTH": False,
    "KIND": 0,
    "GROUP": 512,
    "F": 65536,
    "CHUNK32": False,
    "AMAX_FLOOR": 0.0,
}
ROTATED = PLAIN | {"HAS_ROPE": True, "HALF_PAIRING": True, "HAS_SINK": True, "FULL_TILES": False}
# The variant that needs most shared memory: every argument is one that the roles keep there.
CHUNKED = PLAIN | {
    "HAS_ROPE": True,
    "HAS_SINK": True,
    "HAS_LENGTH": True,
    "KIND": 4,
    "GROUP": 32,
    "F": 4096,
    "CHUNK32": True,
    "AMAX_FLOOR": 1e-4,
}


NVFP4 = CHUNKED | {"KIND": 5, "GROUP": 16, "CHUNK32": False, "AMAX_FLOOR": 0.0}
# With the bytes that a thread may spill, once per tile: addresses of the scores.
CASES = {
    "plain-bf16": (PLAIN, 4),
    "rotated-half-sink-bf16": (ROTATED, 12),
    "fused-chunk32-mxfp8": (CHUNKED, 4),
    "fused-nvfp4": (NVFP4, 4),
    "rotated-half-sink-partial-nvfp4": (ROTATED | {"KIND": 5, "GROUP": 16}, 8),
}


@pytest.mark.parametrize(("constants", "spills"), CASES.values(), ids=CASES)
def test_fits_without_spills_in_a_loop_or_serialised_wgmma(
    constants: dict[str, Any], spills: int
) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576 import (
        OPTIONS,
        sparse_mla_prefill_576_kernel,
    )

    built = build(sparse_mla_prefill_576_kernel, OPTIONS, constants)
    assert built.spilled_bytes <= spills
    # First scores and those of the loop: 576 dimensions each; two output roles: 256 by 64 keys.
    assert built.products == {"64x64": 2 * 36, "64x128": 2 * 8}
    assert built.copy_bits == {"128"}, "rows travel in 16-byte pieces"

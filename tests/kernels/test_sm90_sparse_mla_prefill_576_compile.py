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
GROUP64 = {"KIND": 2, "GROUP": 64, "AMAX_FLOOR": 1e-10}
CASES = {
    "plain-bf16": PLAIN,
    "rotated-half-sink-partial-bf16": ROTATED,
    "fused-chunk32-mxfp8": CHUNKED,
    "rotated-half-sink-partial-group64-float32": ROTATED | {"HAS_LENGTH": True, **GROUP64},
    "fused-nvfp4": NVFP4,
    "rotated-half-sink-partial-nvfp4": ROTATED | {"KIND": 5, "GROUP": 16},
}
# As with 512 dimensions.
STORES = {0: {"128": 32}, 5: {"128": 8}}


@pytest.mark.parametrize("constants", CASES.values(), ids=CASES)
def test_fits_without_spills_or_serialised_wgmma(constants: dict[str, Any]) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576 import (
        OPTIONS,
        sparse_mla_prefill_576_kernel,
    )
    from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import UNALIGNED

    built = build(sparse_mla_prefill_576_kernel, OPTIONS, constants, UNALIGNED)
    # First scores and those of the loop: 576 dimensions each; two output roles: 256 by 64 keys.
    assert built.products == {"64x64": 2 * 36, "64x128": 2 * 8}
    assert built.copy_bits == {"128"}, "rows travel in 16-byte pieces"
    assert built.wide_stores == STORES.get(constants["KIND"], {"64": 32})

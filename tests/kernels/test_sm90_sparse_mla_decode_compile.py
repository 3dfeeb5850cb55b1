"""The Hopper decode kernels compile for sm_90a as its pipeline needs it; no GPU is used.

A spill in a loop over keys, an ignored register count or a serialised wgmma costs more than any
tuning wins, and each is a silent note of ptxas.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.sm90_build import build, needs_gated_triton

pytestmark = needs_gated_triton

PLAIN = {
    "HEAD_BLOCKS": 1,
    "FULL_TILES": True,
    "IS_SPLIT": False,
    "CHUNK16": False,
    "HAS_SM_SCALE": False,
    "HAS_V_SCALE": False,
    "ROTATE_QUERY": False,
    "HAS_NORM": False,
    "HAS_ROPE": False,
    "HALF_PAIRING": False,
    "HAS_SINK": False,
    "HAS_LENGTH": False,
    "FORMAT": "v41",
    "INLINE": False,
    "HAS_EXTRA": False,
    "HAS_EXTRA_LENGTH": False,
    "EXTRA_FORMAT": "v41",
    "EXTRA_INLINE": False,
    "KIND": 0,
    "GROUP": 512,
    "F": 32768,
    "CHUNK32": False,
    "AMAX_FLOOR": 0.0,
    "NUM_PIECES": 5,
    "DELAY_OUTPUT": True,
    "DEQUANT_REGISTERS": 48,
}
MXFP8 = {"KIND": 4, "GROUP": 32, "F": 4096, "AMAX_FLOOR": 1e-4}
TWO_POOLS = {"HAS_EXTRA": True, "HAS_LENGTH": True, "HAS_EXTRA_LENGTH": True}
ROTATED = {"HAS_ROPE": True, "ROTATE_QUERY": True}
NVFP4 = {"KIND": 5, "GROUP": 16}
FUSED = PLAIN | MXFP8 | TWO_POOLS | ROTATED | {"HAS_NORM": True, "HAS_SINK": True}
SPLIT = {"IS_SPLIT": True}
CHUNKED = {"CHUNK16": True, "CHUNK32": True, "FULL_TILES": False}
V4 = {"FORMAT": "v4", "EXTRA_FORMAT": "v4"}
FP4 = {"EXTRA_FORMAT": "v41_fp4"}
INLINE = {"INLINE": True, "EXTRA_INLINE": True}
WIDE = {"NUM_PIECES": 4, "DELAY_OUTPUT": False}
V32 = WIDE | ROTATED | {"FORMAT": "v32", "EXTRA_FORMAT": "v32"}
FP8 = {"HAS_SM_SCALE": True, "HAS_V_SCALE": True, "HAS_LENGTH": True}
FP8_576 = WIDE | FP8 | {"FORMAT": "fp8_576", "EXTRA_FORMAT": "fp8_576"}
FP8_512 = FP8 | {"FORMAT": "fp8_512", "EXTRA_FORMAT": "fp8_512", "HAS_ROPE": True}
# With the bytes that a thread may spill, none of them in a loop that multiplies, and only with 576
# dimensions and no Nvfp4 in one that decodes: see decision 013.
CONFIGURATIONS = {
    "v41-fused": (FUSED, 0),
    "v41-split": (FUSED | SPLIT, 0),
    "v41-inline-chunked": (FUSED | CHUNKED | INLINE, 0),
    "v41-nvfp4-fused": (FUSED | NVFP4, 76),
    "v32-nvfp4-partial": (PLAIN | V32 | NVFP4 | {"FULL_TILES": False}, 104),
    "v4-fused": (FUSED | V4, 0),
    "v4-split": (FUSED | V4 | SPLIT, 0),
    "v41-fp4-fused": (FUSED | FP4, 0),
    "v41-fp4-split": (FUSED | FP4 | SPLIT, 4),
    "v41-fp4-inline-chunked": (FUSED | FP4 | CHUNKED | INLINE, 32),
    "v32": (PLAIN | V32, 28),
    "v32-split": (PLAIN | V32 | SPLIT | {"HAS_LENGTH": True}, 20),
    "fp8-576": (PLAIN | FP8_576, 20),
    "fp8-512": (PLAIN | FP8_512, 0),
}
# Of e4m3 queries.
CODE_CONFIGURATIONS = {
    "576": FP8_576,
    "576-partial-split": FP8_576 | SPLIT | {"FULL_TILES": False},
    "512": FP8_512 | {"HAS_ROPE": False},
    "512-rotated-mxfp8": FP8_512 | MXFP8 | {"HAS_SINK": True},
}

# Barriers of the dequantising role by the formats of both pools: one more a unit goes unnoticed
# otherwise, and comes from two stores to a piece or from stages that may be the same memory.
BARRIERS = {
    ("v41", "v41"): 19,
    ("v41", "v41_fp4"): 22,
    ("v4", "v4"): 27,
    ("v32", "v32"): 21,
    ("fp8_576", "fp8_576"): 21,
    ("fp8_512", "fp8_512"): 19,
}


@pytest.mark.parametrize(("constants", "spill_bytes"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_compiles_without_spills_in_loops_or_serialised_wgmma(
    constants: dict[str, Any], spill_bytes: int
) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_kernel import (
        OPTIONS,
        UNALIGNED,
        sparse_mla_decode_kernel,
    )

    built = build(sparse_mla_decode_kernel, OPTIONS, constants, UNALIGNED)
    assert built.spilled_bytes <= spill_bytes
    assert built.copy_barriers <= BARRIERS[constants["FORMAT"], constants["EXTRA_FORMAT"]]
    assert set(built.products) == {"64x64", "64x128"}, "scores and output"
    assert "128" in built.copy_bits, "codes travel in 16-byte pieces"
    # Two codes take one product: the bits are moved, not converted.
    assert "F2FP.F16.E4M3" not in built.sass


@pytest.mark.parametrize("constants", CODE_CONFIGURATIONS.values(), ids=CODE_CONFIGURATIONS)
def test_codes_are_multiplied_by_codes_without_spills(constants: dict[str, Any]) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_fp8_kernel import sparse_mla_decode_fp8_kernel
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_kernel import OPTIONS, UNALIGNED

    kernel = sparse_mla_decode_fp8_kernel
    chosen = {
        name: value for name, value in (PLAIN | constants).items() if name in kernel.arg_names
    }
    unaligned = [*UNALIGNED, "stride_q_token", "stride_q_head"]
    built = build(kernel, OPTIONS, chosen, unaligned, words=["q_ptr"])
    assert built.spilled_bytes == 0
    width = 576 if constants["FORMAT"] == "fp8_576" else 512
    assert built.code_products == {"64x64": width // 32}, "scores, written out"
    # Two halves of the output, each two tiles over the 64 keys of a block.
    assert built.products == {"64x128": 2 * 2 * 64 // 16}
    assert built.copy_bits == {"128"}, "queries and keys travel in 16-byte pieces"
    assert built.copy_barriers <= 8
    assert "F2FP.F16.E4M3" not in built.sass

"""The Hopper prefill kernel compiles for sm_90a as its pipeline needs it; no GPU is used.

A spill in a role, an ignored register count or a serialised wgmma costs more than any tuning wins,
and each is a silent note of ptxas.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton to compile kernels")

from mlacast.kernels.config.attention import EndConfig, PoolConfig, QueryConfig  # noqa: E402
from mlacast.kernels.config.output import OutputConfig  # noqa: E402
from mlacast.kernels.config.sparse_attention import PrefillWork  # noqa: E402
from tests.kernels.sm90_build import build, needs_gated_triton  # noqa: E402

pytestmark = needs_gated_triton

PLAIN: dict[str, Any] = {
    "WORK": PrefillWork(1, full_tiles=True, parts=1),
    "QUERY": QueryConfig(512),
    "POOL": PoolConfig("rows"),
    "END": EndConfig(),
    "OUTPUT": OutputConfig(0, 512, 32768, False, 0.0, 0),
}
FUSED_QUERY = QueryConfig(512, has_norm=True, is_rotated=True)
FUSED_END = EndConfig(has_sink=True, rotates_back=True)
FUSED = PLAIN | {
    "QUERY": FUSED_QUERY,
    "POOL": PoolConfig("rows", has_length=True),
    "END": FUSED_END,
}
HALF_PARTIAL = {
    "WORK": PrefillWork(1, full_tiles=False, parts=1),
    "QUERY": FUSED_QUERY._replace(half_pairing=True),
    "END": FUSED_END._replace(half_pairing=True),
}
CHUNK16 = {"QUERY": FUSED_QUERY._replace(chunk16=True)}


def _fp8(kind: int, group: int, chunk32: bool = False) -> dict[str, Any]:
    """Everything fused, eight heads to a group of the output, one scale to ``group`` values."""
    return FUSED | {"OUTPUT": OutputConfig(kind, group, 4096, chunk32, 1e-4, 0)}


# What dispatch sends here: every kind of output, and each option with some of them.
CASES = {
    "plain-bf16": PLAIN,
    "fused-half-pairing-partial-tile-bf16": FUSED | HALF_PARTIAL,
    "fused-chunk16-bf16": FUSED | CHUNK16,
    "fused-fp8-tensor": _fp8(1, 512),
    "fused-mxfp8": _fp8(4, 32),
    "fused-chunk16-chunk32-mxfp8": _fp8(4, 32, chunk32=True) | CHUNK16,
    "fused-half-pairing-partial-tile-mxfp8": _fp8(4, 32) | HALF_PARTIAL,
    "fused-group128-float32": _fp8(2, 128),
    "fused-group128-packed": _fp8(4, 128),
    "fused-half-pairing-partial-tile-group64-float32": _fp8(2, 64) | HALF_PARTIAL,
    "fused-group64-pow2": _fp8(3, 64),
    "fused-group32-float32": _fp8(2, 32),
    "fused-nvfp4": _fp8(5, 16),
    "fused-half-pairing-partial-tile-nvfp4": _fp8(5, 16) | HALF_PARTIAL,
}
# Of 64 heads of 512 a thread stores 256 numbers: bfloat16, codes of 4 bits, else of 8.
STORES = {0: {"128": 32}, 5: {"128": 8}}
# Two programs a tile: what is left of the heads, and every way to store.
SHARED = (
    "plain-bf16",
    "fused-chunk16-chunk32-mxfp8",
    "fused-half-pairing-partial-tile-group64-float32",
    "fused-half-pairing-partial-tile-nvfp4",
)


@pytest.mark.parametrize("constants", CASES.values(), ids=CASES)
def test_compiles_without_serialised_wgmma_or_spills(constants: dict[str, Any]) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_prefill import OPTIONS, sparse_mla_prefill_kernel
    from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import UNALIGNED

    built = build(sparse_mla_prefill_kernel, OPTIONS, constants, UNALIGNED)
    assert set(built.products) == {"64x64", "64x128"}, "scores and output"
    assert built.copy_bits == {"128"}, "rows travel in 16-byte pieces"
    # Where the compiler no longer sees neighbours it stores single numbers, and a bfloat16 output
    # takes twice the time.
    assert built.wide_stores == STORES.get(constants["OUTPUT"].kind, {"64": 32})
    assert built.sums_of_products == 0, "one and two programs a tile may give other bits"


@pytest.mark.parametrize("name", SHARED)
def test_two_programs_a_tile_compile_without_spills(name: str) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_prefill import OPTIONS, sparse_mla_prefill_kernel
    from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import UNALIGNED

    constants = CASES[name] | {"WORK": CASES[name]["WORK"]._replace(parts=2)}
    built = build(sparse_mla_prefill_kernel, OPTIONS, constants, UNALIGNED)
    # First scores and those of the loop, 512 dimensions each; two output roles, 128 by 64 keys.
    assert built.products == {"64x64": 2 * 32, "64x128": 2 * 2 * 4}
    assert built.copy_bits == {"128"}
    assert built.sums_of_products == 0, "one and two programs a tile may give other bits"
    whole = STORES.get(constants["OUTPUT"].kind, {"64": 32})
    assert built.wide_stores == {bits: number // 2 for bits, number in whole.items()}

"""The Hopper decode of few heads compiles for sm_90a as its pipeline needs it; no GPU is used."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton to compile kernels")

from mlacast.kernels.config.attention import (  # noqa: E402
    EndConfig,
    PoolConfig,
    QueryConfig,
    ScaleConfig,
)
from mlacast.kernels.config.output import OutputConfig  # noqa: E402
from mlacast.kernels.config.sparse_attention import few_heads_tile, few_heads_work  # noqa: E402
from tests.kernels.sm90_build import build, needs_gated_triton

pytestmark = needs_gated_triton

BF16 = {"OUTPUT": OutputConfig(0, 512, 8192, False, 0.0, 0)}
TENSOR = {"OUTPUT": OutputConfig(1, 512, 8192, False, 0.0, 0)}
POW2_64 = {"OUTPUT": OutputConfig(3, 64, 4096, False, 1e-4, 0)}
PACKED_128 = {"OUTPUT": OutputConfig(4, 128, 4096, False, 1e-4, 0)}
MXFP8 = {"OUTPUT": OutputConfig(4, 32, 4096, False, 1e-4, 0)}
CHUNKED_MXFP8 = {"OUTPUT": OutputConfig(4, 32, 4096, True, 1e-4, 0)}
NVFP4 = {"OUTPUT": OutputConfig(5, 16, 4096, False, 1e-4, 0)}


def _pools(main: PoolConfig, extra: PoolConfig | None = None) -> dict[str, Any]:
    return {"POOL": main, "EXTRA": extra}


def _heads(num_heads: int) -> dict[str, Any]:
    return {"HEADS": few_heads_tile(num_heads), "WORK": few_heads_work(num_heads)}


V4, V41 = PoolConfig("v4"), PoolConfig("v41")
LONG_V4, LONG_V41 = V4._replace(has_length=True), V41._replace(has_length=True)
INLINE = LONG_V41._replace(is_inline=True)
PLAIN = {
    **BF16,
    **_pools(V4),
    **_heads(16),
    "SCALES": ScaleConfig(),
    "QUERY": QueryConfig(512),
    "END": EndConfig(),
}
FUSED = {
    **PLAIN,
    **MXFP8,
    **_pools(LONG_V4, LONG_V4),
    "QUERY": QueryConfig(512, has_norm=True, is_rotated=True),
    "END": EndConfig(has_sink=True, rotates_back=True),
}
PARTIAL = _heads(8)
TILE_32, PARTIAL_32 = _heads(32), _heads(17)
HALF = {
    "QUERY": QueryConfig(512, chunk16=True, has_norm=True, is_rotated=True, half_pairing=True),
    "END": EndConfig(has_sink=True, rotates_back=True, half_pairing=True),
}
CONFIGURATIONS = {
    "v4": PLAIN,
    "v41": PLAIN | _pools(V41),
    "v4-fused": FUSED,
    "v41-fused": FUSED | _pools(LONG_V41, LONG_V41),
    "v4-chunked": FUSED | PARTIAL | HALF | CHUNKED_MXFP8,
    "v41-inline-chunked": FUSED | PARTIAL | HALF | CHUNKED_MXFP8 | _pools(LONG_V41, INLINE),
    "v4-group64-partial": PLAIN | PARTIAL | POW2_64 | {"END": EndConfig(rotates_back=True)},
    "v41-group128": FUSED | PACKED_128 | _pools(V41, V41),
    "v4-tensor-scales": FUSED | TENSOR | {"SCALES": ScaleConfig(True, True)},
    "v4-nvfp4": FUSED | NVFP4,
    "v41-nvfp4-partial": FUSED | PARTIAL | NVFP4 | _pools(LONG_V41, LONG_V41),
    "v4-h32": PLAIN | TILE_32,
    "v41-h32": PLAIN | TILE_32 | _pools(V41),
    "v4-fused-h32": FUSED | TILE_32,
    "v41-fused-h32": FUSED | TILE_32 | _pools(LONG_V41, LONG_V41),
    "v4-chunked-h17": FUSED | PARTIAL_32 | HALF | CHUNKED_MXFP8,
    "v41-inline-chunked-h17": FUSED | PARTIAL_32 | HALF | CHUNKED_MXFP8 | _pools(LONG_V41, INLINE),
    "v4-group64-h17": PLAIN | PARTIAL_32 | POW2_64 | {"END": EndConfig(rotates_back=True)},
    "v41-group128-h32": FUSED | TILE_32 | PACKED_128 | _pools(V41, V41),
    "v4-tensor-scales-h32": FUSED | TILE_32 | TENSOR | {"SCALES": ScaleConfig(True, True)},
    "v4-nvfp4-h32": FUSED | TILE_32 | NVFP4,
    "v41-nvfp4-h17": FUSED | PARTIAL_32 | NVFP4 | _pools(LONG_V41, LONG_V41),
}
# Of either decoding role: one more a unit goes unnoticed otherwise.
BARRIERS = {"v4": 12, "v41": 10}


@pytest.mark.parametrize("constants", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_compiles_without_spills_or_serialised_wgmma(constants: dict[str, Any]) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_kernel import (
        sparse_mla_decode_few_kernel,
    )
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_kernel import OPTIONS, UNALIGNED

    built = build(sparse_mla_decode_few_kernel, OPTIONS, constants, UNALIGNED)
    heads = constants["HEADS"]
    products = {f"64x{heads}": 32 + 32}
    assert built.products == products, "scores of 512 dimensions, output of 64 keys"
    assert built.copy_bits == {"64", "128"}, "scales and codes, whole pieces"
    assert built.copy_barriers <= BARRIERS[constants["POOL"].record]
    # Heads of 512 dimensions, 8 a thread: bfloat16, codes of eight bits, words of eight of four.
    pieces = heads * 512 // 8 // 128
    kinds = {0: {"128": pieces}, 5: {}}
    assert built.wide_stores == kinds.get(constants["OUTPUT"].kind, {"64": pieces})
    # Both halves are multiplied where they were decoded: what is stored is what the output reads.
    roles = re.split("USETMAXREG", built.sass)
    decoding = [role for role in roles if "LDGSTS" in role]
    assert [role.count("HGMMA") for role in decoding] == [16, 16]
    # Two codes take one product: the bits are moved, not converted.
    assert "F2FP.F16.E4M3" not in built.sass

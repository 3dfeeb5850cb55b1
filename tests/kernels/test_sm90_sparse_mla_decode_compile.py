"""The Hopper decode kernels compile for sm_90a as its pipeline needs it; no GPU is used.

A spill in a loop over keys, an ignored register count or a serialised wgmma costs more than any
tuning wins, and each is a silent note of ptxas.
"""

from __future__ import annotations

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
from mlacast.kernels.config.sparse_attention import WorkConfig, ring_config  # noqa: E402
from tests.kernels.sm90_build import build, needs_gated_triton

pytestmark = needs_gated_triton

NO_OUTPUT = OutputConfig(0, 512, 32768, False, 0.0, 0)
MXFP8 = {"OUTPUT": OutputConfig(4, 32, 4096, False, 1e-4, 0)}
NVFP4 = {"OUTPUT": OutputConfig(5, 16, 32768, False, 0.0, 0)}
NVFP4_OF_8 = {"OUTPUT": OutputConfig(5, 16, 4096, False, 1e-4, 0)}
CHUNKED_MXFP8 = {"OUTPUT": OutputConfig(4, 32, 4096, True, 1e-4, 0)}


def _pools(record: str, extra: str | None = None, **options: bool) -> dict[str, Any]:
    """One pool, or two with lengths."""
    if extra is None:
        return {"POOL": PoolConfig(record, **options), "EXTRA": None}
    return {
        "POOL": PoolConfig(record, has_length=True, **options),
        "EXTRA": PoolConfig(extra, has_length=True, **options),
    }


PLAIN = {
    "WORK": WorkConfig(1, full_tiles=True, is_split=False),
    "RING": ring_config(512, False),
    "SCALES": ScaleConfig(),
    "QUERY": QueryConfig(512),
    "END": EndConfig(),
    "OUTPUT": NO_OUTPUT,
    **_pools("v41"),
}
FUSED = {
    **PLAIN,
    **MXFP8,
    **_pools("v41", "v41"),
    "QUERY": QueryConfig(512, has_norm=True, is_rotated=True),
    "END": EndConfig(has_sink=True, rotates_back=True),
}
SPLIT = {"WORK": WorkConfig(1, full_tiles=True, is_split=True)}
PARTIAL = {"WORK": WorkConfig(1, full_tiles=False, is_split=False)}
CHUNKED = {
    **PARTIAL,
    **CHUNKED_MXFP8,
    "QUERY": FUSED["QUERY"]._replace(chunk16=True),
}
WIDE = {"RING": ring_config(576, False), "QUERY": QueryConfig(576)}
V32 = {**PLAIN, **WIDE, **_pools("v32"), "QUERY": QueryConfig(576, is_rotated=True)}
SCALED = {"SCALES": ScaleConfig(True, True)}
FP8_576 = {**PLAIN, **WIDE, **SCALED, **_pools("fp8_576", has_length=True)}
FP8_512 = {
    **PLAIN,
    **SCALED,
    **_pools("fp8_512", has_length=True),
    "END": EndConfig(rotates_back=True),
}
CONFIGURATIONS = {
    "v41-fused": FUSED,
    "v41-split": FUSED | SPLIT,
    "v41-inline-chunked": FUSED | CHUNKED | _pools("v41", "v41", is_inline=True),
    "v41-nvfp4-fused": FUSED | NVFP4_OF_8,
    "v32-nvfp4-partial": V32 | PARTIAL | NVFP4,
    "v4-fused": FUSED | _pools("v4", "v4"),
    "v4-split": FUSED | _pools("v4", "v4") | SPLIT,
    "v41-fp4-fused": FUSED | _pools("v41", "v41_fp4"),
    "v41-fp4-split": FUSED | _pools("v41", "v41_fp4") | SPLIT,
    "v41-fp4-inline-chunked": FUSED | CHUNKED | _pools("v41", "v41_fp4", is_inline=True),
    "v32": V32,
    "v32-split": V32 | SPLIT | _pools("v32", has_length=True),
    "fp8-576": FP8_576,
    "fp8-512": FP8_512,
}
# Of e4m3 queries.
CODES = {"RING": ring_config(512, True)}
CODE_CONFIGURATIONS = {
    "576": FP8_576 | CODES,
    "576-partial-split": FP8_576 | CODES | {"WORK": WorkConfig(1, False, True)},
    "512": FP8_512 | CODES | {"END": EndConfig()},
    "512-rotated-mxfp8": FP8_512
    | CODES
    | MXFP8
    | {"END": EndConfig(has_sink=True, rotates_back=True)},
}

# Barriers of the dequantising role by the formats of both pools: one more a unit goes unnoticed
# otherwise, and comes from two stores to a piece or from stages that may be the same memory.
BARRIERS = {
    ("v41", "v41"): 18,
    ("v41", "v41_fp4"): 21,
    ("v4", "v4"): 18,
    # All but the first unit of a block are there twice.
    ("v32", "v32"): 24,
    ("fp8_576", "fp8_576"): 20,
    ("fp8_512", "fp8_512"): 18,
}


def _stores(constants: dict[str, Any]) -> dict[str, int]:
    """Of 64 heads of 512 a thread stores 256 numbers: float32 in a split, bfloat16, codes."""
    if constants["WORK"].is_split:
        return {"128": 64}
    return {0: {"128": 32}, 5: {"128": 8}}.get(constants["OUTPUT"].kind, {"64": 32})


@pytest.mark.parametrize("constants", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_compiles_without_spills_or_serialised_wgmma(constants: dict[str, Any]) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_kernel import (
        OPTIONS,
        UNALIGNED,
        sparse_mla_decode_kernel,
    )

    built = build(sparse_mla_decode_kernel, OPTIONS, constants, UNALIGNED)
    assert built.wide_stores == _stores(constants)
    pool, extra = constants["POOL"], constants["EXTRA"]
    assert built.copy_barriers <= BARRIERS[pool.record, (extra or pool).record]
    assert set(built.products) == {"64x64", "64x128"}, "scores and output"
    assert "128" in built.copy_bits, "codes travel in 16-byte pieces"
    # Two codes take one product: the bits are moved, not converted.
    assert "F2FP.F16.E4M3" not in built.sass


@pytest.mark.parametrize("constants", CODE_CONFIGURATIONS.values(), ids=CODE_CONFIGURATIONS)
def test_codes_are_multiplied_by_codes_without_spills(constants: dict[str, Any]) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_fp8_kernel import sparse_mla_decode_fp8_kernel
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_kernel import OPTIONS, UNALIGNED

    kernel = sparse_mla_decode_fp8_kernel
    chosen = {name: value for name, value in constants.items() if name in kernel.arg_names}
    unaligned = [*UNALIGNED, "stride_q_token", "stride_q_head"]
    built = build(kernel, OPTIONS, chosen, unaligned, words=["q_ptr"])
    assert built.wide_stores == _stores(constants)
    width = 576 if constants["POOL"].record == "fp8_576" else 512
    assert built.code_products == {"64x64": width // 32}, "scores, written out"
    # Two halves of the output, each two tiles over the 64 keys of a block.
    assert built.float16_products == {"64x128": 2 * 2 * 64 // 16}
    assert not built.products, "none of bfloat16"
    assert built.copy_bits == {"128"}, "queries and keys travel in 16-byte pieces"
    assert built.copy_barriers <= 8
    # 64 keys of 512 values by 128 threads, two codes an instruction, and nothing else of them.
    assert built.sass.count("F2FP.F16.E4M3.UNPACK_B") == 64 * 512 // 128 // 2
    assert "HMUL2" not in built.sass

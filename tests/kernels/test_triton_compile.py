"""The portable kernels compile for sm_90a and sm_80 without a GPU, and stay within limits."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="the portable kernels need triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mlacast.kernels.common import combine_splits  # noqa: E402
from mlacast.kernels.config.attention import (  # noqa: E402
    EndConfig,
    PoolConfig,
    QueryConfig,
    ScaleConfig,
)
from mlacast.kernels.config.output import OutputConfig  # noqa: E402
from mlacast.kernels.config.sparse_attention import combine_config, tile_config  # noqa: E402
from mlacast.kernels.triton import sparse_mla_decode, sparse_mla_prefill  # noqa: E402
from tests.kernels.sm90_build import disassemble  # noqa: E402

# Shared memory a block may have: 227 KB on compute capability 9.0, 163 KB on 8.0.
SHARED_LIMIT = {90: 227 * 1024, 89: 99 * 1024, 80: 163 * 1024}

STORE = {"OUTPUT": OutputConfig(4, 32, 4096, True, 1e-4, 0)}
TO_FP8 = {"OUTPUT": OutputConfig(4, 128, 4096, False, 1e-4, 0)}
TO_NVFP4 = {"OUTPUT": OutputConfig(5, 16, 4096, False, 1e-4, 128)}
PLAIN_STORE = {"OUTPUT": OutputConfig(0, 512, 512, False, 1e-4, 0)}
FUSED_QUERY = QueryConfig(512, chunk16=True, has_norm=True, is_rotated=True)
QUERY = {
    "QUERY": FUSED_QUERY,
    "POOL": PoolConfig("rows", has_length=True),
    "END": EndConfig(has_sink=True, rotates_back=True),
}
WIDE_QUERY = {
    **QUERY,
    "QUERY": QueryConfig(576, is_rotated=True),
    "END": EndConfig(has_sink=True),
}
V4_POOL = PoolConfig("v4", has_length=True)
SPLIT = {"SCALES": ScaleConfig(), "IS_SPLIT": True}
TWO_POOLS = {**SPLIT, "POOL": V4_POOL, "EXTRA": V4_POOL}
FP8 = PoolConfig("fp8", has_length=True)
FP8_POOL = {"SCALES": ScaleConfig(True, True), "IS_SPLIT": True, "POOL": FP8, "EXTRA": None}
PREFILL = sparse_mla_prefill._sparse_mla_prefill_kernel
DECODE = sparse_mla_decode._sparse_mla_decode_kernel
COMBINE = combine_splits.combine_splits_kernel


@dataclass(frozen=True)
class Configuration:
    """A kernel as dispatch can choose it.

    Attributes:
        name: Test id.
        kernel: Triton function.
        heads: Query heads, which decide the tile; 0 for the combine kernel.
        constants: Compile-time arguments other than the tile.
        types: Types of arguments that differ from the usual.
        capability: Target.
    """

    name: str
    kernel: Any
    heads: int
    constants: dict[str, Any]
    types: dict[str, str] = field(default_factory=dict)
    capability: int = 90


CONFIGURATIONS = (
    Configuration("prefill_h64_fused_step", PREFILL, 64, {**QUERY, **STORE}),
    Configuration(
        "prefill_h16_bf16_576",
        PREFILL,
        16,
        {**WIDE_QUERY, **PLAIN_STORE},
        {"data_ptr": "*bf16", "sf_ptr": "*bf16", "scale_ptr": "*bf16"},
    ),
    Configuration("prefill_h16_sm80", PREFILL, 16, {**QUERY, **STORE}, capability=80),
    Configuration("decode_h64_v4_v4_split", DECODE, 64, {**QUERY, **STORE, **TWO_POOLS}),
    Configuration(
        "decode_h16_v41_fp4_to_nvfp4",
        DECODE,
        16,
        {
            **QUERY,
            **TO_NVFP4,
            **SPLIT,
            "POOL": PoolConfig("v41_fp4", has_length=True),
            "EXTRA": None,
            "IS_SPLIT": False,
        },
        {"sf_ptr": "*u8"},
    ),
    Configuration(
        "decode_h16_sm80_v32",
        DECODE,
        16,
        {
            **WIDE_QUERY,
            **STORE,
            **SPLIT,
            "POOL": PoolConfig("v32", has_length=True),
            "EXTRA": None,
        },
        capability=80,
    ),
    Configuration(
        "decode_h64_fp8_query_576",
        DECODE,
        64,
        {**WIDE_QUERY, **PLAIN_STORE, **FP8_POOL, "QUERY": QueryConfig(576)},
        {"q_ptr": "*u8", "data_ptr": "*bf16", "sf_ptr": "*bf16", "scale_ptr": "*bf16"},
    ),
    Configuration(
        "decode_h64_fp8_query_512_to_fp8",
        DECODE,
        64,
        {**QUERY, **TO_FP8, **FP8_POOL, "QUERY": QueryConfig(512), "EXTRA": FP8},
        {"q_ptr": "*u8"},
    ),
    # What shares little memory has small tiles, whatever the heads; these take most of it.
    Configuration("prefill_h64_sm89", PREFILL, 64, {**QUERY, **STORE}, capability=89),
    Configuration("decode_h64_v4_v4_sm89", DECODE, 64, {**QUERY, **STORE, **TWO_POOLS}, {}, 89),
    Configuration(
        "decode_h64_v32_sm89",
        DECODE,
        64,
        {
            **WIDE_QUERY,
            **STORE,
            **SPLIT,
            "POOL": PoolConfig("v32", has_length=True),
            "EXTRA": None,
        },
        capability=89,
    ),
    Configuration("combine", COMBINE, 0, {"END": QUERY["END"], **STORE}),
)


def _type_of(name: str, types: dict[str, str]) -> str:
    if name in types:
        return types[name]
    if name in ("q_ptr", "kv_ptr"):
        return "*bf16"
    if name in ("cache_ptr", "extra_cache_ptr", "data_ptr"):
        return "*u8"
    if name in ("indices_ptr", "length_ptr", "extra_indices_ptr", "extra_length_ptr", "sf_ptr"):
        return "*i32"
    if name == "positions_ptr":
        return "*i64"
    if name in ("eps", "sm_scale", "v_scale"):
        return "fp32"
    return "*fp32" if name.endswith("_ptr") else "i32"


def _compile(configuration: Configuration) -> Any:
    kernel, constants = configuration.kernel, dict(configuration.constants)
    options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
    if configuration.heads:
        tile = tile_config(configuration.heads, SHARED_LIMIT[configuration.capability])
        constants.update(TILES=tile)
        options.update(num_warps=tile.num_warps, num_stages=tile.num_stages)
    else:
        program = combine_config(1000, 64)
        constants.update(PROGRAM=program)
        options.update(num_warps=program.num_warps)
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else _type_of(name, configuration.types)
        for name in names
    }
    aligned = ("stride_q_token", "stride_q_head", "stride_kv")
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if name not in constants and (name.endswith("_ptr") or name in aligned)
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    target = GPUTarget("cuda", configuration.capability, 32)
    return triton.compile(source, target=target, options=options)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda case: case.name)
def test_compiles_within_limits(configuration: Configuration, tmp_path: Path) -> None:
    compiled = _compile(configuration)
    shared = compiled.metadata.shared
    assert shared <= SHARED_LIMIT[configuration.capability], f"{shared} bytes of shared memory"
    usage = disassemble(compiled.asm["cubin"], tmp_path, "-res-usage")
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None and int(registers[1]) <= 255, usage
    if not configuration.heads:
        return
    operations = set(
        re.findall(r"\b(HGMMA|HMMA)\b", disassemble(compiled.asm["cubin"], tmp_path, "-sass"))
    )
    # A tile of 64 heads fills the 64 rows of the warp-group instruction; smaller ones use HMMA.
    uses_hgmma = configuration.heads >= 64 and configuration.capability >= 90
    assert ("HGMMA" if uses_hgmma else "HMMA") in operations, operations

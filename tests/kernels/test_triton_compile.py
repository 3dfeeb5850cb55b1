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
from mlacast.kernels.config.sparse_attention import tile_config  # noqa: E402
from mlacast.kernels.triton import sparse_mla_decode, sparse_mla_prefill  # noqa: E402
from tests.kernels.sm90_build import disassemble  # noqa: E402

# Shared memory a block may have: 227 KB on compute capability 9.0, 163 KB on 8.0.
SHARED_LIMIT = {90: 227 * 1024, 80: 163 * 1024}

STORE = {
    "KIND": 4,
    "GROUP": 32,
    "F": 4096,
    "CHUNK32": True,
    "AMAX_FLOOR": 1e-4,
    "SF_COLUMN_TILES": 0,
}
PLAIN_STORE = {**STORE, "KIND": 0, "GROUP": 512, "F": 512, "CHUNK32": False}
EPILOGUE = {"HAS_ROPE": True, "HALF_PAIRING": False, "HAS_SINK": True}
QUERY = {**EPILOGUE, "D_QK": 512, "CHUNK16": True, "HAS_NORM": True, "HAS_LENGTH": True}
TWO_POOLS = {
    "FORMAT": "v4",
    "INLINE": False,
    "HAS_EXTRA": True,
    "HAS_EXTRA_LENGTH": True,
    "EXTRA_FORMAT": "v4",
    "EXTRA_INLINE": False,
    "IS_SPLIT": True,
    "ROTATE_QUERY": True,
    "HAS_SM_SCALE": False,
    "HAS_V_SCALE": False,
}
FP8_POOL = {
    **TWO_POOLS,
    "FORMAT": "fp8",
    "HAS_EXTRA": False,
    "EXTRA_FORMAT": "fp8",
    "ROTATE_QUERY": False,
    "HAS_SM_SCALE": True,
    "HAS_V_SCALE": True,
}
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
        {**QUERY, **PLAIN_STORE, "D_QK": 576, "CHUNK16": False, "HAS_NORM": False},
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
            **STORE,
            **TWO_POOLS,
            "FORMAT": "v41_fp4",
            "HAS_EXTRA": False,
            "EXTRA_FORMAT": "v41_fp4",
            "IS_SPLIT": False,
            "KIND": 5,
            "GROUP": 16,
            "CHUNK32": False,
            "SF_COLUMN_TILES": 128,
        },
        {"sf_ptr": "*u8"},
    ),
    Configuration(
        "decode_h16_sm80_v32",
        DECODE,
        16,
        {
            **QUERY,
            **STORE,
            **TWO_POOLS,
            "D_QK": 576,
            "CHUNK16": False,
            "HAS_NORM": False,
            "FORMAT": "v32",
            "HAS_EXTRA": False,
            "EXTRA_FORMAT": "v32",
        },
        capability=80,
    ),
    Configuration(
        "decode_h64_fp8_query_576",
        DECODE,
        64,
        {
            **QUERY,
            **PLAIN_STORE,
            **FP8_POOL,
            "D_QK": 576,
            "CHUNK16": False,
            "HAS_NORM": False,
            "HAS_ROPE": False,
        },
        {"q_ptr": "*u8", "data_ptr": "*bf16", "sf_ptr": "*bf16", "scale_ptr": "*bf16"},
    ),
    Configuration(
        "decode_h64_fp8_query_512_to_fp8",
        DECODE,
        64,
        {
            **QUERY,
            **STORE,
            **FP8_POOL,
            "HAS_EXTRA": True,
            "GROUP": 128,
            "CHUNK32": False,
            "CHUNK16": False,
            "HAS_NORM": False,
        },
        {"q_ptr": "*u8"},
    ),
    Configuration("combine", COMBINE, 0, {**EPILOGUE, **STORE, "ROTATE_BACK": True}),
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
        tile = tile_config(configuration.heads)
        constants.update(BLOCK_H=tile.block_h, BLOCK_N=tile.block_n)
        options.update(num_warps=tile.num_warps, num_stages=tile.num_stages)
    else:
        constants.update(BLOCK_H=4, WIDTH=128)
        options.update(num_warps=1)
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

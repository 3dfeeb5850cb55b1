"""The portable dense decode and the scheduler compile for sm_90a and sm_80 without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="the portable kernels need triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mlacast.kernels.config.attention import (  # noqa: E402
    EndConfig,
    PoolConfig,
    QueryConfig,
    ScaleConfig,
)
from mlacast.kernels.config.decode_metadata import SIZES, MetadataConfig  # noqa: E402
from mlacast.kernels.triton import decode_metadata, dense_mla_decode  # noqa: E402
from tests.kernels import test_triton_compile as gates  # noqa: E402
from tests.kernels.sm90_build import disassemble  # noqa: E402

DENSE = dense_mla_decode._dense_mla_decode_kernel
PLANNER = decode_metadata._decode_metadata_kernel
FP8 = {name: gates.FP8_POOL[name] for name in ("POOL", "SCALES", "IS_SPLIT")}
ROWS = {"POOL": PoolConfig("rows"), "SCALES": ScaleConfig(), "IS_SPLIT": False}
COMMON = {"QUERY": QueryConfig(576), "END": EndConfig(has_sink=True), "CAUSAL": True}
PLAIN_TYPES = {"data_ptr": "*bf16", "sf_ptr": "*bf16", "scale_ptr": "*bf16"}
TABLES = {"page_table_ptr": "*i32", "seq_lens_ptr": "*i32"}

CONFIGURATIONS = (
    gates.Configuration(
        "dense_h64_fp8_query_split",
        DENSE,
        64,
        {**COMMON, **gates.PLAIN_STORE, **FP8},
        {**TABLES, **PLAIN_TYPES, "q_ptr": "*u8"},
    ),
    gates.Configuration(
        "dense_h16_rows_to_fp8",
        DENSE,
        16,
        {**COMMON, **gates.STORE, **ROWS},
        {**TABLES, "cache_ptr": "*bf16"},
    ),
    gates.Configuration(
        "dense_h16_rows_sm80",
        DENSE,
        16,
        {**COMMON, **gates.PLAIN_STORE, **ROWS, "IS_SPLIT": True},
        {**TABLES, **PLAIN_TYPES, "cache_ptr": "*bf16"},
        capability=80,
    ),
)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda case: case.name)
def test_the_dense_decode(configuration: gates.Configuration, tmp_path: Path) -> None:
    gates.test_compiles_within_limits(configuration, tmp_path)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size.block_b))
def test_the_scheduler(size: MetadataConfig, tmp_path: Path) -> None:
    block_b, num_warps = size
    constants: dict[str, Any] = {"HAS_TOPK": True, "PDL": True, "BLOCK_B": block_b}
    names = PLANNER.arg_names
    signature = {
        name: "constexpr" if name in constants else "*i32" if name.endswith("_ptr") else "i32"
        for name in names
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(PLANNER, signature, values, {}),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "enable_fp_fusion": False},
    )
    usage = disassemble(compiled.asm["cubin"], tmp_path, "-res-usage")
    # Nothing of it may spill: the walk over the parts is one long chain.
    assert "STACK:0" in usage, usage
    assert compiled.metadata.shared <= 48 * 1024

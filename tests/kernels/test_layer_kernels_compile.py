"""The portable kernels of a dense layer compile for sm_90a and sm_80 without a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="the portable kernels need triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mlacast.kernels.config.dense_prefill import PrefillConfig, prefill_config  # noqa: E402
from mlacast.kernels.config.merge_attention_states import merge_config  # noqa: E402
from mlacast.kernels.config.output import OutputConfig  # noqa: E402
from mlacast.kernels.config.v_up_project import v_up_config  # noqa: E402
from mlacast.kernels.triton import (  # noqa: E402
    dense_mla_prefill,
    merge_attention_states,
    v_up_project,
)
from tests.kernels import test_triton_compile as gates  # noqa: E402
from tests.kernels.sm90_build import disassemble, needs_gated_triton  # noqa: E402

PREFILL = dense_mla_prefill._dense_mla_prefill_kernel
MERGE = merge_attention_states._merge_attention_states_kernel
V_UP = v_up_project._v_up_project_kernel
# Kind, elements of a scale, types of codes and scales.
KINDS = {
    "bf16": (0, 512, "*bf16", "*bf16"),
    "fp8_tensor": (1, 512, "*u8", "*u8"),
    "float32_128": (2, 128, "*u8", "*fp32"),
    "ue8m0_32": (4, 32, "*u8", "*i32"),
    "nvfp4": (5, 16, "*u8", "*u8"),
}
TYPES = {
    **{f"{name}_ptr": "*bf16" for name in ("q", "k", "v", "latent", "weight")},
    **{f"out{part}_ptr": "*bf16" for part in range(4)},
    "cu_q_ptr": "*i32",
    "cu_k_ptr": "*i32",
    "query_sign": "fp32",
    "score_scale": "fp32",
}
# Steps that are multiples of 16 in a model; those of lse and of scales are what they are.
ALIGNED = re.compile(r"stride_(?!sf|\w*lse)")


@dataclass(frozen=True)
class Configuration:
    """A kernel as its launcher can choose it.

    Attributes:
        id: Test id.
        kernel: Triton function.
        kind: Output, one of ``KINDS``; 16384 features in one group.
        constants: Its other compile-time arguments.
        num_warps: Warps of a program.
        num_stages: Depth of its pipelines.
        capability: Target.
        product: Matrix instruction that has to be there, if any.
    """

    id: str
    kernel: Any
    kind: str
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3
    capability: int = 90
    product: str = ""


def _prefill(
    id: str, kind: str, config: PrefillConfig, capability: int = 90, causal: bool = True
) -> Configuration:
    constants = {
        "CAUSAL": causal,
        "TILES": config,
        "heads_per_key_head": 1,
    }
    product = "HGMMA" if capability == 90 else "HMMA"
    stages = config.num_stages
    return Configuration(
        id, PREFILL, kind, constants, config.num_warps, stages, capability, product
    )


def _merge(id: str, kind: str, parts: int, width: int, capability: int = 90) -> Configuration:
    config = merge_config(parts, 128, width)
    return Configuration(
        id, MERGE, kind, {"MERGE": config}, config.num_warps, capability=capability
    )


def _v_up(
    id: str, kind: str, num_tokens: int, unit: str = "value", capability: int = 90, step: int = 128
) -> Configuration:
    """Weights are contiguous along ``unit``, and ``step`` elements apart along the other one."""
    config = v_up_config(num_tokens, step)
    constants = {"TILES": config, f"stride_weight_{unit}": 1}
    product = "HGMMA" if capability == 90 else "HMMA"
    stages = config.num_stages
    return Configuration(id, V_UP, kind, constants, config.num_warps, stages, capability, product)


LARGE = 227 << 10
CONFIGURATIONS = (
    _prefill("prefill_bf16", "bf16", prefill_config(8192, LARGE)),
    _prefill("prefill_full_float32_128", "float32_128", prefill_config(8192, LARGE), causal=False),
    _prefill("prefill_nvfp4", "nvfp4", prefill_config(8192, LARGE)),
    _prefill("prefill_short_ue8m0_32", "ue8m0_32", prefill_config(64, LARGE)),
    _prefill("prefill_sm80_bf16", "bf16", prefill_config(8192, 163 << 10), 80),
    _prefill("prefill_99_kib_nvfp4", "nvfp4", prefill_config(8192, 99 << 10), 80),
    _merge("merge_2_bf16", "bf16", 2, 128),
    _merge("merge_4_fp8_tensor_512", "fp8_tensor", 4, 512),
    _merge("merge_2_float32_128", "float32_128", 2, 128),
    _merge("merge_2_nvfp4", "nvfp4", 2, 128),
    _merge("merge_2_nvfp4_sm80", "nvfp4", 2, 128, 80),
    _v_up("v_up_bf16", "bf16", 128),
    _v_up("v_up_small_fp8_tensor", "fp8_tensor", 64),
    _v_up("v_up_view_of_kv_b_proj_float32_128", "float32_128", 128, "latent"),
    _v_up("v_up_nvfp4", "nvfp4", 128),
    _v_up("v_up_far_weights", "bf16", 128, step=2**25),
    _v_up("v_up_sm80_ue8m0_32", "ue8m0_32", 128, capability=80),
)


def _compile(configuration: Configuration) -> Any:
    kind, group, codes, scales = KINDS[configuration.kind]
    constants = {
        "OUTPUT": OutputConfig(
            kind, group, 16384, False, 1e-10, 256 if configuration.kind == "nvfp4" else 0
        ),
        "NATIVE": configuration.capability >= 89,
        "PDL": configuration.capability >= 90,
        **configuration.constants,
    }
    if configuration.kernel is PREFILL:
        del constants["PDL"]
    types = {**TYPES, "data_ptr": codes, "sf_ptr": scales}
    if configuration.kind == "bf16":
        types["scale_ptr"] = "*bf16"
    names = configuration.kernel.arg_names
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name, "*fp32" if name.endswith("_ptr") else "i32")
        for name in names
    }
    unaligned = configuration.kernel.do_not_specialize_on_alignment or ()
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if name not in constants
        if ALIGNED.match(name) or (name.endswith("_ptr") and name not in unaligned)
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    options = {
        "num_warps": configuration.num_warps,
        "num_stages": configuration.num_stages,
        "enable_fp_fusion": False,
    }
    source = ASTSource(configuration.kernel, signature, values, attributes)
    target = GPUTarget("cuda", configuration.capability, 32)
    return triton.compile(source, target=target, options=options)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda case: case.id)
def test_compiles_within_limits(configuration: Configuration, tmp_path: Path) -> None:
    compiled = _compile(configuration)
    limit = (
        99 << 10 if "99_kib" in configuration.id else gates.SHARED_LIMIT[configuration.capability]
    )
    assert compiled.metadata.shared <= limit
    usage = disassemble(compiled.asm["cubin"], tmp_path, "-res-usage")
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack is not None
    # With all 255 registers in use, ptxas spills a few of them on sm_80.
    assert int(stack[1]) <= (0 if configuration.capability == 90 else 128), usage
    sass = disassemble(compiled.asm["cubin"], tmp_path, "-sass")
    if configuration.product:
        assert set(re.findall(r"\b(HGMMA|HMMA)\b", sass)) == {configuration.product}
    if configuration.kind == "nvfp4":
        # An H200 stored zeros for sums of a product by the program for others.
        by_program = "0f4A7FFFF0" in compiled.asm["ptx"]
        assert by_program == (configuration.kernel is MERGE and configuration.capability == 90)
    # Rows come in pieces of 16 bytes.
    assert "LDG.E.128" in sass or re.search(r"LDGSTS\.E(?:\.\w+)*\.128", sass)


@needs_gated_triton
def test_merge_to_nvfp4_leaves_time_for_its_memory(tmp_path: Path) -> None:
    """At 75 % of an H200's copy rate integer units have time for 21 instructions an element.

    They run at half the rate of sums and products. A thread has 32 elements.
    """
    (configuration,) = (one for one in CONFIGURATIONS if one.id == "merge_2_nvfp4")
    sass = disassemble(_compile(configuration).asm["cubin"], tmp_path, "-sass")
    integer = "LOP3|FMNMX|SHF|PRMT|LEA|FSETP|ISETP|IADD3|VIADD|FSEL|SEL|F2FP|VIMNMX"
    assert len(re.findall(rf" (?:{integer})\b", sass)) <= 20 * 32

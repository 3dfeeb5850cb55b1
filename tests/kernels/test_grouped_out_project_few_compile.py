"""The kernel of few tokens with scales per 32 compiles for sm_90a into what it is meant to be."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="needs triton to compile kernels")

from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from mlacast.kernels.config import hopper_grouped_out_project_few as config  # noqa: E402
from mlacast.kernels.gluon.sm90 import grouped_out_project_few as few  # noqa: E402
from mlacast.kernels.gluon.sm90.grouped_out_project_few_roles import _spread  # noqa: E402
from tests.kernels.sm90_build import Build, build_source, needs_gated_triton  # noqa: E402


def _codes(rows: int) -> str:
    """Type of a tensor descriptor, as Triton spells it at a launch."""
    return (
        f"tensordesc<fp8e4nv[{rows}, 128],NVMMASharedLayout(swizzle_byte_width=128, "
        "element_bitwidth=8, rank=2, transposed=False, fp4_padded=False, cga_layout=[])>"
    )


def _build(plan: config.FewPlan) -> Build:
    types = {
        "x_desc": _codes(plan.block_m),
        "weight_desc": _codes(plan.block_n),
        "sf_ptr": "*i32",
        "weight_sf_ptr": "*i32",
        "out_ptr": "*bf16",
        "PLAN": "constexpr",
    }
    kernel = few.project_few_kernel
    names = kernel.arg_names
    signature = {name: types.get(name, "i32") for name in names}
    attributes = {(names.index("out_ptr"),): [["tt.divisibility", 16]]}
    source = GluonASTSource(kernel, signature, {(names.index("PLAN"),): plan}, attributes)
    options = {"num_warps": 4, "maxnreg": config.FEW_REGISTERS, "launch_pdl": True}
    return build_source(source, options)


@needs_gated_triton
@pytest.mark.parametrize(
    ("tokens", "features"),
    [(1, 512), (64, 512), (1, 4096), (16, 4096), (17, 4096), (64, 4096), (8, 16384), (64, 8192)],
)
def test_kernel_fits_and_multiplies_codes(tokens: int, features: int) -> None:
    plan = config.plan_few(tokens, features)
    assert plan is not None
    built = _build(plan)
    assert built.spilled_bytes == 0
    # Four parts of a step, two consumers. Work falls with the tokens that there is room for.
    assert built.code_products == {f"64x{plan.block_m}": 8}
    assert "MMA" not in re.sub("QGMMA", "", built.sass)
    # A step's scales of two columns come in four loads, those of two tokens a pair of parts in one.
    loops = built.key_loops
    for loop in loops:
        assert len(re.findall(r"\bLDS ", loop)) == 4
        assert len(re.findall(r"\bLDS\.64\b", loop)) == plan.block_m // 4
        # Two float32 instructions for each sum and part.
        assert len(re.findall(r"\bF(?:FMA|MUL)\b", loop)) == 4 * plan.block_m
    assert len(loops) == 2
    # Two products are on their way before one is waited for.
    for loop in loops:
        events = re.findall(r"\b(QGMMA|DEPBAR)\b", loop)
        assert events == ["QGMMA", "QGMMA", *["DEPBAR", "QGMMA"] * 2, "DEPBAR", "DEPBAR"]


def test_plans() -> None:
    """Room for tokens is a power of two; stages are even, so that each has one consumer."""
    plans = {tokens: config.plan_few(tokens, 4096) for tokens in (1, 8, 9, 32, 33, 64)}
    found = {
        tokens: plan and (plan.block_m, plan.stages, plan.steps) for tokens, plan in plans.items()
    }
    assert found == {
        1: (8, 8, 32),
        8: (8, 8, 32),
        9: (16, 8, 32),
        32: (32, 8, 32),
        33: (64, 8, 32),
        64: (64, 8, 32),
    }
    for tokens in (8, 16, 32, 64):
        for features in range(256, 64 * 1024, 128):
            plan = config.plan_few(tokens, features)
            if plan is not None:
                assert plan.stages % 2 == 0
                assert plan.stages >= 6
                assert 2 * plan.room >= plan.steps
                assert plan.steps < 256, "the loop's length is hidden in eight bits"
    assert config.plan_few(64, 4096, stages=10) == config.FewPlan(64, 64, 10, 32, 16)
    assert config.plan_few(64, 4096, stages=12) is None, "they do not fit"
    assert config.plan_few(64, 4096, stages=7) is None, "they would change consumers"
    assert config.plan_few(65, 4096) is None
    assert config.plan_few(64, 128) is None, "a step for each consumer"
    assert config.plan_few(64, 128 * 1024) is None, "scales do not fit"


def test_scales_as_bfloat16_for_all_pairs_of_codes() -> None:
    """The function's own body, on integers of torch: a word has two codes, each in a half."""
    codes = torch.arange(256, dtype=torch.int32)
    words = (codes[:, None] << 16) | codes
    found = _spread.fn(words).contiguous().view(torch.bfloat16).view(256, 256, 2).double()
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), codes - 127)
    powers[255] = torch.nan
    expected = torch.stack((powers.expand(256, 256), powers[:, None].expand(256, 256)), -1)
    assert torch.equal(found.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))

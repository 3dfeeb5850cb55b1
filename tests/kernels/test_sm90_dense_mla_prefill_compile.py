"""The Hopper dense prefill kernel compiles for sm_90a as its pipeline needs it; no GPU is used.

Registers hold accumulators, scores, weights and the query at once: a spill, or an accumulator that
has to move while a product is in flight, serialises every wgmma.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton to compile kernels")

from mlacast.kernels.config.output import OutputConfig  # noqa: E402
from tests.kernels.sm90_build import Build, build_source, needs_gated_triton  # noqa: E402

pytestmark = needs_gated_triton


def _output(kind: int, group: int, chunk32: bool = False, amax_floor: float = 0.0) -> OutputConfig:
    return OutputConfig(kind, group, 0, chunk32, amax_floor, 0)


PLAIN = {
    "SEQUENCES": 32,
    "CAUSAL": True,
    "OUTPUT": _output(0, 512),
}
SF_TYPES = {0: "*bf16", 1: "*u8", 4: "*i32", 5: "*u8"}
ALIGNED = ("stride_data_token", "stride_data_group", "v_ptr", "data_ptr")


def _descriptor(rows: int, columns: int) -> str:
    """Type of a tensor descriptor, as Triton spells it at a launch."""
    return (
        f"tensordesc<bf16[{rows}, {columns}],NVMMASharedLayout(swizzle_byte_width=128, "
        "element_bitwidth=16, rank=2, transposed=False, fp4_padded=False, cga_layout=[])>"
    )


def _type_of(name: str, constants: dict[str, Any]) -> str:
    kind = constants["OUTPUT"].kind
    special = {
        "q_desc": _descriptor(64, 64),
        "k_desc": _descriptor(128, 64),
        "v_desc": _descriptor(128, 128),
        "v_ptr": "*bf16",
        "data_ptr": "*u8" if kind else "*bf16",
        "sf_ptr": SF_TYPES.get(kind, "*fp32"),
        "softmax_scale": "fp32",
    }
    if name in special:
        return special[name]
    if name.startswith("cu_seqlens"):
        return "*i32"
    return "*fp32" if name.endswith("_ptr") else "i32"


def _build(constants: dict[str, Any]) -> Build:
    from triton.experimental.gluon._runtime import GluonASTSource

    from mlacast.kernels.gluon.sm90.dense_mla_prefill import OPTIONS, dense_mla_prefill_kernel

    names = dense_mla_prefill_kernel.arg_names
    types = {
        name: "constexpr" if name in constants else _type_of(name, constants) for name in names
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED}
    source = GluonASTSource(dense_mla_prefill_kernel, types, values, aligned)
    return build_source(source, OPTIONS)


CASES = {
    "bf16": PLAIN,
    "bf16-many-sequences": PLAIN | {"SEQUENCES": 128},
    "group64-float32-many-sequences": {
        **PLAIN,
        "OUTPUT": _output(2, 64, amax_floor=1e-10),
        "SEQUENCES": 128,
    },
    "group128-packed": PLAIN | {"OUTPUT": _output(4, 128, amax_floor=1e-10)},
    "mxfp8-chunk32": PLAIN | {"OUTPUT": _output(4, 32, True, 1e-10)},
    "nvfp4": PLAIN | {"OUTPUT": _output(5, 16)},
}
# Of 128 rows of 128 a thread stores 64 numbers: bfloat16, or codes of 8 bits. Codes of 4 bits are
# stored 16 at a time, in a loop of which there are two.
STORES = {0: {"128": 16}, 5: {"64": 4}}


@pytest.mark.parametrize("constants", CASES.values(), ids=CASES)
def test_compiles_without_serialised_wgmma_or_spills(constants: dict[str, Any]) -> None:
    built = _build(constants)
    assert built.spilled_bytes == 0
    assert built.wide_stores == STORES.get(constants["OUTPUT"].kind, {"64": 16})
    # First scores, loop, last product with the values: 12 + (12 + 8) + 8 for each consumer.
    assert built.products == {"64x128": 2 * 40}
    loops = built.key_loops
    assert len(loops) == 2, "one for each consumer"
    for loop in loops:
        assert not re.search(r"\b(LDL|STL)\b", loop)
        _assert_softmax_runs_beside_the_product(loop)


def _assert_softmax_runs_beside_the_product(loop: str) -> None:
    """The wait for the product with the values comes after the exponentials, not before."""
    lines = loop.splitlines()
    waits = [at for at, line in enumerate(lines) if "WARPGROUP.DEPBAR.LE" in line]
    assert len(waits) == 2, "for the scores, and for the product with the values"
    between = [line for line in lines[waits[0] : waits[1]] if "MUFU.EX2" in line]
    assert len(between) >= 64

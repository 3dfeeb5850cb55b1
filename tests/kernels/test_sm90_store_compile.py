"""The storing epilogue of the Hopper kernels compiles on its own; no GPU is used.

The kernel around it is the one that ``tests/gpu/test_hopper_store.py`` runs.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton to compile kernels")

from mlacast.kernels.config.output import OutputConfig  # noqa: E402
from tests.kernels.sm90_build import needs_gated_triton  # noqa: E402

pytestmark = needs_gated_triton

MXFP8 = OutputConfig(4, 32, 4096, False, 1e-4, 0)
NVFP4 = OutputConfig(5, 16, 4096, False, 0.0, 0)
# What is stored, and whether all heads of a tile exist.
CASES = {
    "bf16-partial": (OutputConfig(0, 512, 4096, False, 0.0, 0), False),
    "mxfp8": (MXFP8, True),
    "mxfp8-chunk32-partial": (MXFP8._replace(chunk32=True), False),
    "group32-float32": (MXFP8._replace(kind=2), True),
    "group64-pow2": (MXFP8._replace(kind=3, group=64), True),
    "nvfp4": (NVFP4, True),
    "nvfp4-partial": (NVFP4, False),
}
ALIGNED = ("x_ptr", "data_ptr", "stride_data_token", "stride_data_group")
SF_TYPES = {0: "*bf16", 2: "*fp32", 3: "*fp32", 4: "*i32", 5: "*u8"}


def _compile(kernel: Any, constants: dict[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from tests.kernels.sm90_probes import OPTIONS

    kind, names = constants["OUTPUT"].kind, kernel.arg_names
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in names}
    types |= {"data_ptr": "*u8" if kind else "*bf16", "sf_ptr": SF_TYPES[kind]}
    types |= dict.fromkeys(constants, "constexpr")
    places = {name: (names.index(name),) for name in names}
    values = {places[name]: value for name, value in constants.items()}
    aligned = {places[name]: [["tt.divisibility", 16]] for name in ALIGNED}
    source = GluonASTSource(kernel, {name: types[name] for name in names}, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("masked", [False, True], ids=["scaled", "masked"])
def test_compiles_without_shared_memory(case: str, masked: bool) -> None:
    from tests.kernels.sm90_probes import store_scaled_block_kernel

    output, is_full = CASES[case]
    constants = {"FULL_TILES": is_full, "MASKED": masked, "OUTPUT": output}
    compiled = _compile(store_scaled_block_kernel, constants)
    assert compiled.metadata.shared == 0, "columns change places by shuffles"
    # Exponents may be bytes; codes and values leave eight at a time.
    assert "st.global.v2.b32" in compiled.asm["ptx"] or "st.global.v4.b32" in compiled.asm["ptx"]
    assert "st.global.b16" not in compiled.asm["ptx"]
    assert "st.global.b8" not in compiled.asm["ptx"] or output.kind in (4, 5)

"""The Hopper prefill kernel compiles for sm_90a as its pipeline needs it; no GPU is used.

A spill in a role, an ignored register count or a serialised wgmma costs more than any tuning wins,
and each is a silent note of ptxas.
"""

from __future__ import annotations

import collections
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs triton to compile kernels")

# Registers and spills are facts about one compiler: the one the GPU results were recorded with.
GATED_TRITON = "3.6."
pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith(GATED_TRITON),
    reason=f"the gate holds for triton {GATED_TRITON}x, found {triton.__version__}",
)

SHARED_MEMORY_BYTES = 227 * 1024
PLAIN = {
    "HEAD_BLOCKS": 1,
    "FULL_TILES": True,
    "CHUNK16": False,
    "HAS_NORM": False,
    "HAS_ROPE": False,
    "HALF_PAIRING": False,
    "HAS_SINK": False,
    "HAS_LENGTH": False,
    "KIND": 0,
    "GROUP": 512,
    "F": 32768,
    "CHUNK32": False,
    "AMAX_FLOOR": 0.0,
}
FUSED = PLAIN | {"HAS_NORM": True, "HAS_ROPE": True, "HAS_SINK": True, "HAS_LENGTH": True}


def _fp8(kind: int, group: int, **constants: bool) -> dict[str, Any]:
    """Everything fused, eight heads to a group of the output, one scale to ``group`` values."""
    scaled = {"KIND": kind, "GROUP": group, "F": 4096, "AMAX_FLOOR": 1e-4}
    return FUSED | scaled | constants


# What dispatch sends here, with the bytes that a thread may spill: once per tile, and none in a
# loop over keys. Decision 010 says where they come from.
CASES = {
    "plain-bf16": (PLAIN, 0),
    "fused-bf16": (FUSED, 16),
    "fused-fp8-tensor": (_fp8(1, 512), 8),
    "fused-mxfp8": (_fp8(4, 32), 12),
    "fused-chunk16-chunk32-mxfp8": (_fp8(4, 32, CHUNK16=True, CHUNK32=True), 12),
    "fused-half-pairing-mxfp8": (_fp8(4, 32, HALF_PAIRING=True), 12),
    "fused-partial-tile-mxfp8": (_fp8(4, 32, FULL_TILES=False), 12),
    "fused-group128-float32": (_fp8(2, 128), 56),
    "fused-group128-packed": (_fp8(4, 128), 16),
    "fused-group64-pow2": (_fp8(3, 64), 16),
    "fused-group32-float32": (_fp8(2, 32), 188),
}
ALIGNED = (
    "stride_q_token",
    "stride_q_head",
    "stride_kv",
    "stride_data_token",
    "stride_data_group",
    "num_heads",
)


def _type_of(argument: str, kind: int) -> str:
    """Type of a runtime argument."""
    if argument in ("q_ptr", "kv_ptr"):
        return "*bf16"
    if argument == "data_ptr":
        return "*u8" if kind else "*bf16"
    if argument in ("indices_ptr", "length_ptr", "positions_ptr"):
        return "*i32"
    if argument == "sf_ptr":
        return {0: "*bf16", 4: "*i32"}.get(kind, "*fp32")
    return "*fp32" if argument.endswith("_ptr") else "fp32" if argument in SCALARS else "i32"


SCALARS = ("eps", "sm_scale")


def _compile(constants: dict[str, Any]) -> Any:
    """Compile one variant for sm_90a."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from mlacast.kernels.gluon.sm90.sparse_mla_prefill import OPTIONS, sparse_mla_prefill_kernel

    names = sparse_mla_prefill_kernel.arg_names
    types = {
        name: "constexpr" if name in constants else _type_of(name, constants["KIND"])
        for name in names
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in names if types[name].startswith("*") or name in ALIGNED]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(sparse_mla_prefill_kernel, types, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)


def _tool(*command: str) -> str:
    """Run a program of Triton's package; its output and notes as one text."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    run = subprocess.run(
        [str(folder / command[0]), *command[1:]], capture_output=True, text=True, check=True
    )
    return run.stdout + run.stderr


def _key_loops(role: str) -> list[str]:
    """Innermost loops of a role that multiply: from a conditional backward branch's target."""
    places = [
        (int(address, 16), text)
        for address, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", role)
    ]
    loops = []
    for address, text in places:
        branch = re.match(r"@!?U?P\d+ BRA 0x([0-9a-f]+)", text)
        if branch and int(branch[1], 16) < address:
            start = int(branch[1], 16)
            body = "\n".join(text for at, text in places if start <= at <= address)
            if "HGMMA" in body:
                loops.append((start, address, body))
    return [
        body
        for start, stop, body in loops
        if not any(start <= a and b <= stop and (a, b) != (start, stop) for a, b, _ in loops)
    ]


@pytest.mark.parametrize(("constants", "spill_bytes"), CASES.values(), ids=CASES)
def test_compiles_without_serialised_wgmma_or_spills_in_key_loops(
    constants: dict[str, Any], spill_bytes: int, tmp_path: Path
) -> None:
    kernel = _compile(constants)
    assert kernel.metadata.shared <= SHARED_MEMORY_BYTES
    ptx, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    ptx.write_text(kernel.asm["ptx"])
    cubin.write_bytes(kernel.asm["cubin"])
    notes = _tool("ptxas", "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(tmp_path / "again.cubin"))
    assert not re.findall(r"C75\d\d", notes)
    assert max(int(number) for number in re.findall(r"(\d+) bytes spill", notes)) <= spill_bytes
    sass = _tool("cuobjdump", "-sass", str(cubin))
    # Every role starts by setting its register count: scores and two halves of the output multiply.
    loops = [loop for role in re.split("USETMAXREG", sass) for loop in _key_loops(role)]
    assert len(loops) == 3
    assert not any(re.search(r"\b(LDL|STL)\b", loop) for loop in loops)
    products = collections.Counter(re.findall(r"HGMMA\.(64x\d+)x16\.F32\.BF16", sass))
    assert products["64x64"] > 0, "scores"
    assert products["64x128"] > 0, "output"
    assert "HMMA" not in re.sub("HGMMA", "", sass)
    # Rows travel in 16-byte pieces.
    assert set(re.findall(r"LDGSTS\.E(?:\.\w+)*?\.(\d+) ", sass)) == {"128"}

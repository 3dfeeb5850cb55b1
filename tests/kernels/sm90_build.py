"""Build a Hopper kernel for sm_90a without a GPU, and look at what the compiler made of it."""

from __future__ import annotations

import collections
import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs triton to compile kernels")

# Registers and spills are facts about one compiler: the one the GPU results were recorded with.
_GATED_TRITON = "3.6."
needs_gated_triton = pytest.mark.skipif(
    not triton.__version__.startswith(_GATED_TRITON),
    reason=f"the gate holds for triton {_GATED_TRITON}x, found {triton.__version__}",
)
SHARED_MEMORY_BYTES = 227 * 1024
_ALIGNED = (
    "stride_q_token",
    "stride_q_head",
    "stride_kv",
    "stride_data_token",
    "stride_data_group",
    "num_heads",
)
_WORDS = (
    "cache_ptr",
    "extra_cache_ptr",
    "indices_ptr",
    "extra_indices_ptr",
    "length_ptr",
    "extra_length_ptr",
    "positions_ptr",
)


@dataclass(frozen=True)
class Build:
    """What a compilation gave.

    Attributes:
        notes: What ptxas says about registers and wgmma.
        sass: Disassembly.
        shared: Bytes of shared memory.
        llir: LLVM IR before the compiler fuses multiplications with additions.
    """

    notes: str
    sass: str
    shared: int
    llir: str

    @property
    def spilled_bytes(self) -> int:
        """Most bytes that are stored or loaded by spills, per thread."""
        return max(int(number) for number in re.findall(r"(\d+) bytes spill", self.notes))

    @property
    def sums_of_products(self) -> int:
        """Sums of two products, other than squares: which one is rounded is the compiler's choice.

        It chooses by what surrounds them, so two variants may give different bits.
        """
        step = re.compile(r"(%\S+) = (fmul|fadd|fsub)(?: [a-z]+)* float (\S+), ([^\s,]+)")
        products = {}
        count = 0
        for name, operation, left, right in step.findall(self.llir):
            if operation == "fmul":
                products[name] = left == right
            elif left in products and right in products:
                count += not (products[left] and products[right])
        return count

    @property
    def products(self) -> dict[str, int]:
        """Warp-group products of bfloat16 by rows x columns."""
        found = re.findall(r"HGMMA\.(64x\d+)x16\.F32\.BF16", self.sass)
        return dict(collections.Counter(found))

    @property
    def float16_products(self) -> dict[str, int]:
        """Warp-group products of float16 by rows x columns."""
        found = re.findall(r"HGMMA\.(64x\d+)x16\.F32 ", self.sass)
        return dict(collections.Counter(found))

    @property
    def code_products(self) -> dict[str, int]:
        """Warp-group products of e4m3 codes, 32 dimensions each, by rows x columns."""
        found = re.findall(r"QGMMA\.(64x\d+)x32\.F32\.E4M3\.E4M3", self.sass)
        return dict(collections.Counter(found))

    @property
    def copy_bits(self) -> set[str]:
        """Widths of the asynchronous copies that have one."""
        return set(re.findall(r"LDGSTS\.E(?:\.\w+)*?\.(\d+) ", self.sass))

    @property
    def wide_stores(self) -> dict[str, int]:
        """Stores of 8 or 16 bytes a thread, by their bits."""
        return dict(collections.Counter(re.findall(r"\bSTG\.E\.(64|128) ", self.sass)))

    @property
    def copy_barriers(self) -> int:
        """Barriers of the role with the most asynchronous copies."""
        roles = re.split("USETMAXREG", self.sass)
        copying = max(roles, key=lambda role: role.count("LDGSTS"))
        return len(re.findall(r"\bBAR\.SYNC", copying))

    @property
    def key_loops(self) -> list[str]:
        """Innermost loops that multiply; every role starts by setting its register count."""
        return [loop for role in re.split("USETMAXREG", self.sass) for loop in _key_loops(role)]


def _type_of(argument: str, kind: int) -> str:
    """Type of a runtime argument."""
    if argument in ("q_ptr", "kv_ptr"):
        return "*bf16"
    if argument == "data_ptr":
        return "*u8" if kind else "*bf16"
    if argument in _WORDS:
        return "*i32"
    if argument == "sf_ptr":
        return {0: "*bf16", 4: "*i32", 5: "*u8"}.get(kind, "*fp32")
    if argument.endswith("_ptr"):
        return "*fp32"
    return "fp32" if argument in ("eps", "sm_scale", "v_scale") else "i32"


def run_tool(*command: str) -> str:
    """Run a program of Triton's package; its output and notes as one text."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    run = subprocess.run(
        [str(folder / command[0]), *command[1:]], capture_output=True, text=True, check=True
    )
    return run.stdout + run.stderr


def disassemble(cubin: bytes, folder: Path, *flags: str) -> str:
    """What cuobjdump says of a kernel, whose file is left in ``folder``."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    return run_tool("cuobjdump", *flags, str(file))


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
            if re.search("[HQ]GMMA", body):
                loops.append((start, address, body))
    return [
        body
        for start, stop, body in loops
        if not any(start <= a and b <= stop and (a, b) != (start, stop) for a, b, _ in loops)
    ]


def compile_kernel(
    kernel: Any,
    options: dict[str, Any],
    constants: dict[str, Any],
    unaligned: Sequence[str] = (),
    words: Sequence[str] = (),
) -> Build:
    """Compile one variant.

    Pointers and strides named in ``unaligned`` may be any, pointers in ``words`` point at int32.
    """
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    kind = constants["OUTPUT"].kind
    types = {name: "constexpr" if name in constants else _type_of(name, kind) for name in names}
    types |= dict.fromkeys(words, "*i32")
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [
        name
        for name in names
        if name not in unaligned and (types[name].startswith("*") or name in _ALIGNED)
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return build_source(GluonASTSource(kernel, types, values, attributes), options)


def build_source(source: Any, options: dict[str, Any]) -> Build:
    """Compile what Triton takes as source, with what its ptxas says."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    notes = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(notes):
        knobs.nvidia.dump_ptxas_log = True
        # A kernel from the cache has no notes.
        knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        sass = disassemble(compiled.asm["cubin"], Path(folder), "-sass")
    # ACQBULK waits for the kernel before, PREEXIT lets the next one start.
    early = [name for name in ("ACQBULK", "PREEXIT") if name in sass]
    assert early == (["ACQBULK", "PREEXIT"] if options.get("launch_pdl") else [])
    assert sass.find("ACQBULK") <= sass.find("PREEXIT")
    built = Build(notes.getvalue(), sass, compiled.metadata.shared, compiled.asm["llir"])
    assert built.shared <= SHARED_MEMORY_BYTES
    assert "ptxas info" in built.notes
    assert not re.findall(r"C75\d\d", built.notes)
    return built


def build(
    kernel: Any,
    options: dict[str, int],
    constants: dict[str, Any],
    unaligned: Sequence[str] = (),
    words: Sequence[str] = (),
) -> Build:
    """Compile one variant of a kernel of warpgroup products, and check what holds for all of them.

    Shared memory fits, no role lost its registers, no register is spilled, no wgmma is serialised,
    and the only matrix instructions are those of a warpgroup.
    """
    result = compile_kernel(kernel, options, constants, unaligned, words)
    assert len(result.key_loops) == 3, "scores and two halves of the output"
    assert result.spilled_bytes == 0
    # A division that calls its slow path: see sm90_division.
    assert "CALL" not in result.sass
    assert "MMA" not in re.sub("[HQ]GMMA", "", result.sass)
    return result

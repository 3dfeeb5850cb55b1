"""The merge of Hopper decode splits compiles to few instructions and no exchange between warps.

Most of its data come from the L2 cache, so that instructions are what costs time. No GPU is used.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton to compile kernels")

from mlacast.kernels.config.attention import EndConfig  # noqa: E402
from mlacast.kernels.config.output import OutputConfig  # noqa: E402
from mlacast.kernels.config.sparse_attention import FEW, MANY  # noqa: E402
from tests.kernels.sm90_build import compile_kernel, needs_gated_triton  # noqa: E402

pytestmark = needs_gated_triton

PLAIN = {
    "FULL_TILES": True,
    "PDL": True,
    "END": EndConfig(),
    "OUTPUT": OutputConfig(0, 512, 32768, False, 0.0, 0),
}
MXFP8 = PLAIN | {"OUTPUT": OutputConfig(4, 32, 4096, False, 1e-4, 0)}
TENSOR = PLAIN | {"OUTPUT": OutputConfig(1, 512, 32768, False, 0.0, 0)}
CHUNK32 = PLAIN | {"OUTPUT": OutputConfig(4, 32, 4096, True, 1e-4, 0)}
CHUNK32_OF_3 = PLAIN | {"OUTPUT": OutputConfig(4, 32, 1536, True, 1e-4, 0)}
NVFP4 = PLAIN | {"OUTPUT": OutputConfig(5, 16, 4096, False, 0.0, 0)}
SINK = {"END": EndConfig(has_sink=True)}
FUSED = {"END": EndConfig(has_sink=True, rotates_back=True)}
HALF = {"END": EndConfig(has_sink=True, rotates_back=True, half_pairing=True)}
PARTIAL = {"FULL_TILES": False}


def _groups(kind: int, group: int) -> dict[str, Any]:
    """Eight heads to a group of the output, one scale to ``group`` values."""
    return PLAIN | {"OUTPUT": OutputConfig(kind, group, 4096, False, 1e-10, 0)}


# Constants, whether for many rows, most instructions of a warp that are in no loop. The merge of 2
# splits runs about 50 less: what surrounds the loops over further splits.
CONFIGURATIONS = {
    "bf16": (PLAIN, True, 455),
    "bf16-half-sink-partial": (PLAIN | HALF | PARTIAL, True, 570),
    "bf16-one-head": (PLAIN | {"num_heads": 1}, False, 490),
    "tensor-sink": (
        PLAIN | SINK | {"OUTPUT": OutputConfig(1, 512, 32768, False, 0.0, 0)},
        True,
        580,
    ),
    "mxfp8-fused": (MXFP8 | FUSED, True, 715),
    "mxfp8-fused-few": (MXFP8 | FUSED, False, 650),
    "mxfp8-half": (MXFP8 | HALF, True, 755),
    "mxfp8-chunk32": (CHUNK32 | FUSED, True, 740),
    "mxfp8-chunk32-of-3-partial": (CHUNK32_OF_3 | HALF | PARTIAL, True, 795),
    "mxfp8-chunk32-of-3-few": (CHUNK32_OF_3 | HALF, False, 690),
    "group128-packed": (_groups(4, 128) | FUSED, True, 685),
    "group64-packed-partial": (_groups(4, 64) | PARTIAL, True, 635),
    "group128-float32": (_groups(2, 128) | FUSED, True, 1140),
    "group128-float32-few": (_groups(2, 128) | FUSED, False, 830),
    "group32-float32": (_groups(2, 32), True, 1025),
    "group64-pow2": (_groups(3, 64) | HALF, True, 765),
    "nvfp4-fused": (NVFP4 | FUSED, True, 1030),
    "nvfp4-half-partial": (NVFP4 | HALF | PARTIAL, True, 1075),
    "nvfp4-fused-few": (NVFP4 | FUSED, False, 745),
}


def _instructions(sass: str) -> list[tuple[int, str]]:
    """Addresses and texts up to the end of the code; a branch to itself and padding follow it."""
    places = [
        (int(address, 16), text)
        for address, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)
    ]
    return [(at, text) for at, text in places if not text.startswith("NOP")][:-1]


def _outside_of_loops(instructions: list[tuple[int, str]]) -> int:
    """Number of instructions that no backward branch jumps over."""
    loops = []
    for at, text in instructions:
        branch = re.match(r"(?:@!?U?P\d+ )?BRA (?:U?P\d+, )?0x([0-9a-f]+)", text)
        if branch and int(branch[1], 16) <= at:
            loops.append((int(branch[1], 16), at))
    return sum(not any(start <= at <= stop for start, stop in loops) for at, _ in instructions)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_compiles_to_few_instructions_without_spills(name: str) -> None:
    from mlacast.kernels.gluon.sm90 import sparse_mla_decode_merge as merge

    constants, is_for_many, limit = CONFIGURATIONS[name]
    program = MANY if is_for_many else FEW
    chosen: dict[str, Any] = constants | {"PROGRAM": program}
    options = {"num_warps": program.warps, **merge.OPTIONS}
    built = compile_kernel(merge.merge_splits_kernel, options, chosen, merge.UNALIGNED)
    assert built.spilled_bytes == 0
    assert built.shared == 0
    assert "BAR.SYNC" not in built.sass
    instructions = _instructions(built.sass)
    assert _outside_of_loops(instructions) <= limit
    elements = 512 * program.heads // (32 * program.warps)
    texts = [text for _, text in instructions]
    codes = sum("F2FP" in text and ("E4M3" in text or "BF16" in text) for text in texts)
    # Nvfp4 codes are made by additions; only scales are converted, by two
    # threads each.
    kind = constants["OUTPUT"].kind
    is_fp4 = kind == 5
    conversions = max(elements // 16, 1) if is_fp4 else elements // 2
    assert codes == conversions, "two codes, values or scales in one instruction"
    store = {0: "STG.E.128", 5: "STG.E desc"}.get(kind, "STG.E.64")
    # The logarithm is as wide as 8 codes of 4 bits.
    stores = elements // 8 + (1 if is_fp4 else 0)
    assert sum(store in text for text in texts) == stores, "8 leave together"
    wait = next(at for at, text in enumerate(texts) if text.startswith("ACQBULK"))
    wide = [at for at, text in enumerate(texts) if "LDG.E.128" in text]
    assert wait < wide[0], "partials are read after the wait"

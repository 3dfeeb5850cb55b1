"""The kernels of RoPE with FP8, append and gather compile, to few registers and wide accesses."""

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

from mlacast.descriptors.kv_format import ALL_KV_FORMATS, KvFormat  # noqa: E402
from mlacast.kernels.config.caches import (  # noqa: E402
    AppendConfig,
    CodesConfig,
    HeadsConfig,
    LatentConfig,
    append_config,
    gather_config,
    pairs_config,
    record_config,
    rope_quantize_config,
)
from mlacast.kernels.triton import (  # noqa: E402
    kv_cache_append,
    kv_cache_gather,
    rope_quantize_fp8,
)
from tests.kernels.sm90_build import disassemble  # noqa: E402


@dataclass(frozen=True)
class Variant:
    """A kernel as a launcher calls it.

    Attributes:
        name: Test id.
        module: Module of the kernel.
        constants: Compile-time arguments.
        types: Types of arguments that are not int64 pointers or int32.
        registers: Most that a thread may use: what decides how many programs are resident.
        loads: 16-byte loads that must be there.
        stores: 16-byte stores.
        half_stores: 8-byte stores.
        capability: Target.
        options: Those of the launch.
    """

    name: str
    module: Any
    constants: dict[str, Any]
    types: dict[str, str] = field(default_factory=dict)
    registers: int = 255
    loads: int = 1
    stores: int = 1
    half_stores: int = 0
    capability: int = 90
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})


CHUNK = append_config(8192, 64)
CHUNK_OPTIONS = {"num_warps": CHUNK.num_warps, "maxnreg": CHUNK.max_registers}
FEW = append_config(1, 64)
GATHER = gather_config()
MANY_QUERIES, FEW_QUERIES = rope_quantize_config(8192), rope_quantize_config(128)

ROPE = {
    "PAIRS": pairs_config(64, "half"),
    "QUERY": HeadsConfig(heads=128, columns=512, block=512),
    "KEY": HeadsConfig(heads=1, columns=512, block=512),
    "VALUE": HeadsConfig(heads=1, columns=0, block=1),
    "CODES": CodesConfig(is_e5m2=False, native=True),
    "PROGRAM": MANY_QUERIES,
    "PAGED": False,
    "PDL": True,
}
ROPE_TYPES = {
    **{f"{part}_ptr": "*i16" for part in ("q_rope", "q_nope", "k_rope", "k_nope", "v")},
    **{f"{part}_out_ptr": "*u8" for part in ("q_rope", "q_nope", "k_rope", "k_nope", "v")},
    "table_ptr": "*fp32",
    "q_scale": "fp32",
    "kv_scale": "fp32",
}
HEADS = {
    "QUERY": HeadsConfig(heads=128, columns=64, block=64),
    "KEY": HeadsConfig(heads=1, columns=64, block=64),
    "VALUE": HeadsConfig(heads=1, columns=128, block=128),
}
ROPE_VARIANTS = (
    Variant("mla", rope_quantize_fp8, ROPE, ROPE_TYPES, 48, 8, 4),
    Variant(
        "mla_interleaved_e5m2",
        rope_quantize_fp8,
        {
            **ROPE,
            "PAIRS": pairs_config(64, "interleaved"),
            "CODES": CodesConfig(is_e5m2=True, native=True),
        },
        ROPE_TYPES,
        40,
        8,
        4,
    ),
    Variant(
        "mla_few",
        rope_quantize_fp8,
        {**ROPE, "PROGRAM": FEW_QUERIES},
        ROPE_TYPES,
        40,
        4,
        2,
    ),
    Variant("pages", rope_quantize_fp8, {**ROPE, "PAGED": True}, ROPE_TYPES, 64, 8, 4),
    Variant(
        "pages_of_heads", rope_quantize_fp8, {**ROPE, **HEADS, "PAGED": True}, ROPE_TYPES, 64, 1, 0
    ),
    Variant(
        "mla_sm80",
        rope_quantize_fp8,
        {**ROPE, "CODES": CodesConfig(is_e5m2=False, native=False), "PDL": False},
        ROPE_TYPES,
        64,
        8,
        4,
        capability=80,
    ),
)

FORMATS = tuple(one for one in ALL_KV_FORMATS if not one.name.endswith("_INLINE"))


def _cache_constants(kv_format: KvFormat) -> dict[str, Any]:
    width = kv_format.d_qk or 576
    return {
        "RECORD": record_config(kv_format, width, 1000),
        "stride_slots": 1,
        "NATIVE": True,
        "PDL": True,
    }


def _cache_types(kv_format: KvFormat) -> dict[str, str]:
    cache = "*i16" if kv_format.record is None else "*u8"
    floats = {"eps": "fp32", "table_ptr": "*fp32", "weight_ptr": "*i16", "latent_ptr": "*i16"}
    return {**floats, "cache_ptr": cache, "out_ptr": "*i16"}


def _append_constants(kv_format: KvFormat, fused: bool, config: AppendConfig) -> dict[str, Any]:
    return {
        **_cache_constants(kv_format),
        "LATENT": LatentConfig(fused, fused, fused, fused),
        "PROGRAM": config,
    }


CACHE_VARIANTS = (
    *(
        Variant(
            f"append_{one.name}{'_fused' if fused else ''}",
            kv_cache_append,
            _append_constants(one, fused, CHUNK),
            _cache_types(one),
            128,
            8,
            # Codes of four bits are 8 bytes of the 16 dimensions that a thread has of a part, and
            # so are the numbers of NVFP4 that it has of each half that is rotated.
            0 if "FP4" in one.name else 4,
            4 if "FP4" in one.name else 0,
            options=CHUNK_OPTIONS,
        )
        for one in FORMATS
        for fused in (False, True)
    ),
    *(
        Variant(
            f"append_{one.name}_few",
            kv_cache_append,
            _append_constants(one, True, FEW),
            _cache_types(one),
            128,
            2,
            0,
            options={"num_warps": FEW.num_warps},
        )
        for one in (KvFormat.V4, KvFormat.V41_FP4)
    ),
    Variant(
        "append_V4_sm80",
        kv_cache_append,
        {**_append_constants(KvFormat.V4, False, CHUNK), "NATIVE": False, "PDL": False},
        _cache_types(KvFormat.V4),
        capability=80,
        options=CHUNK_OPTIONS,
    ),
    *(
        Variant(
            f"gather_{one.name}",
            kv_cache_gather,
            {**_cache_constants(one), "PROGRAM": GATHER},
            _cache_types(one),
            64,
            1,
            4,
            options={"num_warps": GATHER.num_warps},
        )
        for one in FORMATS
    ),
)


def _compile(variant: Variant) -> Any:
    (kernel,) = (
        value
        for name, value in vars(variant.module).items()
        if re.fullmatch(r"_\w+_kernel", name) and hasattr(value, "arg_names")
    )
    names = kernel.arg_names
    constants = {name: value for name, value in variant.constants.items() if name in names}
    assert constants == variant.constants, "the launcher passes other arguments"

    def type_of(name: str) -> str:
        return variant.types.get(name, "*i64" if name.endswith("_ptr") else "i32")

    signature = {name: "constexpr" if name in constants else type_of(name) for name in names}
    unaligned = {*variant.module._UNALIGNED, *variant.module._VARYING}
    # What the usual caches and rows are: pointers and strides that are multiples of 16.
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if name not in constants
        and name not in unaligned
        and (name.endswith("_ptr") or name.startswith("stride"))
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    target = GPUTarget("cuda", variant.capability, 32)
    options = {**variant.options, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
@pytest.mark.parametrize("variant", ROPE_VARIANTS + CACHE_VARIANTS, ids=lambda one: one.name)
def test_compiles_into_few_wide_accesses(variant: Variant, tmp_path: Path) -> None:
    compiled = _compile(variant)
    usage = disassemble(compiled.asm["cubin"], tmp_path, "-res-usage")
    registers, stack = (re.search(rf"{name}:(\d+)", usage) for name in ("REG", "STACK"))
    assert registers is not None and int(registers[1]) <= variant.registers, usage
    # A few spilled words are cheaper than a resident program less.
    assert stack is not None and int(stack[1]) <= 16, usage
    sass = disassemble(compiled.asm["cubin"], tmp_path, "-sass")
    assert sass.count("LDG.E.128") >= variant.loads
    assert sass.count("STG.E.128") >= variant.stores
    assert sass.count("STG.E.64") >= variant.half_stores
    if variant.constants["PDL"]:
        assert 0 <= sass.find("ACQBULK") < sass.find("LDG"), "read before its writer has ended"
    casts_to_fp8 = variant.module is rope_quantize_fp8 or (
        variant.module is kv_cache_append and "append_BF16" not in variant.name
    )
    if casts_to_fp8:
        # The instruction saturates: no clamp is compiled before it.
        is_e5m2 = variant.module is rope_quantize_fp8 and variant.constants["CODES"].is_e5m2
        kind = "e5m2" if is_e5m2 else "e4m3"
        native = f"cvt.rn.satfinite.{kind}x2.f32" in compiled.asm["ptx"]
        is_native = (
            variant.constants["CODES"].native
            if "CODES" in variant.constants
            else variant.constants["NATIVE"]
        )
        assert native == is_native


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
@pytest.mark.parametrize("variant", ROPE_VARIANTS, ids=lambda one: one.name)
def test_few_queries_are_sent_for_before_the_kernel_before_has_ended(variant: Variant) -> None:
    """Sent for only: what is loaded before that end might be what was there before it."""
    ptx = _compile(variant).asm["ptx"]
    order = re.findall(r"prefetch\.global\.L2|griddepcontrol\.wait|ld\.global", ptx)
    is_sent = variant.constants["PROGRAM"].ahead and variant.constants["PDL"]
    assert order.count("prefetch.global.L2") == int(is_sent)
    if variant.constants["PDL"]:
        assert order[: 1 + is_sent] == ["prefetch.global.L2"] * is_sent + ["griddepcontrol.wait"]


LONG_APPENDS = tuple(one for one in CACHE_VARIANTS if one.options == CHUNK_OPTIONS)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
@pytest.mark.parametrize("variant", LONG_APPENDS, ids=lambda one: one.name)
def test_append_looks_at_slots_while_latents_are_on_their_way(
    variant: Variant, tmp_path: Path
) -> None:
    """Up to the first barrier all latents are asked for, and nothing that was loaded is used.

    From there to the first branch no instruction waits for a counter of latents: the bits of an
    instruction that say which counters of loads it waits for, and which one a load counts. A
    minimum for each of 32 slots of a thread and both ranges stands there.
    """
    sass = disassemble(_compile(variant).asm["cubin"], tmp_path, "-sass")
    words = r"/\*[0-9a-f]{4}\*/\s+(.*?);.*\n\s+/\* 0x([0-9a-f]{16}) \*/"
    loaded: set[str] = set()
    counters: set[int] = set()
    latents = minima = 0
    is_behind = False
    for text, upper in re.findall(words, sass):
        control = int(upper, 16) >> 41
        if "BRA" in text:
            break
        waits_for = {at for at in range(6) if control >> 11 >> at & 1}
        assert not is_behind or not waits_for & counters, f"{text} waits for latents"
        is_behind = is_behind or "BAR.SYNC" in text
        minima += "MNMX" in text
        load = re.search(r"LDG\.E(?:\.(64|128))? R(\d+), (.*)", text)
        if is_behind:
            continue
        used = set(re.findall(r"\bR\d+", load[3] if load else text.partition(",")[2]))
        assert not used & loaded, f"{text} waits for memory"
        if load:
            first, count = int(load[2]), int(load[1] or 32) // 32
            loaded |= {f"R{at}" for at in range(first, first + count)}
            if load[1] == "128":
                latents += 1
                counters.add(control >> 5 & 7)
    assert is_behind and latents >= 8 and minima >= 64

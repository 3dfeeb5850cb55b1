"""The consumers of quantised outputs compile for sm_90a, and the portable one for sm_80."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs triton to compile kernels")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from mlacast.kernels.config import grouped_out_project as config  # noqa: E402
from mlacast.kernels.config import hopper_grouped_out_project as plans  # noqa: E402
from mlacast.kernels.config.output import OutputConfig  # noqa: E402
from mlacast.kernels.gluon.sm90 import grouped_out_project as hopper  # noqa: E402
from mlacast.kernels.triton import grouped_out_project as portable  # noqa: E402
from tests.kernels import test_triton_compile as gates  # noqa: E402
from tests.kernels.sm90_build import SHARED_MEMORY_BYTES, disassemble, needs_gated_triton, run_tool  # noqa: E402

# Kind, features of a scale, types of codes, scales and the scale of the tensor.
FORMATS = {
    "bf16": (0, 512, "*bf16", "*bf16", "*bf16"),
    "fp8_tensor": (1, 512, "*u8", "*u8", "*fp32"),
    "float32_128": (2, 128, "*u8", "*fp32", "*u8"),
    "ue8m0_32": (4, 32, "*u8", "*i32", "*u8"),
    "nvfp4": (5, 16, "*u8", "*u8", "*fp32"),
}
WEIGHTS = {
    "plain": (0, "*bf16", "*bf16"),
    "float32": (0, "*fp32", "*fp32"),
    "float16": (0, "*fp16", "*fp16"),
    "blocks": (1, "*u8", "*fp32"),
    "groups": (2, "*u8", "*i32"),
}
ALIGNED = re.compile(r"stride_(?!sf|weight_sf)|num_columns")


def _compile(format: str, weights: str, tokens: int, capability: int, chunk32: bool = False) -> Any:
    kind, group, codes, scales, scale = FORMATS[format]
    weight_kind, weight_type, weight_scales = WEIGHTS[weights]
    native = capability >= 89
    fp8_product = native and config._can_multiply_codes(kind, weight_kind)
    chosen = config.choose_variant(tokens, fp8_product)
    in_float32 = weights in ("float32", "float16")
    shared_memory = gates.SHARED_LIMIT[capability]
    variant, product = config._fit(chosen, kind, group, weight_kind, in_float32, shared_memory)
    constants = {
        "SUMMED_GROUPS": 1,
        "TILES": variant,
        "SOURCE": OutputConfig(kind, group, 4096, chunk32, 1e-10, 512 if format == "nvfp4" else 0),
        "PRODUCT": product,
        "NATIVE": native,
    }
    types = {
        "data_ptr": codes,
        "sf_ptr": scales,
        "scale_ptr": scale,
        "weight_ptr": weight_type,
        "weight_sf_ptr": weight_scales,
        "out_ptr": weight_type if weight_kind == 0 else "*bf16",
    }
    kernel = portable._project_kernel
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    unaligned = kernel.do_not_specialize_on_alignment or ()
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if name not in constants
        if ALIGNED.match(name) or (name.endswith("_ptr") and name not in unaligned)
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": False,
    }
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


CASES = [
    ("bf16", "plain", 90, "HGMMA"),
    ("fp8_tensor", "blocks", 90, "QGMMA"),
    ("float32_128", "plain", 90, "HGMMA"),
    ("float32_128", "blocks", 90, "QGMMA"),
    ("ue8m0_32", "plain", 90, "HGMMA"),
    ("ue8m0_32", "groups", 90, "HGMMA"),
    ("ue8m0_32", "blocks", 90, "QGMMA"),
    ("nvfp4", "plain", 90, "HGMMA"),
    ("float32_128", "blocks", 80, "HMMA"),
    ("ue8m0_32", "groups", 80, "HMMA"),
]


@pytest.mark.parametrize("tokens", [64, 4096])
@pytest.mark.parametrize(("format", "weights", "capability", "product"), CASES)
def test_portable_kernel_compiles_within_limits(
    format: str, weights: str, capability: int, product: str, tokens: int, tmp_path: Path
) -> None:
    compiled = _compile(format, weights, tokens, capability)
    assert compiled.metadata.shared <= gates.SHARED_LIMIT[capability]
    usage = disassemble(compiled.asm["cubin"], tmp_path, "-res-usage")
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack is not None
    assert int(stack[1]) == 0, usage
    sass = disassemble(compiled.asm["cubin"], tmp_path, "-sass")
    assert set(re.findall(r"\b(HGMMA|QGMMA|HMMA)\b", sass)) == {product}
    # Codes come in pieces of 16 bytes.
    assert re.search(r"LDGSTS\.E(?:\.\w+)*\.128", sass)


@pytest.mark.parametrize("weights", ["plain", "float32", "float16"])
@pytest.mark.parametrize("capability", [80, 89])
def test_portable_kernel_of_many_tokens_fits_where_little_memory_is_shared(
    weights: str, capability: int
) -> None:
    """Values in bfloat16, which are wider than any code."""
    compiled = _compile("bf16", weights, 4096, capability)
    assert compiled.metadata.shared <= gates.SHARED_LIMIT[capability]


def test_portable_kernel_reads_chunk32_in_pieces_of_16_bytes(tmp_path: Path) -> None:
    compiled = _compile("ue8m0_32", "groups", 64, 90, chunk32=True)
    sass = disassemble(compiled.asm["cubin"], tmp_path, "-sass")
    loads = len(re.findall(r"LDGSTS\.E(?:\.\w+)*\.128", sass))
    plain = disassemble(_compile("ue8m0_32", "groups", 64, 90).asm["cubin"], tmp_path, "-sass")
    assert loads == len(re.findall(r"LDGSTS\.E(?:\.\w+)*\.128", plain))


def test_tiles_fill_the_device() -> None:
    """8 groups of 1024 columns on 132 multiprocessors, as a model has them."""
    chosen = {
        tokens: plans.choose_variant(tokens, 1024, 8, 132, per_32=False)
        for tokens in (1, 64, 128, 256, 4096)
    }
    tiles = {tokens: (one.block_m, one.block_n) for tokens, one in chosen.items()}
    assert tiles == {
        1: (64, 64),
        64: (64, 64),
        128: (64, 128),
        256: (128, 128),
        4096: (128, 128),
    }
    # So wide that small tiles would only read the tokens more often, but not half empty.
    wide = plans.choose_variant(64, 65536, 1, 132, per_32=True)
    assert (wide.block_m, wide.block_n, wide.loaders) == (64, 128, 1)
    few = plans.choose_variant(64, 1024, 8, 132, per_32=True)
    assert (few.block_m, few.block_n, few.loaders) == (64, 64, 2)


def _codes(rows: int) -> str:
    """Type of a tensor descriptor, as Triton spells it at a launch."""
    return (
        f"tensordesc<fp8e4nv[{rows}, 128],NVMMASharedLayout(swizzle_byte_width=128, "
        "element_bitwidth=8, rank=2, transposed=False, fp4_padded=False, cga_layout=[])>"
    )


@needs_gated_triton
@pytest.mark.parametrize(
    ("variant", "per_32"),
    [
        (plans.TWO_LOADERS, True),
        *((variant, per_32) for variant in plans.VARIANTS for per_32 in (True, False)),
    ],
    ids=str,
)
def test_hopper_kernel_fits_and_multiplies_codes(per_32: bool, variant: plans.Variant) -> None:
    parts = 4 if per_32 else 1
    constants = {
        "TILES": variant,
        "PRODUCT": plans.ProductConfig(32, parts, x_bytes=per_32, weight_bytes=per_32),
    }
    scales = "*i32" if per_32 else "*fp32"
    types = {
        "x_desc": _codes(variant.block_m),
        "weight_desc": _codes(variant.block_n),
        "sf_ptr": scales,
        "weight_sf_ptr": scales,
        "out_ptr": "*bf16",
    }
    kernel = hopper.project_kernel
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(names.index("out_ptr"),): [["tt.divisibility", 16]]}
    source = GluonASTSource(kernel, signature, values, attributes)
    options = {"num_warps": 4, "maxnreg": plans.MAX_REGISTERS[variant.loaders]}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"])
        cubin.write_bytes(compiled.asm["cubin"])
        again = str(Path(folder, "again.cubin"))
        notes = run_tool("ptxas", "-v", "--gpu-name=sm_90a", str(ptx), "-o", again)
        sass = run_tool("cuobjdump", "-sass", str(cubin))
    # No role lost its registers, no product waits for another, nothing spills.
    assert not re.findall(r"C75\d\d", notes)
    assert {int(number) for number in re.findall(r"(\d+) bytes spill", notes)} == {0}
    products = re.findall(r"QGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3", sass)
    columns = variant.block_n // (2 if variant.split == "columns" else 1)
    assert set(products) == {str(columns)}
    # Two float32 instructions for each sum and part, and no others.
    sums = variant.block_m * variant.block_n // (128 if variant.split == "steps" else 256)
    adds = len(re.findall(r"\bFFMA\b", sass))
    assert adds == 2 * sums * parts

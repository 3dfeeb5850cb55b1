"""Weights of the two consumers: quantised ones, their scales and orders, and who multiplies."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
import torch

import mlacast
from mlacast.compat.flash_mla.weight_permutation import permute_wv_proj
from mlacast.dispatch.impls import IMPLS, Impl
from mlacast.dispatch.select import select
from mlacast.kernels.vendor import deep_gemm_grouped_out_project as deep_gemm
from mlacast.ops.project_weights import project_features
from tests import projections
from tests.format_cases import FAMILIES, MXFP8_CHUNK32, FormatCase, case_id

KINDS = ("bfloat16", "float16", "float32", "blocks_128", "bytes_32", "words_32")
F128 = mlacast.Fp8Group(128, "float32", "mn_major")


def project(
    out: mlacast.QuantizedTensor, weights: projections.Weights, **more: Any
) -> torch.Tensor:
    """Whichever operation the weights are for."""
    op = mlacast.grouped_out_project if weights.weight.dim() == 3 else mlacast.quantized_linear
    return op(out, weights.weight, weight_sf=weights.weight_sf, **more)


def assert_right(
    found: torch.Tensor, out: mlacast.QuantizedTensor, weights: projections.Weights
) -> None:
    """Half an ulp of the result, and a float32 sum of its terms."""
    product, magnitude = projections.expect(out, weights)
    half_ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
    allowed = weights.weight.shape[-1] * 2.0**-24 * magnitude + 2.0**-25
    allowed = allowed + half_ulp[found.dtype] * (product.abs() + allowed)
    assert found.shape == product.shape
    assert bool(((found.double() - product).abs() <= allowed).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_both_operations_match_float64(case: FormatCase, kind: str, backend: str) -> None:
    out = mlacast.quantize_output(torch.randn(5, 1536), case.build(), num_groups=3)
    for shape in ((3, 150, 512), (150, 1536)):
        weights = projections.draw_weights(kind, shape)
        found = project(out, weights, backend=backend)
        dtype = torch.bfloat16 if weights.weight_sf is not None else weights.weight.dtype
        assert found.dtype == dtype
        assert_right(found, out, weights)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_a_range_has_its_own_rows(case: FormatCase, backend: str) -> None:
    """Swizzled scales are those of the whole buffer: rows count from where the range starts."""
    scales = torch.linspace(0.25, 4.0, 9)[:, None]
    out = mlacast.quantize_output(torch.randn(9, 1024) * scales, case.build(), num_groups=2)
    for shape in ((2, 24, 512), (24, 1024)):
        weights = projections.draw_weights("float32", shape)
        assert_right(project(out[3:7], weights, backend=backend), out[3:7], weights)


def test_a_block_of_scales_may_be_partial(backend: str) -> None:
    """192 features a group: two blocks a group, three a row of two groups."""
    out = mlacast.quantize_output(torch.randn(5, 384), mlacast.Mxfp8(), num_groups=2)
    for shape, blocks in (((2, 24, 192), 2), ((24, 384), 3)):
        weights = projections.draw_weights("blocks_128", shape)
        assert weights.weight_sf is not None
        assert weights.weight_sf.shape[-1] == blocks
        assert_right(project(out, weights, backend=backend), out, weights)


def test_bytes_may_be_float8_e8m0fnu(backend: str) -> None:
    out = mlacast.quantize_output(torch.randn(5, 512), mlacast.Mxfp8())
    weights = projections.draw_weights("bytes_32", (1, 24, 512))
    assert weights.weight_sf is not None
    typed = weights.weight_sf.view(torch.float8_e8m0fnu)
    found = mlacast.grouped_out_project(out, weights.weight, weight_sf=typed, backend=backend)
    assert torch.equal(found, project(out, weights, backend=backend))


@pytest.mark.parametrize("step", [2**31, 512])
def test_groups_of_a_buffer_that_32_bits_do_not_reach(step: int) -> None:
    """The Hopper kernel copies by columns of 32 bits: dispatch asks for another."""
    codes = torch.empty_strided((1, 2, 512), (512, step, 1), dtype=torch.uint8, device="meta")
    out = mlacast.QuantizedTensor(codes.view(torch.float8_e4m3fn), None, mlacast.Fp8Tensor(1.0))
    weight = torch.empty(2, 8, 512, device="meta")
    required = project_features(out, weight, None, "head")
    assert ("operands:far_apart" in required) == (step == 2**31)


@pytest.mark.parametrize("kind", ["float32", "words_32"])
def test_permuted_weights_fit_a_permuted_buffer(kind: str, backend: str) -> None:
    """``permute_wv_proj`` and weight_order="buffer" together change nothing."""
    heads, groups = 4, 2
    out = mlacast.quantize_output(
        torch.randn(5, groups * heads * 512), MXFP8_CHUNK32.build(), num_groups=groups
    )
    weights = projections.draw_weights(kind, (groups, 24, heads * 512))
    if weights.weight_sf is None:
        columns = weights.weight.view(groups, 24, heads, 16, 32).transpose(2, 3)
        permuted, scales = columns.reshape(weights.weight.shape).contiguous(), None
    else:
        permuted, scales = permute_wv_proj((weights.weight, weights.weight_sf), heads, 512)
    found = mlacast.grouped_out_project(
        out, permuted, weight_sf=scales, weight_order="buffer", backend=backend
    )
    assert_right(found, out, weights)
    # A buffer in head order has one order only.
    plain = mlacast.quantize_output(torch.randn(5, 1024), mlacast.Mxfp8(), num_groups=2)
    weight = torch.randn(2, 8, 512)
    assert torch.equal(
        mlacast.grouped_out_project(plain, weight, weight_order="buffer", backend=backend),
        mlacast.grouped_out_project(plain, weight, backend=backend),
    )


def test_linear_is_the_sum_of_grouped_products(backend: str) -> None:
    # Codes in steps of a half, scales of 4 bits between 16 and 448 over 256, small integers:
    # products are multiples of 2**-8 below 32, so float32 holds every sum of 1024 of them.
    out = mlacast.quantize_output(torch.randn(4, 1024), mlacast.Nvfp4(256.0), num_groups=2)
    assert out.sf is not None
    scales = out.sf.float()
    assert float(scales[scales > 0].min()) >= 16.0
    weight = torch.randint(-3, 4, (8, 1024)).float()
    grouped = torch.stack((weight[:, :512], weight[:, 512:]))
    parts = mlacast.grouped_out_project(out, grouped, backend=backend)
    found = mlacast.quantized_linear(out, weight, backend=backend)
    assert torch.equal(found, parts.sum(1))


def chosen(
    out: mlacast.QuantizedTensor,
    weights: projections.Weights,
    arch: str = "sm90",
    without: tuple[str, ...] = (),
    cuda: tuple[int, int] = (13, 0),
) -> str:
    """Module that dispatch picks where everything is installed but the packages ``without``."""
    op = "grouped_out_project" if weights.weight.dim() == 3 else "quantized_linear"
    required = importlib.import_module(f"mlacast.ops.{op}").required_features
    needed = required(out, weights.weight, weights.weight_sf, "head")
    installed = tuple(
        Impl(impl.op, impl.backend, impl.target, impl.archs, impl.features)
        for impl in IMPLS
        if not set(without) & set(impl.requires) and (impl.cuda is None or impl.cuda <= cuda)
    )
    return select(op, needed, arch, None, installed).target.split(":")[0]


def test_who_multiplies_on_hopper() -> None:
    f128 = mlacast.quantize_output(torch.randn(6, 1024), F128, num_groups=2)
    mxfp8 = mlacast.quantize_output(torch.randn(6, 1024), mlacast.Mxfp8(), num_groups=2)
    chunked = mlacast.quantize_output(torch.randn(6, 1024), mlacast.Mxfp8("chunk32"), num_groups=2)
    blocks = projections.draw_weights("blocks_128", (2, 24, 512))
    words = projections.draw_weights("words_32", (2, 24, 512))
    plain = projections.draw_weights("bfloat16", (2, 24, 512))
    assert "deep_gemm" in chosen(f128, blocks)
    # DeepGEMM would copy the scales of a range.
    assert "gluon" in chosen(f128[:2], blocks)
    assert "gluon" in chosen(mxfp8, words)
    assert "gluon" in chosen(mxfp8, blocks)
    assert "gluon" in chosen(f128, words)
    for out, weights in ((chunked, words), (mxfp8, plain), (f128, plain)):
        assert "kernels.triton" in chosen(out, weights)
    assert "kernels.triton" in chosen(f128, blocks, "sm89")
    assert "reference" in chosen(f128, blocks, "cpu")
    far = torch.empty_strided(
        (2, 24, 512), (2**31, 512, 1), dtype=blocks.weight.dtype, device="meta"
    )
    distant = projections.Weights(far, blocks.weight_sf, blocks.values)
    assert "kernels.triton" in chosen(f128, distant)
    odd = mlacast.quantize_output(torch.randn(6, 192), mlacast.Mxfp8(), num_groups=2)
    assert "kernels.triton" in chosen(odd, projections.draw_weights("blocks_128", (2, 24, 96)))


def empty_product(
    tokens: int, columns: int, features: int
) -> tuple[mlacast.QuantizedTensor, projections.Weights]:
    """Operands that nobody reads."""
    out = mlacast.QuantizedTensor.empty(tokens, 2, features, F128)
    weight = torch.empty((2, columns, features), dtype=torch.float8_e4m3fn)
    scales = torch.empty(2, -(-columns // 128), features // 128)
    return out, projections.Weights(weight, scales, weight)


@pytest.mark.parametrize(
    ("sizes", "multiplies"),
    [
        ((4096, 1024, 4096), "scaled_mm"),
        ((8192, 1040, 4608), "scaled_mm"),
        ((4092, 1024, 4096), "gluon"),
        ((4096, 1008, 4096), "gluon"),
        ((4096, 1024, 3584), "gluon"),
        # What cuBLASLt does not take: tokens no multiple of 4, columns of 16, features of 512.
        ((4098, 1024, 4096), "gluon"),
        ((4096, 1032, 4096), "gluon"),
        ((4096, 1024, 4224), "gluon"),
    ],
)
def test_large_products_with_scales_per_128_go_to_torch(
    sizes: tuple[int, int, int], multiplies: str
) -> None:
    out, weights = empty_product(*sizes)
    assert multiplies in chosen(out, weights, without=("deep_gemm",))
    assert "deep_gemm" in chosen(out, weights)
    # cuBLASLt of CUDA 12.9 is the first to have such scales.
    assert "gluon" in chosen(out, weights, without=("deep_gemm",), cuda=(12, 8))
    assert "gluon" in chosen(out[: sizes[0] - 4], weights, without=("deep_gemm",))


def test_without_triton_small_products_go_to_torch_too() -> None:
    alone = ("deep_gemm", "triton")
    assert "scaled_mm" in chosen(*empty_product(8, 32, 512), without=alone)
    assert "reference" in chosen(*empty_product(8, 24, 512), without=alone)
    assert "reference" in chosen(*empty_product(6, 32, 512), without=alone)
    assert "reference" in chosen(*empty_product(8, 32, 512), without=alone, cuda=(12, 8))


def test_who_multiplies_a_linear_layer_on_hopper() -> None:
    mxfp8 = mlacast.quantize_output(torch.randn(6, 1024), mlacast.Mxfp8(), num_groups=2)
    weights = projections.draw_weights("words_32", (24, 1024))
    assert "gluon" in chosen(mxfp8, weights)
    assert "kernels.triton" in chosen(mxfp8, projections.draw_weights("float16", (24, 1024)))
    # Groups with something between them.
    data = torch.zeros(6, 2, 768).to(torch.float8_e4m3fn)[..., :512]
    apart = mlacast.QuantizedTensor(data, mxfp8.sf, mlacast.Mxfp8())
    assert "kernels.triton" in chosen(apart, weights)
    # A block of scales that lies in two groups, as grouped weights have none.
    odd = mlacast.quantize_output(torch.randn(6, 384), mlacast.Mxfp8(), num_groups=2)
    assert "reference" in chosen(odd, projections.draw_weights("blocks_128", (24, 384)))
    assert "kernels.triton" in chosen(odd, projections.draw_weights("blocks_128", (2, 24, 192)))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 63, 64, 66])
def test_deep_gemm_gets_our_memory(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied on the way, and the scales have the strides it takes as they are."""
    calls = []
    fake = types.ModuleType("deep_gemm")
    fake.fp8_einsum = lambda *given, **more: calls.append((given, more))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    deep_gemm._deep_gemm.cache_clear()
    out = mlacast.quantize_output(torch.randn(tokens, 4096), F128, num_groups=2)
    weights = projections.draw_weights("blocks_128", (2, 24, 2048))
    assert weights.weight_sf is not None
    assert out.sf is not None
    result = projections.multiply(deep_gemm.launch_grouped_out_project, out, weights)
    deep_gemm._deep_gemm.cache_clear()
    ((given, more),) = calls
    equation, (codes, scales), (weight, weight_scales), target = given
    assert (equation, more) == ("bhr,hdr->bhd", {"recipe": (1, 128, 128)})
    column = (tokens + 3) // 4 * 4
    assert scales.shape == (tokens, 2, 16)
    assert scales.stride() == (1, 16 * column, column)
    assert scales.dtype == torch.float32
    for handed, ours in (
        (codes, out.data),
        (scales, out.sf),
        (weight, weights.weight),
        (weight_scales, weights.weight_sf),
        (target, result),
    ):
        assert handed.data_ptr() == ours.data_ptr()
    assert (target.shape, target.dtype) == ((tokens, 2, 24), torch.bfloat16)

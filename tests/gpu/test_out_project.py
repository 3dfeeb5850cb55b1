"""The consumers of quantised outputs on the device, against float64 products."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch

import mlacast
from mlacast.kernels.config.hopper_grouped_out_project import Variant
from mlacast.kernels.gluon.sm90 import grouped_out_project as hopper
from mlacast.kernels.triton import grouped_out_project as portable
from mlacast.kernels.vendor import deep_gemm_grouped_out_project as deep_gemm
from mlacast.kernels.vendor import scaled_mm_grouped_out_project as scaled_mm
from tests import projections
from tests.format_cases import FAMILIES, MXFP8_CHUNK32, MXFP8_HEAD, NVFP4, FormatCase, case_id
from tests.gpu.cache_steps import kernels_of, nothing_compiles, replayed
from tests.gpu.steps import CUDA

WEIGHTS = ("bfloat16", "float16", "float32", "blocks_128", "bytes_32", "words_32")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
F128 = FormatCase("Fp8Group", 128, "float32", "mn_major")


def fill(case: FormatCase, tokens: int, groups: int, features: int) -> mlacast.QuantizedTensor:
    """Rows 3.. of a buffer whose scales differ."""
    x = torch.randn(tokens, groups, features, device=CUDA)
    x *= torch.exp2(torch.randint(-6, 5, (tokens, groups, 1), device=CUDA))
    steps = torch.randint(-3, 4, (tokens, groups, features // 16), device=CUDA)
    x *= torch.exp2(steps.float()).repeat_interleave(16, -1)
    buffer = mlacast.QuantizedTensor.empty(tokens + 5, groups, features, case.build(), CUDA)
    part = buffer[3 : 3 + tokens]
    mlacast.quantize_output(x.flatten(1), case.build(), out=part, backend="reference")
    return part


def assert_right(
    found: torch.Tensor, out: mlacast.QuantizedTensor, weights: projections.Weights, unit: float
) -> None:
    """Compare with the float64 product.

    ``unit`` is the precision of the sums of products: of float32, or of the FP8 matrix unit, which
    keeps 13 bits below the largest term of each 32. What that unit drops adds to the norm of the
    error: DeepGEMM's kernel shows 1.7e-3 with scales per 128 and weights of one scale a block.
    """
    product, magnitude = projections.expect(out, weights)
    half_ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
    allowed = unit * magnitude + half_ulp[found.dtype] * product.abs() + 2.0**-24
    assert found.shape == product.shape
    assert bool(((found.double() - product).abs() <= allowed).all())
    error = (found.double() - product).norm() / product.norm()
    # Rounding to bfloat16 is off by 2**-9.2 = 1.7e-3 in the mean square, to float16 by 2.1e-4.
    bound = {torch.bfloat16: 2e-3}.get(found.dtype, 5e-4)
    if unit > 2.0**-20:
        bound = 4e-3
    assert float(error) < bound


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("case", [*FAMILIES, F128], ids=case_id)
@pytest.mark.parametrize("tokens", [5, 200])
def test_portable_products(case: FormatCase, kind: str, tokens: int) -> None:
    weights = projections.draw_weights(kind, (2, 200, 1024), CUDA)
    out = fill(case, tokens, 2, 1024)
    found = projections.multiply(portable.launch_grouped_out_project, out, weights)
    assert_right(found, out, weights, 2.0**-12 if kind == "blocks_128" else 2.0**-18)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("case", [MXFP8_HEAD, MXFP8_CHUNK32, NVFP4, F128], ids=case_id)
def test_portable_linear(case: FormatCase, kind: str) -> None:
    weights = projections.draw_weights(kind, (200, 3 * 1024), CUDA)
    out = fill(case, 70, 3, 1024)
    found = projections.multiply(portable.launch_quantized_linear, out, weights)
    assert_right(found, out, weights, 2.0**-12 if kind == "blocks_128" else 2.0**-18)


VARIANTS = (
    Variant(64, 64, 8, "steps"),
    Variant(64, 64, 8, "steps", loaders=2),
    Variant(64, 64, 8, "columns", 1),
    Variant(128, 128, 5, "columns"),
    Variant(128, 128, 6, "rows"),
)


def multiply_on_hopper(
    out: mlacast.QuantizedTensor,
    weights: projections.Weights,
    variant: Variant | None = None,
) -> torch.Tensor:
    """Run the Hopper kernel, whichever dispatch would choose."""
    launch = hopper.launch_grouped_out_project
    if weights.weight.dim() == 2:
        launch = hopper.launch_quantized_linear
    return projections.multiply(launch, out, weights, variant=variant)


@needs_hopper
@pytest.mark.usefixtures("end_hanging_process")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", ["blocks_128", "bytes_32", "words_32"])
@pytest.mark.parametrize("case", [MXFP8_HEAD, F128], ids=case_id)
def test_hopper_products(case: FormatCase, kind: str, variant: Variant) -> None:
    for groups, columns, features in ((2, 200, 1024), (9, 264, 384), (1, 8, 128)):
        weights = projections.draw_weights(kind, (groups, columns, features), CUDA)
        for tokens in (1, 5, 64, 150, 700):
            out = fill(case, tokens, groups, features)
            for _ in range(2):
                found = multiply_on_hopper(out, weights, variant)
                # Where both sides have a scale per 128, four sums of 32 are cut off in turn.
                in_turn = case is F128 and kind == "blocks_128"
                assert_right(found, out, weights, 2.0**-11 if in_turn else 2.0**-12)


@needs_hopper
@pytest.mark.usefixtures("end_hanging_process")
@pytest.mark.parametrize("tokens", [5, 200])
def test_columns_that_are_all_the_same_memory(tokens: int) -> None:
    """Weights expanded over the columns, at the distance 0: the bits of a copy."""
    weights = projections.draw_weights("bytes_32", (2, 200, 1024), CUDA)
    expanded = weights.weight[:, :1].expand(weights.weight.shape)
    out = fill(MXFP8_HEAD, tokens, 2, 1024)
    results = []
    for weight in (expanded, expanded.contiguous()):
        one = projections.Weights(weight, weights.weight_sf, weights.values)
        results.append(multiply_on_hopper(out, one))
    assert torch.equal(*results)


@needs_hopper
@pytest.mark.usefixtures("end_hanging_process")
@pytest.mark.parametrize("kind", ["blocks_128", "bytes_32", "words_32"])
@pytest.mark.parametrize("case", [MXFP8_HEAD, F128], ids=case_id)
def test_hopper_linear(case: FormatCase, kind: str) -> None:
    weights = projections.draw_weights(kind, (200, 3 * 384), CUDA)
    for tokens in (5, 150):
        out = fill(case, tokens, 3, 384)
        assert_right(multiply_on_hopper(out, weights), out, weights, 2.0**-12)


@needs_hopper
def test_hopper_products_keep_nan_in_its_row_and_read_no_padding() -> None:
    weights = projections.draw_weights("words_32", (2, 64, 512), CUDA)
    out = fill(MXFP8_HEAD, 80, 2, 512)
    out.data.view(torch.uint8)[7, 1, 300] = 0x7F
    found = multiply_on_hopper(out, weights)
    assert bool(found[7, 1].isnan().all())
    found[7, 1] = 0.0
    assert bool(found.isfinite().all())


def draw_wide(
    tokens: int, groups: int, columns: int, features: int
) -> tuple[mlacast.QuantizedTensor, projections.Weights]:
    """Operands of which every row has scales of its own, 2**80 apart."""
    weights = projections.draw_weights("bytes_32", (groups, columns, features), CUDA)
    out = fill(MXFP8_HEAD, tokens, groups, features)

    def draw(*rows: int) -> torch.Tensor:
        centre = torch.randint(95, 130, (*rows, 1), device=CUDA)
        return centre + torch.randint(-40, 41, (*rows, features // 32), device=CUDA)

    scales = draw(groups, columns)
    assert weights.weight_sf is not None
    assert out.sf is not None
    weights.weight_sf.copy_(scales)
    values = weights.weight.double() * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    packed = draw(tokens, groups).to(torch.uint8).view(torch.int32)
    out.sf.copy_(packed)
    return out, projections.Weights(weights.weight, weights.weight_sf, values)


@needs_hopper
@pytest.mark.usefixtures("end_hanging_process")
@pytest.mark.parametrize("kind", ["bytes_32", "words_32"])
@pytest.mark.parametrize("tokens", [1, 8, 9, 17, 33, 64])
def test_few_tokens(tokens: int, kind: str) -> None:
    """Every room for tokens that the kernel is built with, and features that end a step early."""
    for groups, columns, features in (
        (2, 200, 1024),
        (9, 264, 384),
        (8, 1024, 4096),
        (1, 72, 8192),
    ):
        weights = projections.draw_weights(kind, (groups, columns, features), CUDA)
        out = fill(MXFP8_HEAD, tokens, groups, features)
        first = multiply_on_hopper(out, weights)
        assert_right(first, out, weights, 2.0**-12)
        for _ in range(20):
            assert torch.equal(multiply_on_hopper(out, weights), first)


@needs_hopper
@pytest.mark.usefixtures("end_hanging_process")
def test_few_tokens_with_scales_that_differ_widely() -> None:
    for tokens in (7, 33):
        out, weights = draw_wide(tokens, 2, 136, 1024)
        found = multiply_on_hopper(out, weights)
        product, magnitude = projections.expect(out, weights)
        allowed = 2.0**-12 * magnitude + 2.0**-8 * product.abs()
        assert bool(((found.double() - product).abs() <= allowed).all())


@needs_hopper
@pytest.mark.usefixtures("end_hanging_process")
def test_few_tokens_keep_nan_in_its_row_and_column() -> None:
    for is_scale, byte in ((False, 0x7F), (False, 0xFF), (True, 0), (True, 255)):
        weights = projections.draw_weights("bytes_32", (2, 136, 1024), CUDA)
        out = fill(MXFP8_HEAD, 40, 2, 1024)
        assert weights.weight_sf is not None
        assert out.sf is not None
        if is_scale:
            words = out.sf[7, 1].contiguous()
            words.view(torch.uint8)[9] = byte
            out.sf[7, 1] = words
            weights.weight_sf[0, 130, 31] = byte
        else:
            out.data.view(torch.uint8)[7, 1, 300] = byte
            weights.weight.view(torch.uint8)[0, 130, 1023] = byte
        found = multiply_on_hopper(out, weights)
        is_nan = torch.zeros_like(found, dtype=torch.bool)
        if byte != 0:
            is_nan[7, 1] = True
            is_nan[:, 0, 130] = True
        assert torch.equal(found.isnan(), is_nan)
        assert bool(found[~is_nan].isfinite().all())


@needs_hopper
@pytest.mark.usefixtures("end_hanging_process")
def test_few_tokens_fill_what_is_theirs_and_are_captured() -> None:
    weights = projections.draw_weights("words_32", (3, 200, 1024), CUDA)
    out = fill(MXFP8_HEAD, 21, 3, 1024)
    around = torch.full((23, 5, 256), 7.0, dtype=torch.bfloat16, device=CUDA)
    inside = around[1:22, 1:4, 9:209]

    def project() -> None:
        assert weights.weight_sf is not None
        hopper.launch_grouped_out_project(out, weights.weight, weights.weight_sf, projected=inside)

    expected = multiply_on_hopper(out, weights)
    project()
    assert torch.equal(inside, expected)
    inside.fill_(7.0)
    assert bool((around == 7.0).all())
    graph = replayed(project)
    for _ in range(3):
        around.fill_(7.0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(inside, expected)
        inside.fill_(7.0)
        assert bool((around == 7.0).all())


@needs_hopper
def test_few_tokens_get_their_kernel() -> None:
    weights = projections.draw_weights("words_32", (2, 64, 512), CUDA)
    for tokens, name in (
        (1, "project_few_kernel"),
        (64, "project_few_kernel"),
        (65, "project_kernel"),
    ):
        out = fill(MXFP8_HEAD, tokens, 2, 512)
        names = kernels_of(functools.partial(multiply_on_hopper, out, weights))
        assert [found for found in names if "Fill" not in found] == [name], names


@pytest.mark.parametrize("kind", ["bfloat16", "words_32"])
@pytest.mark.parametrize("case", [MXFP8_HEAD, MXFP8_CHUNK32, F128, NVFP4], ids=case_id)
def test_public_functions_choose_something_right(case: FormatCase, kind: str) -> None:
    out = fill(case, 70, 2, 1024)
    weights = projections.draw_weights(kind, (2, 200, 1024), CUDA)
    found = mlacast.grouped_out_project(out, weights.weight, weight_sf=weights.weight_sf)
    assert_right(found, out, weights, 2.0**-12)
    flat = projections.draw_weights(kind, (200, 2048), CUDA)
    found = mlacast.quantized_linear(out, flat.weight, weight_sf=flat.weight_sf)
    assert_right(found, out, flat, 2.0**-12)


def whole_buffer(tokens: int) -> mlacast.QuantizedTensor:
    """Float32 scales per 128 features, MN-major for exactly these tokens."""
    x = torch.randn(tokens, 2 * 1024, device=CUDA)
    return mlacast.quantize_output(x, F128.build(), num_groups=2, backend="reference")


@needs_hopper
@pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="needs deep_gemm")
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 64, 66])
def test_deep_gemm_reads_our_scales_in_place(tokens: int) -> None:
    out = whole_buffer(tokens)
    weights = projections.draw_weights("blocks_128", (2, 256, 1024), CUDA)
    found = projections.multiply(deep_gemm.launch_grouped_out_project, out, weights)
    assert_right(found, out, weights, 2.0**-12)
    assert out.sf is not None
    by_group = out.sf.transpose(0, 1)
    aligned = deep_gemm._deep_gemm().get_mn_major_tma_aligned_tensor(by_group)
    assert aligned.data_ptr() == out.sf.data_ptr()


@needs_hopper
@pytest.mark.parametrize("tokens", [4, 64, 136])
def test_scaled_mm_of_torch_agrees(tokens: int) -> None:
    out = whole_buffer(tokens)
    weights = projections.draw_weights("blocks_128", (2, 256, 1024), CUDA)
    found = projections.multiply(scaled_mm.launch_grouped_out_project, out, weights)
    assert_right(found, out, weights, 2.0**-12)


@needs_hopper
@pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is not None, reason="DeepGEMM is first")
def test_large_products_are_those_of_torch_and_are_captured() -> None:
    """The public function, by the launches of cuBLASLt, one for each group, and a copy."""
    x = torch.randn(4096, 2 * 4096, device=CUDA)
    out = mlacast.quantize_output(x, F128.build(), num_groups=2)
    weights = projections.draw_weights("blocks_128", (2, 1024, 4096), CUDA)

    def project() -> torch.Tensor:
        return mlacast.grouped_out_project(out, weights.weight, weight_sf=weights.weight_sf)

    names = kernels_of(project)
    assert len(names) >= 3, names
    assert not any("project_kernel" in name for name in names), names
    once = project()
    assert_right(once, out, weights, 2.0**-11)
    assert torch.equal(project(), once)
    results: list[torch.Tensor] = []
    graph = replayed(lambda: results.append(project()))
    results[-1].fill_(7.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(results[-1], once)


def test_one_launch_that_graphs_capture() -> None:
    weights = projections.draw_weights("words_32", (2, 64, 1024), CUDA)
    out = fill(MXFP8_HEAD, 40, 2, 1024)

    def project() -> torch.Tensor:
        return projections.multiply(portable.launch_grouped_out_project, out, weights)

    names = kernels_of(project)
    # The other one is the poison that the helper fills the result with.
    assert [name for name in names if "Fill" not in name] == ["_project_kernel"], names
    results: list[torch.Tensor] = []
    graph = replayed(lambda: results.append(project()))
    expected = project()
    results[-1].fill_(7.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(results[-1], expected)


def test_nothing_compiles_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = projections.draw_weights("words_32", (2, 64, 1024), CUDA)
    out = fill(MXFP8_HEAD, 300, 2, 1024)

    def project(first: int, last: int) -> None:
        projections.multiply(portable.launch_grouped_out_project, out[first:last], weights)

    project(0, 16)
    project(0, 100)
    with nothing_compiles(monkeypatch):
        for last in (1, 2, 15, 17, 64, 65, 128, 299):
            project(0, last)
        for first in (1, 2, 3, 16):
            project(first, first + 33)

"""The portable consumers of quantised outputs, interpreted: formats, orders, weights, tails."""

from __future__ import annotations

import pytest
import torch

import mlacast
from mlacast.kernels.config.grouped_out_project import Variant
from mlacast.kernels.triton.grouped_out_project import (
    launch_grouped_out_project,
    launch_quantized_linear,
)
from tests import projections
from tests.format_cases import (
    FAMILIES,
    MXFP8_CHUNK32,
    MXFP8_HEAD,
    NVFP4,
    QUANTISED,
    FormatCase,
    case_id,
)
from tests.kernels import launches

QUANTISED_WEIGHTS = ("blocks_128", "bytes_32", "words_32")
# Terms of a float32 sum: its error is below their number times half an ulp of their magnitudes.
UNIT = 2.0**-24
F128 = FormatCase("Fp8Group", 128, "float32", "mn_major")


def fill(case: FormatCase, tokens: int, groups: int, features: int) -> mlacast.QuantizedTensor:
    """Rows 3.. of a buffer; rows and heads differ in size, so that scales do."""
    x = torch.randn(tokens, groups, features) * torch.exp2(
        torch.randint(-6, 5, (tokens, groups, 1))
    )
    x = x * torch.exp2(torch.randint(-3, 4, (1, groups, features // 16))).repeat_interleave(16, -1)
    buffer = mlacast.QuantizedTensor.empty(tokens + 5, groups, features, case.build())
    part = buffer[3 : 3 + tokens]
    mlacast.reference.quantize_output(x, part)
    return part


def check(
    out: mlacast.QuantizedTensor, weights: projections.Weights, variant: Variant | None = None
) -> None:
    """Compare the float32 result with float64."""
    launch = launch_grouped_out_project if weights.weight.dim() == 3 else launch_quantized_linear
    # bfloat16 is wrong in the interpreter.
    dtype = None if weights.weight_sf is None else torch.float32
    found = projections.multiply(launch, out, weights, dtype, variant=variant)
    product, magnitude = projections.expect(out, weights)
    terms = weights.weight.shape[-1]
    allowed = terms * UNIT * magnitude
    if found.dtype == torch.float16:
        allowed = allowed + 2.0**-11 * product.abs() + 2.0**-24
    assert found.shape == product.shape
    assert bool(((found.double() - product).abs() <= allowed).all())


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_every_format(case: FormatCase) -> None:
    check(fill(case, 5, 2, 512), projections.draw_weights("float32", (2, 40, 512)))


def test_rows_that_are_not_quantised() -> None:
    buffer = launches.float32_buffer(9, 3, features=200)
    buffer.data.normal_()
    weights = projections.draw_weights("float32", (3, 70, 200))
    found = projections.multiply(launch_grouped_out_project, buffer, weights)
    product = torch.einsum("tgf,gof->tgo", buffer.data.double(), weights.values)
    magnitude = torch.einsum("tgf,gof->tgo", buffer.data.double().abs(), weights.values.abs())
    # 200 roundings at random (the bound of Higham and Mary, 2019).
    assert bool(((found.double() - product).abs() <= 4 * 200**0.5 * UNIT * magnitude).all())


@pytest.mark.parametrize("kind", QUANTISED_WEIGHTS)
@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_quantised_weights(case: FormatCase, kind: str) -> None:
    # Two blocks of scales along the columns, some along the features.
    check(fill(case, 5, 1, 512), projections.draw_weights(kind, (1, 130, 512)))


@pytest.mark.parametrize("block_k", [32, 64, 128])
@pytest.mark.parametrize("case", [MXFP8_HEAD, MXFP8_CHUNK32], ids=case_id)
def test_steps_of_every_size(case: FormatCase, block_k: int) -> None:
    variant = Variant(16, 32, block_k)
    for kind in ("float32", "words_32", "blocks_128"):
        check(fill(case, 5, 1, 2048), projections.draw_weights(kind, (1, 24, 2048)), variant)


def test_float16_weights() -> None:
    check(fill(MXFP8_HEAD, 5, 2, 512), projections.draw_weights("float16", (2, 24, 512)))


@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (64, 64), (65, 130), (130, 7)])
def test_tails_of_tiles(tokens: int, columns: int) -> None:
    check(fill(MXFP8_HEAD, tokens, 1, 128), projections.draw_weights("float32", (1, columns, 128)))


@pytest.mark.parametrize(
    ("case", "features"),
    [(MXFP8_HEAD, 96), (MXFP8_HEAD, 160), (NVFP4, 16), (NVFP4, 80), (NVFP4, 144)],
    ids=["mxfp8_96", "mxfp8_160", "nvfp4_16", "nvfp4_80", "nvfp4_144"],
)
def test_groups_that_end_inside_a_step(case: FormatCase, features: int) -> None:
    for groups in (1, 3):
        weights = projections.draw_weights("float32", (groups, 24, features))
        check(fill(case, 5, groups, features), weights)


def test_swizzled_scales_across_tiles_of_rows() -> None:
    check(fill(NVFP4, 140, 2, 128), projections.draw_weights("float32", (2, 16, 128)))


@pytest.mark.parametrize("kind", ["float32", *QUANTISED_WEIGHTS])
@pytest.mark.parametrize("case", [F128, MXFP8_CHUNK32, NVFP4], ids=case_id)
def test_linear_sums_over_groups(case: FormatCase, kind: str) -> None:
    check(fill(case, 5, 3, 512), projections.draw_weights(kind, (60, 3 * 512)))


def test_weights_through_their_strides() -> None:
    out = fill(MXFP8_HEAD, 5, 2, 512)
    weights = projections.draw_weights("float32", (2, 24, 512))
    expected = projections.multiply(launch_grouped_out_project, out, weights)
    wide = torch.full((24, 2, 600), float("nan"))
    wide[..., :512] = weights.weight.transpose(0, 1)
    turned = projections.Weights(wide[..., :512].transpose(0, 1), None, weights.values)
    found = projections.multiply(launch_grouped_out_project, out, turned)
    assert torch.equal(found, expected)


def test_a_nan_stays_in_its_row_and_group() -> None:
    for case in FAMILIES:
        if case.kind == "Fp8Tensor":
            continue
        x = torch.randn(3, 2, 512)
        x[1, 0, 70] = float("nan")
        out = mlacast.quantize_output(x.flatten(1), case.build(), num_groups=2)
        for kind in ("float32", "words_32"):
            weights = projections.draw_weights(kind, (2, 24, 512))
            found = projections.multiply(launch_grouped_out_project, out, weights, torch.float32)
            assert bool(found[1, 0].isnan().all())
            found[1, 0] = 0.0
            assert bool(found.isfinite().all())


def test_scales_at_the_ends_of_their_range() -> None:
    """2**-127 counts, the smallest code under it included; 255 is NaN."""
    out = mlacast.QuantizedTensor.empty(2, 1, 128, mlacast.Mxfp8())
    out.data.copy_(torch.ones(2, 1, 128))
    assert out.sf is not None
    out.sf[0], out.sf[1] = 0, -1
    weight = torch.full((1, 8, 128), 2.0**100)
    weights = projections.Weights(weight, None, weight.double())
    found = projections.multiply(launch_grouped_out_project, out, weights)
    assert bool((found[0] == 128 * 2.0**-27).all())
    assert bool(found[1].isnan().all())

"""Per-tensor e4m3: code = e4m3(clamp(x * (1 / scale))), scale the dequantisation factor."""

from __future__ import annotations

import pytest
import torch

from mlacast.formats.block_scaled import quantize_fp8_tensor
from tests.hand_codes import (
    E4M3_MAGNITUDES,
    FLOAT32_MAX,
    INF,
    NAN,
    boundary_inputs,
    e4m3_code,
    f32,
    f32_down,
    f32_up,
    floats,
)

SCALES = (1.0, 0.5, 0.3, 0.7, 3.0, 1.1, 0.013, 1e-3, 250.0)


def scale_tensor(scale: float) -> torch.Tensor:
    """The scale as the one-element float32 tensor that a caller holds on the device."""
    return torch.tensor([scale], dtype=torch.float32)


def scaled_boundaries(scale: float) -> list[float]:
    """Inputs that land on, just below and just above every rounding boundary after scaling."""
    middles = [
        f32((low + high) / 2 * scale)
        for low, high in zip(E4M3_MAGNITUDES, E4M3_MAGNITUDES[1:], strict=False)
    ]
    return [near for middle in middles for near in (f32_down(middle), middle, f32_up(middle))]


@pytest.mark.parametrize("scale", SCALES)
def test_formula_at_every_rounding_boundary(scale: float) -> None:
    scale = f32(scale)
    reciprocal = f32(1.0 / scale)
    values = scaled_boundaries(scale)
    expected = [e4m3_code(f32(value * reciprocal)) for value in values]
    codes = quantize_fp8_tensor(floats(values), scale_tensor(scale))
    assert codes.dtype == torch.uint8
    assert codes.tolist() == expected


def test_the_inputs_above_tell_a_product_from_a_division() -> None:
    differing = sum(
        e4m3_code(f32(value / f32(scale))) != e4m3_code(f32(value * f32(1.0 / f32(scale))))
        for scale in SCALES
        for value in scaled_boundaries(f32(scale))
    )
    assert differing >= 20


def test_the_scale_dequantises() -> None:
    # value = code * scale: 6.0 at scale 2 is code 3.0, not 12.0.
    codes = quantize_fp8_tensor(floats([6.0, -1.0]), scale_tensor(2.0))
    assert codes.tolist() == [e4m3_code(3.0), e4m3_code(-0.5)]
    assert codes.tolist() == [0x44, 0xB0]


def test_forced_scale_of_one_saturates() -> None:
    values = [447.0, 448.0, 448.00003, 464.0, 465.0, 1000.0, 1e38, FLOAT32_MAX, INF]
    codes = quantize_fp8_tensor(floats([*values, *(-value for value in values)]), scale_tensor(1.0))
    assert codes.tolist() == [0x7E] * 9 + [0xFE] * 9


def test_forced_scale_of_one_with_the_cast_of_an_older_build(
    cast_gives_nan_above_448: None,
) -> None:
    values = [447.0, 448.0, 448.00003, 464.0, 465.0, 1000.0, 1e38]
    codes = quantize_fp8_tensor(floats([*values, *(-value for value in values)]), scale_tensor(1.0))
    assert codes.tolist() == [0x7E] * 7 + [0xFE] * 7


def test_nan_marks_its_own_element_only() -> None:
    codes = quantize_fp8_tensor(floats([1.0, NAN, -1.0]), scale_tensor(1.0))
    assert codes.tolist() == [0x38, 0x7F, 0xB8]


def test_zeros_keep_their_sign() -> None:
    codes = quantize_fp8_tensor(floats([0.0, -0.0, 1e-30, -1e-30]), scale_tensor(0.25))
    assert codes.tolist() == [0x00, 0x80, 0x00, 0x80]


def test_python_number_and_tensor_scale_agree() -> None:
    values = floats(boundary_inputs(E4M3_MAGNITUDES))
    for scale in (0.3, 2, 1.1):
        from_tensor = quantize_fp8_tensor(values, scale_tensor(scale))
        assert torch.equal(quantize_fp8_tensor(values, scale), from_tensor)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 2, 5)], ids=str)
def test_any_shape(shape: tuple[int, ...]) -> None:
    codes = quantize_fp8_tensor(torch.full(shape, 3.0), scale_tensor(2.0))
    assert codes.shape == shape
    assert bool((codes == 0x3C).all())

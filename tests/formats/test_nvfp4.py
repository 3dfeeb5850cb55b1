"""Nvfp4 against loops: sf = e4m3(min(gs * (amax / 6), 448)), code = e2m1(x * (gs / float(sf)))."""

from __future__ import annotations

import random

import pytest
import torch

from mlacast.formats.block_scaled import dequantize_nvfp4, quantize_nvfp4
from tests.hand_codes import (
    E2M1_MAGNITUDES,
    E4M3_MAGNITUDES,
    FLOAT32_MAX,
    INF,
    NAN,
    e2m1_code,
    e2m1_value,
    e4m3_code,
    e4m3_value,
    f32,
    f32_down,
    f32_up,
    floats,
    same_bits,
)

GLOBAL_SCALES = (1.0, 2688.0 / 4.0, 2688.0 / 4000.0, 0.37, 1e4)

# Made at import: under flushed denormals the conversion of a Python float would already give zero.
TINY = floats([5e-37, 2.0**-126, 2.0**-149, 1e-30])


def scale_tensor(scale: float) -> torch.Tensor:
    """The global scale as the one-element float32 tensor that a caller holds on the device."""
    return torch.tensor([scale], dtype=torch.float32)


def by_hand(block: list[float], global_scale: float) -> tuple[list[int], int]:
    """Codes and scale byte of one block of 16, float32 arithmetic."""
    if any(value != value for value in block):
        return [7] * 16, 0x7F
    amax = max(abs(value) for value in block)
    sf = e4m3_code(min(f32(global_scale * f32(amax / 6.0)), 448.0))
    if sf == 0:
        return [0] * 16, 0
    multiplier = f32(global_scale / e4m3_value(sf))
    return [e2m1_code(f32(value * multiplier)) for value in block], sf


def interesting_blocks() -> list[list[float]]:
    """Blocks of 16: every magnitude, ties of the block's own scale, zeros, overflow, underflow."""
    rng = random.Random(16)
    blocks = [
        [f32(rng.gauss(0.0, 1.0) * 10.0**exponent) for _ in range(16)]
        for exponent in range(-9, 10)
        for _ in range(4)
    ]
    # Six times an e4m3 value is an amax whose scale is exact at gs = 1, so tie * scale is a tie.
    ties = [
        (low + high) / 2 for low, high in zip(E2M1_MAGNITUDES, E2M1_MAGNITUDES[1:], strict=False)
    ]
    for code in range(0x20, 0x60):
        scale = e4m3_value(code)
        near = [scale * tie for tie in ties] + [-f32_up(scale * tie) for tie in ties]
        blocks.append([6.0 * scale, *near, -0.0])
    blocks += [[0.0] * 16, [-0.0] * 16, [4000.0, *[1.0] * 15], [0.005, *[-0.001] * 15]]
    blocks += [[FLOAT32_MAX, -FLOAT32_MAX, *[1e30] * 14], [5e-37, *[0.0] * 15]]
    return blocks


def scale_boundary_blocks(global_scale: float) -> list[list[float]]:
    """Blocks whose scale lands on, or up to two float32 steps beside, a boundary of e4m3."""
    peaks: list[float] = []
    for low, high in zip(E4M3_MAGNITUDES, E4M3_MAGNITUDES[1:], strict=False):
        peak = f32(6.0 * (low + high) / 2 / global_scale)
        peaks += [
            f32_down(f32_down(peak)),
            f32_down(peak),
            peak,
            f32_up(peak),
            f32_up(f32_up(peak)),
        ]
    return [[-peak, f32(peak / 3), *[0.0] * 14] for peak in peaks]


def test_the_boundary_blocks_tell_the_order_of_the_products() -> None:
    products, reciprocals = 0, 0
    for global_scale in map(f32, GLOBAL_SCALES):
        for block in scale_boundary_blocks(global_scale):
            amax, sf = -block[0], by_hand(block, global_scale)[1]
            products += sf != e4m3_code(min(f32(f32(global_scale * amax) / 6.0), 448.0))
            reciprocals += sf != e4m3_code(min(f32(global_scale * f32(amax * f32(1 / 6.0))), 448.0))
    assert products >= 20
    assert reciprocals >= 20


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_codes_and_scales_equal_the_loops(global_scale: float) -> None:
    gs = f32(global_scale)
    blocks = interesting_blocks() + scale_boundary_blocks(gs)
    x = floats(value for block in blocks for value in block).reshape(-1, 2 * 16)
    codes, sf = quantize_nvfp4(x, scale_tensor(gs))
    assert codes.dtype == torch.uint8
    assert sf.dtype == torch.uint8
    assert codes.shape == x.shape
    assert sf.shape == (x.shape[0], 2)
    expected = [by_hand(block, gs) for block in blocks]
    assert sf.flatten().tolist() == [byte for _, byte in expected]
    assert codes.reshape(-1, 16).tolist() == [block_codes for block_codes, _ in expected]


def test_the_multiplier_is_rounded_before_the_product() -> None:
    # amax 11.25 gives sf 1.875 (0x3F). 2.34375 / 1.875 is the tie 1.25 (code 2); times the float32
    # reciprocal of 1.875 it is just above (code 3), and the same one binade up: 4.6875.
    block = [11.25, 2.34375, 4.6875, -2.34375, *[0.0] * 12]
    codes, sf = quantize_nvfp4(floats(block)[None], scale_tensor(1.0))
    assert sf.tolist() == [[0x3F]]
    assert codes[0, :4].tolist() == [7, 3, 5, 11]


def test_codes_follow_the_stored_scale_not_the_exact_one() -> None:
    # amax 6.3: 1.05 is stored as 1.0 (0x38), so 6.3 saturates at 6 and 2.55 is above the tie 2.5.
    codes, sf = quantize_nvfp4(floats([6.3, 2.55, *[0.0] * 14])[None], scale_tensor(1.0))
    assert sf.tolist() == [[0x38]]
    assert codes[0, :2].tolist() == [7, 5]


def test_overflow_underflow_unit_and_zero_blocks_without_a_global_scale() -> None:
    peaks = [4000.0, 0.005, 6.0, 0.0]
    x = torch.zeros(1, 64)
    x[0, ::16] = floats(peaks)
    codes, sf = quantize_nvfp4(x, scale_tensor(1.0))
    assert sf.tolist() == [[0x7E, 0x00, 0x38, 0x00]]
    assert codes[0, ::16].tolist() == [7, 0, 7, 0]
    back = dequantize_nvfp4(codes, sf, scale_tensor(1.0))
    assert back[0, ::16].tolist() == [2688.0, 0.0, 6.0, 0.0]


def test_a_scale_that_rounds_to_zero_zeroes_the_codes() -> None:
    # 2^-10 is the tie between 0 and the smallest e4m3 value: to zero. A float32 step more survives.
    flushed = [-6.0 * 2.0**-10, 0.004, -0.0, *[0.0] * 13]
    kept = [-f32_up(6.0 * 2.0**-10), 0.0, *[0.0] * 14]
    codes, sf = quantize_nvfp4(floats(flushed + kept)[None], scale_tensor(1.0))
    assert sf.tolist() == [[0x00, 0x01]]
    assert codes[0, :16].tolist() == [0] * 16
    assert codes[0, 16].item() == e2m1_code(-3.0)


def test_minus_zero_blocks_have_codes_zero() -> None:
    codes, sf = quantize_nvfp4(torch.full((1, 16), -0.0), scale_tensor(1.0))
    assert sf.tolist() == [[0]]
    assert codes.tolist() == [[0] * 16]


def test_zeros_keep_their_sign_beside_other_values() -> None:
    codes, _ = quantize_nvfp4(floats([6.0, 0.0, -0.0, -0.1, *[0.0] * 12])[None], scale_tensor(1.0))
    assert codes[0, :4].tolist() == [7, 0, 8, 8]


def test_tiny_blocks_with_denormals_flushed(flushed_denormals: None) -> None:
    x = torch.zeros(1, 64)
    x[0, ::16] = TINY
    codes, sf = quantize_nvfp4(x, scale_tensor(1.0))
    assert sf.tolist() == [[0, 0, 0, 0]]
    assert bool((codes == 0).all())


def round_trip_holds(encode_scale: float, decode_scale: float) -> bool:
    """Are blocks with amax 4000, 300, 6 and 0 back within half a step of their stored scale?"""
    rng = random.Random(20)
    blocks = [
        [amax, *(f32(rng.uniform(-amax, amax)) for _ in range(15))]
        for amax in (4000.0, 300.0, 6.0, 0.0)
    ]
    x = floats(value for block in blocks for value in block)[None]
    codes, sf = quantize_nvfp4(x, scale_tensor(encode_scale))
    back = dequantize_nvfp4(codes, sf, scale_tensor(decode_scale)).reshape(4, 16).tolist()
    holds = True
    for block, byte, decoded in zip(blocks, sf[0].tolist(), back, strict=True):
        factor = e4m3_value(byte) / f32(encode_scale)
        for value, seen in zip(block, decoded, strict=True):
            half_step = (
                0.25 if abs(value) <= 2 * factor else 0.5 if abs(value) <= 4 * factor else 1.0
            )
            # Room for the float32 roundings of the multiplier and of the two products.
            holds = holds and abs(value - seen) <= half_step * factor + abs(value) * 2.0**-21
    return holds


def test_round_trip_with_the_encoding_direction_of_the_global_scale() -> None:
    assert round_trip_holds(2688.0 / 4000.0, 2688.0 / 4000.0)


@pytest.mark.parametrize("wrong", ["encode", "decode"])
def test_the_reciprocal_of_the_global_scale_fails_the_round_trip(wrong: str) -> None:
    right, reciprocal = 2688.0 / 4000.0, 4000.0 / 2688.0
    pair = (reciprocal, right) if wrong == "encode" else (right, reciprocal)
    assert not round_trip_holds(*pair)


def test_the_calibrated_amax_uses_the_whole_range() -> None:
    # gs = 2688 / amax puts the largest block at scale 448 and code 6.
    amax = 17.0
    codes, sf = quantize_nvfp4(floats([amax, *[0.0] * 15])[None], scale_tensor(2688.0 / amax))
    assert sf.tolist() == [[0x7E]]
    assert codes[0, 0].item() == 7


def test_nan_marks_its_whole_block_and_no_other() -> None:
    x = torch.ones(1, 48)
    x[0, 20], x[0, 21] = NAN, INF
    codes, sf = quantize_nvfp4(x, scale_tensor(1.0))
    clean_codes, clean_sf = quantize_nvfp4(torch.ones(1, 16), scale_tensor(1.0))
    assert sf[0, 1].item() == 0x7F
    assert codes[0, 16:32].tolist() == [7] * 16
    for start in (0, 32):
        assert torch.equal(codes[0, start : start + 16], clean_codes[0])
        assert sf[0, start // 16] == clean_sf[0, 0]
    assert bool(dequantize_nvfp4(codes, sf, scale_tensor(1.0))[0, 16:32].isnan().all())


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_infinity_saturates(global_scale: float) -> None:
    gs = f32(global_scale)
    block = [INF, -INF, 448.0, -1000.0, 3000.0, 1.0, -0.0, *[0.0] * 9]
    codes, sf = quantize_nvfp4(floats(block)[None], scale_tensor(gs))
    multiplier = f32(gs / 448.0)
    assert sf.tolist() == [[0x7E]]
    assert codes[0, :2].tolist() == [7, 15]
    assert codes[0].tolist() == [e2m1_code(f32(value * multiplier)) for value in block]


def test_python_number_and_tensor_scale_agree() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    codes, sf = quantize_nvfp4(x, scale_tensor(0.37))
    number_codes, number_sf = quantize_nvfp4(x, 0.37)
    assert torch.equal(codes, number_codes)
    assert torch.equal(sf, number_sf)


def test_dequantise_every_code_and_scale() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(128, 1)
    sf = torch.arange(128, dtype=torch.uint8).reshape(128, 1)
    gs = f32(0.37)
    expected = floats(
        f32(e2m1_value(code) * e4m3_value(byte) / gs) for byte in range(128) for code in range(16)
    ).reshape(128, 16)
    back = dequantize_nvfp4(codes, sf, scale_tensor(gs))
    assert back.dtype == torch.float32
    assert same_bits(back, expected)


def test_leading_dimensions_strides_and_empty_tensors() -> None:
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(4))
    codes, sf = quantize_nvfp4(x, scale_tensor(1.0))
    assert codes.shape == (2, 3, 32)
    assert sf.shape == (2, 3, 2)
    strided = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    strided_codes, strided_sf = quantize_nvfp4(strided, scale_tensor(1.0))
    assert torch.equal(codes, strided_codes)
    assert torch.equal(sf, strided_sf)
    empty_codes, empty_sf = quantize_nvfp4(torch.empty(0, 32), scale_tensor(1.0))
    assert empty_codes.shape == (0, 32)
    assert empty_sf.shape == (0, 2)

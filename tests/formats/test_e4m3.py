"""e4m3: all codes, every rounding boundary, saturation, NaN, any build's cast."""

from __future__ import annotations

import itertools

import pytest
import torch

from mlacast.formats.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3
from tests.hand_codes import (
    E4M3_MAGNITUDES,
    FLOAT32_MAX,
    INF,
    NAN,
    boundary_inputs,
    decode_table,
    e4m3_code,
    e4m3_value,
    f32_up,
    floats,
    same_bits,
)

ALL_CODES = torch.arange(256, dtype=torch.uint8)


def test_max_is_448() -> None:
    assert E4M3_MAX == 448.0
    assert max(E4M3_MAGNITUDES) == 448.0


def test_decode_all_codes() -> None:
    decoded = decode_e4m3(ALL_CODES)
    assert decoded.dtype == torch.float32
    assert same_bits(decoded, decode_table(e4m3_value, 256))
    assert decoded.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_decode_takes_float8_tensors() -> None:
    assert same_bits(
        decode_e4m3(ALL_CODES.view(torch.float8_e4m3fn)), decode_table(e4m3_value, 256)
    )


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (0x00, 0.0),
        (0x01, 2.0**-9),
        (0x07, 7 * 2.0**-9),
        (0x08, 2.0**-6),
        (0x38, 1.0),
        (0x3C, 1.5),
        (0x7E, 448.0),
        (0xFE, -448.0),
    ],
)
def test_golden_codes(code: int, value: float) -> None:
    assert decode_e4m3(torch.tensor([code], dtype=torch.uint8)).item() == value
    assert encode_e4m3(floats([value])).tolist() == [code]


def test_every_finite_code_encodes_to_itself() -> None:
    finite = ALL_CODES[(ALL_CODES & 0x7F) != 0x7F]
    codes = encode_e4m3(decode_table(e4m3_value, 256)[finite.long()])
    assert codes.dtype == torch.uint8
    assert torch.equal(codes, finite)


def test_encode_around_every_rounding_boundary() -> None:
    values = boundary_inputs(E4M3_MAGNITUDES)
    assert len(values) == (126 + 126) * 3 * 2
    expected = [e4m3_code(value) for value in values]
    assert encode_e4m3(floats(values)).tolist() == expected


def test_ties_go_to_the_even_code() -> None:
    ties = [(low + high) / 2 for low, high in itertools.pairwise(E4M3_MAGNITUDES)]
    codes = encode_e4m3(floats(ties))
    assert (codes & 1).sum() == 0
    # The pair (odd, even) rounds up and (even, odd) rounds down.
    assert codes.tolist() == [code + (code & 1) for code in range(126)]


def test_encode_random_floats_of_every_exponent() -> None:
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(0, 2**31 - 2**23, (4000,), generator=generator, dtype=torch.int32)
    values = bits.view(torch.float32) * torch.where(torch.arange(4000) % 2 == 0, 1.0, -1.0)
    assert encode_e4m3(values).tolist() == [e4m3_code(value) for value in values.tolist()]


@pytest.mark.parametrize(
    "value", [448.0, f32_up(448.0), 464.0, f32_up(464.0), 465.0, 1000.0, 1e38, FLOAT32_MAX, INF]
)
def test_saturates_in_both_directions(value: float) -> None:
    assert encode_e4m3(floats([value, -value])).tolist() == [0x7E, 0xFE]


def test_values_below_the_maximum() -> None:
    # 447 is nearer to 448 than to 416, 432 is the tie between 416 (0x7D) and 448 (0x7E).
    assert encode_e4m3(floats([447.0, 432.0, 431.9])).tolist() == [0x7E, 0x7E, 0x7D]


def test_bytes_do_not_depend_on_the_cast_of_the_build(cast_gives_nan_above_448: None) -> None:
    """BC-18, pytorch/ao#1912: casts of other builds give NaN where this one saturates."""
    values = [447.0, 448.0, 448.00003, 464.0, 465.0, 1000.0, 1e38, INF]
    codes = encode_e4m3(floats([*values, *(-value for value in values)]))
    assert codes.tolist() == [0x7E] * 8 + [0xFE] * 8
    assert encode_e4m3(floats([NAN])).tolist() == [0x7F]


def test_any_nan_is_0x7f() -> None:
    patterns = [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000 - 2**32, 0xFF800001 - 2**32, -1]
    values = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    assert encode_e4m3(values).tolist() == [0x7F] * 6


def test_zeros_and_tiny_values_keep_their_sign() -> None:
    values = floats([0.0, -0.0, 2.0**-10, -(2.0**-10), 1e-30, -1e-30])
    # 2^-10 is the tie between 0 and the smallest subnormal: to the even code, zero.
    assert encode_e4m3(values).tolist() == [0x00, 0x80, 0x00, 0x80, 0x00, 0x80]
    assert encode_e4m3(floats([f32_up(2.0**-10)])).tolist() == [0x01]


def test_denormal_input_gives_signed_zero() -> None:
    values = torch.tensor([1, 0x007FFFFF, 0x80000001 - 2**32], dtype=torch.int32).view(
        torch.float32
    )
    assert encode_e4m3(values).tolist() == [0x00, 0x00, 0x80]


def test_flushed_denormals_change_nothing(flushed_denormals: None) -> None:
    values = boundary_inputs(E4M3_MAGNITUDES)
    assert encode_e4m3(floats(values)).tolist() == [e4m3_code(value) for value in values]
    tiny = torch.tensor([1, 0x007FFFFF, 0x80000001 - 2**32], dtype=torch.int32).view(torch.float32)
    assert encode_e4m3(tiny).tolist() == [0x00, 0x00, 0x80]
    assert same_bits(decode_e4m3(ALL_CODES), decode_table(e4m3_value, 256))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 4)], ids=str)
def test_any_shape(shape: tuple[int, ...]) -> None:
    codes = encode_e4m3(torch.full(shape, 1.5))
    assert codes.shape == shape
    assert bool((codes == 0x3C).all())
    assert decode_e4m3(codes).shape == shape


def test_strided_input_is_read_through_its_strides_and_left_alone() -> None:
    parent = torch.linspace(-600.0, 600.0, 60).reshape(6, 10)
    before = parent.clone()
    view = parent.t()[::2]
    assert torch.equal(encode_e4m3(view), encode_e4m3(view.contiguous()))
    assert torch.equal(parent, before)
    codes = ALL_CODES.reshape(16, 16).t()
    assert same_bits(decode_e4m3(codes), decode_table(e4m3_value, 256).reshape(16, 16).t())

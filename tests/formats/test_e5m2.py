"""e5m2: all 256 codes, every rounding boundary, saturation, non-finite input."""

from __future__ import annotations

import itertools

import pytest
import torch

from mlacast.formats.e5m2 import E5M2_MAX, decode_e5m2, encode_e5m2
from tests.hand_codes import (
    E5M2_MAGNITUDES,
    FLOAT32_MAX,
    INF,
    boundary_inputs,
    decode_table,
    e5m2_code,
    e5m2_value,
    f32_up,
    floats,
    same_bits,
)

ALL_CODES = torch.arange(256, dtype=torch.uint8)


def test_max_is_57344() -> None:
    assert E5M2_MAX == 57344.0
    assert max(E5M2_MAGNITUDES) == 57344.0


def test_decode_all_codes() -> None:
    decoded = decode_e5m2(ALL_CODES)
    assert decoded.dtype == torch.float32
    assert same_bits(decoded, decode_table(e5m2_value, 256))
    assert decoded.isnan().nonzero().flatten().tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    assert decoded[[0x7C, 0xFC]].tolist() == [INF, -INF]


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (0x00, 0.0),
        (0x01, 2.0**-16),
        (0x03, 3 * 2.0**-16),
        (0x04, 2.0**-14),
        (0x3C, 1.0),
        (0x7B, 57344.0),
        (0xFB, -57344.0),
    ],
)
def test_golden_codes(code: int, value: float) -> None:
    assert decode_e5m2(torch.tensor([code], dtype=torch.uint8)).item() == value
    assert encode_e5m2(floats([value])).tolist() == [code]


def test_every_finite_code_encodes_to_itself() -> None:
    finite = ALL_CODES[(ALL_CODES & 0x7F) < 0x7C]
    codes = encode_e5m2(decode_table(e5m2_value, 256)[finite.long()])
    assert codes.dtype == torch.uint8
    assert torch.equal(codes, finite)


def test_encode_around_every_rounding_boundary() -> None:
    values = boundary_inputs(E5M2_MAGNITUDES)
    assert len(values) == (123 + 123) * 3 * 2
    assert encode_e5m2(floats(values)).tolist() == [e5m2_code(value) for value in values]


def test_ties_go_to_the_even_code() -> None:
    ties = [(low + high) / 2 for low, high in itertools.pairwise(E5M2_MAGNITUDES)]
    assert encode_e5m2(floats(ties)).tolist() == [code + (code & 1) for code in range(123)]


def test_encode_random_floats_of_every_exponent() -> None:
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(0, 2**31 - 2**23, (4000,), generator=generator, dtype=torch.int32)
    values = bits.view(torch.float32) * torch.where(torch.arange(4000) % 2 == 0, 1.0, -1.0)
    assert encode_e5m2(values).tolist() == [e5m2_code(value) for value in values.tolist()]


@pytest.mark.parametrize(
    "value", [57344.0, f32_up(57344.0), 61440.0, f32_up(61440.0), 1e6, FLOAT32_MAX, INF]
)
def test_saturates_in_both_directions(value: float) -> None:
    # From 61440 on a plain cast gives infinity (0x7C).
    assert encode_e5m2(floats([value, -value])).tolist() == [0x7B, 0xFB]


def test_any_nan_is_0x7f() -> None:
    patterns = [0x7FC00000, 0x7F800001, 0xFFC00000 - 2**32, -1]
    values = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    assert encode_e5m2(values).tolist() == [0x7F] * 4


def test_zeros_and_tiny_values_keep_their_sign() -> None:
    values = floats([0.0, -0.0, 2.0**-17, -(2.0**-17), 1e-40, -1e-40])
    assert encode_e5m2(values).tolist() == [0x00, 0x80, 0x00, 0x80, 0x00, 0x80]
    assert encode_e5m2(floats([f32_up(2.0**-17)])).tolist() == [0x01]


def test_flushed_denormals_change_nothing(flushed_denormals: None) -> None:
    values = boundary_inputs(E5M2_MAGNITUDES)
    assert encode_e5m2(floats(values)).tolist() == [e5m2_code(value) for value in values]
    assert same_bits(decode_e5m2(ALL_CODES), decode_table(e5m2_value, 256))


@pytest.mark.parametrize("shape", [(), (0,), (2, 3, 4)], ids=str)
def test_any_shape(shape: tuple[int, ...]) -> None:
    codes = encode_e5m2(torch.full(shape, -1.5))
    assert codes.shape == shape
    assert bool((codes == 0xBE).all())
    assert decode_e5m2(codes).shape == shape

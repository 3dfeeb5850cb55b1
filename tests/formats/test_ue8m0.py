"""ue8m0: the bit rule for every exponent, all 256 bytes decoded, four bytes per word."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlacast.formats.ue8m0 import decode_ue8m0, encode_ue8m0, pack_ue8m0_words, unpack_ue8m0_words
from tests.hand_codes import (
    FLOAT32_MAX,
    INF,
    NAN,
    decode_table,
    f32_up,
    floats,
    same_bits,
    ue8m0_byte,
    ue8m0_value,
)

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
MANTISSAS = (0, 1, 0x400000, 0x7FFFFF)


def every_exponent() -> torch.Tensor:
    """float32 with each exponent field 0..255 (255: infinity and NaN) and four mantissas."""
    bits = [field << 23 | mantissa for field in range(256) for mantissa in MANTISSAS]
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def expected_bytes() -> list[int]:
    """The bit rule written out for the inputs of every_exponent."""
    return [
        254 if field == 255 else min(max(field + int(mantissa != 0), 1), 254)
        for field in range(256)
        for mantissa in MANTISSAS
    ]


def test_decode_all_bytes() -> None:
    decoded = decode_ue8m0(ALL_BYTES)
    assert decoded.dtype == torch.float32
    assert same_bits(decoded, decode_table(ue8m0_value, 256))
    # Shifting the byte into the exponent field gives 0 for byte 0 and infinity for byte 255.
    assert decoded[0].item() == 2.0**-127
    assert math.isnan(decoded[255].item())


def test_encode_every_exponent() -> None:
    codes = encode_ue8m0(every_exponent())
    assert codes.dtype == torch.uint8
    assert codes.tolist() == expected_bytes()


def test_encode_is_the_smallest_power_of_two_not_below() -> None:
    generator = torch.Generator().manual_seed(8)
    # Exponent fields 1..253: the result lies in the range of bytes 1..254 without clamping.
    bits = torch.randint(1 << 23, 254 << 23, (2000,), generator=generator, dtype=torch.int32)
    values = bits.view(torch.float32).tolist()
    assert encode_ue8m0(floats(values)).tolist() == [ue8m0_byte(value) for value in values]


def test_exact_powers_are_not_doubled() -> None:
    powers = floats(2.0**exponent for exponent in range(-126, 128))
    assert encode_ue8m0(powers).tolist() == list(range(1, 255))


def test_one_float32_step_above_a_power_goes_to_the_next() -> None:
    above = floats(f32_up(2.0**exponent) for exponent in range(-126, 127))
    assert encode_ue8m0(above).tolist() == list(range(2, 255))


def test_clamped_ends() -> None:
    assert encode_ue8m0(floats([0.0, 2.0**-149, 2.0**-127])).tolist() == [1, 1, 1]
    assert encode_ue8m0(floats([f32_up(2.0**127), FLOAT32_MAX, INF, NAN])).tolist() == [254] * 4


def test_flushed_denormals_change_nothing(flushed_denormals: None) -> None:
    assert encode_ue8m0(every_exponent()).tolist() == expected_bytes()
    bits = decode_ue8m0(ALL_BYTES[:255]).view(torch.int32).tolist()
    assert bits == [0x00400000] + [byte << 23 for byte in range(1, 255)]


@pytest.mark.parametrize("shape", [(), (0,), (2, 3, 4)], ids=str)
def test_any_shape(shape: tuple[int, ...]) -> None:
    codes = encode_ue8m0(torch.full(shape, 0.75))
    assert codes.shape == shape
    assert bool((codes == 127).all())
    assert decode_ue8m0(codes).shape == shape


def test_words_are_little_endian() -> None:
    words = pack_ue8m0_words(torch.tensor([0x01, 0x02, 0x03, 0x04, 0x7F], dtype=torch.uint8))
    assert words.dtype == torch.int32
    assert words.tolist() == [0x04030201, 0x0000007F]


def test_a_high_last_byte_makes_a_negative_word() -> None:
    words = pack_ue8m0_words(torch.tensor([0x00, 0x00, 0x00, 0x80], dtype=torch.uint8))
    assert words.tolist() == [-(2**31)]
    assert unpack_ue8m0_words(words, 4).tolist() == [0, 0, 0, 0x80]
    assert pack_ue8m0_words(torch.full((4,), 255, dtype=torch.uint8)).tolist() == [-1]


@pytest.mark.parametrize("count", range(10))
def test_missing_bytes_are_zero(count: int) -> None:
    codes = torch.arange(1, count + 1, dtype=torch.uint8)
    words = pack_ue8m0_words(codes)
    assert words.shape == ((count + 3) // 4,)
    expected = [
        sum((4 * word + byte + 1) << 8 * byte for byte in range(4) if 4 * word + byte < count)
        for word in range((count + 3) // 4)
    ]
    assert words.tolist() == expected


def test_words_keep_leading_dimensions() -> None:
    codes = torch.arange(2 * 3 * 6, dtype=torch.uint8).reshape(2, 3, 6)
    words = pack_ue8m0_words(codes)
    assert words.shape == (2, 3, 2)
    assert words[1, 2].tolist() == [30 | 31 << 8 | 32 << 16 | 33 << 24, 34 | 35 << 8]
    unpacked = unpack_ue8m0_words(words, 6)
    assert unpacked.dtype == torch.uint8
    assert torch.equal(unpacked, codes)


def test_unpack_reads_strided_words() -> None:
    codes = torch.arange(48, dtype=torch.uint8).reshape(3, 16)
    words = pack_ue8m0_words(codes)
    by_column = words.t().contiguous().t()
    assert by_column.stride() == (1, 3)
    assert torch.equal(unpack_ue8m0_words(by_column, 16), codes)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 255), max_size=33))
def test_words_round_trip(raw: list[int]) -> None:
    codes = torch.tensor(raw, dtype=torch.uint8)
    assert unpack_ue8m0_words(pack_ue8m0_words(codes), len(raw)).tolist() == raw

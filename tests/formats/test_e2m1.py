"""e2m1: all 16 codes, golden ties, saturation, non-finite input, two codes per byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlacast.formats.e2m1 import E2M1_MAX, decode_e2m1, encode_e2m1, pack_e2m1, unpack_e2m1
from tests.hand_codes import (
    E2M1_MAGNITUDES,
    FLOAT32_MAX,
    INF,
    boundary_inputs,
    decode_table,
    e2m1_code,
    e2m1_value,
    f32_down,
    f32_up,
    floats,
    same_bits,
)

ALL_CODES = torch.arange(16, dtype=torch.uint8)

# tie, code of the even neighbour
GOLDEN_TIES = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)]


def test_max_is_6() -> None:
    assert E2M1_MAX == 6.0


def test_decode_all_codes() -> None:
    decoded = decode_e2m1(ALL_CODES)
    assert decoded.dtype == torch.float32
    assert same_bits(decoded, decode_table(e2m1_value, 16))
    assert decoded.tolist()[:8] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert bool(torch.signbit(decoded[8]))


def test_every_code_encodes_to_itself() -> None:
    codes = encode_e2m1(decode_table(e2m1_value, 16))
    assert codes.dtype == torch.uint8
    assert torch.equal(codes, ALL_CODES)


@pytest.mark.parametrize(("tie", "code"), GOLDEN_TIES)
def test_golden_ties(tie: float, code: int) -> None:
    assert encode_e2m1(floats([tie, -tie])).tolist() == [code, code | 8]
    below, above = encode_e2m1(floats([f32_down(tie), f32_up(tie)])).tolist()
    assert above - below == 1, "one float32 step across a tie moves to the other neighbour"


def test_encode_around_every_rounding_boundary() -> None:
    values = boundary_inputs(E2M1_MAGNITUDES)
    assert encode_e2m1(floats(values)).tolist() == [e2m1_code(value) for value in values]


def test_encode_a_fine_grid() -> None:
    values = [step / 512.0 for step in range(-4096, 4097)]
    assert encode_e2m1(floats(values)).tolist() == [e2m1_code(value) for value in values]


@pytest.mark.parametrize("value", [f32_up(5.0), 6.0, f32_up(6.0), 7.0, 8.0, 1e30, FLOAT32_MAX, INF])
def test_saturates_in_both_directions(value: float) -> None:
    assert encode_e2m1(floats([value, -value])).tolist() == [7, 15]


def test_any_nan_is_7() -> None:
    patterns = [0x7FC00000, 0x7F800001, 0xFFC00000 - 2**32, -1]
    values = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    assert encode_e2m1(values).tolist() == [7] * 4


def test_zeros_and_tiny_values_keep_their_sign() -> None:
    values = floats([0.0, -0.0, 0.25, -0.25, 1e-40, -1e-40])
    assert encode_e2m1(values).tolist() == [0, 8, 0, 8, 0, 8]


def test_flushed_denormals_change_nothing(flushed_denormals: None) -> None:
    tiny = torch.tensor([1, 0x007FFFFF, 0x80000001 - 2**32], dtype=torch.int32).view(torch.float32)
    assert encode_e2m1(tiny).tolist() == [0, 0, 8]
    assert same_bits(decode_e2m1(ALL_CODES), decode_table(e2m1_value, 16))


@pytest.mark.parametrize("shape", [(), (0,), (2, 3, 4)], ids=str)
def test_any_shape(shape: tuple[int, ...]) -> None:
    codes = encode_e2m1(torch.full(shape, 3.0))
    assert codes.shape == shape
    assert bool((codes == 5).all())
    assert decode_e2m1(codes).shape == shape


def test_pack_puts_the_even_element_into_the_low_nibble() -> None:
    packed = pack_e2m1(torch.tensor([0x1, 0xA, 0xF, 0x0], dtype=torch.uint8))
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [0xA1, 0x0F]
    assert unpack_e2m1(torch.tensor([0xA1, 0x0F], dtype=torch.uint8)).tolist() == [
        0x1,
        0xA,
        0xF,
        0x0,
    ]


def test_pack_and_unpack_every_pair_of_codes() -> None:
    low, high = torch.meshgrid(ALL_CODES, ALL_CODES, indexing="ij")
    pairs = torch.stack([low, high], dim=-1)
    packed = pack_e2m1(pairs)
    assert packed.shape == (16, 16, 1)
    assert packed.flatten().tolist() == [even + 16 * odd for even in range(16) for odd in range(16)]
    unpacked = unpack_e2m1(packed)
    assert unpacked.dtype == torch.uint8
    assert torch.equal(unpacked, pairs)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 255), max_size=40), st.sampled_from([1, 2, 4]))
def test_unpack_then_pack_returns_the_bytes(raw: list[int], rows: int) -> None:
    packed = torch.tensor(raw * rows, dtype=torch.uint8).reshape(rows, len(raw))
    unpacked = unpack_e2m1(packed)
    assert unpacked.shape == (rows, 2 * len(raw))
    assert torch.equal(pack_e2m1(unpacked), packed)


def test_pack_reads_strided_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8).reshape(4, 4)
    assert torch.equal(pack_e2m1(codes.t()), pack_e2m1(codes.t().contiguous()))
    assert pack_e2m1(codes.t())[0].tolist() == [0x40, 0xC8]

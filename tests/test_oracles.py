"""The oracles against numbers worked out by hand: an unchecked yardstick proves nothing."""

from __future__ import annotations

import math

import pytest
import torch

from tests import oracles, quantizers


def test_e4m3_table_has_the_published_corner_values() -> None:
    table = quantizers.E4M3_MAGNITUDES
    assert len(table) == 127
    assert (table[1], table[8], table[0x38], table[0x7E]) == (2.0**-9, 2.0**-6, 1.0, 448.0)
    assert table == sorted(table)


def test_nearest_code_breaks_ties_to_the_even_code_and_keeps_the_sign_of_zero() -> None:
    values = torch.tensor([1.0625, 1.1875, -1.0625, 0.0, -0.0, 1000.0, math.nan, 2.0**-10])
    # 1.0625 lies between 0x38 (1.0) and 0x39 (1.125), 1.1875 between 0x39 and 0x3A (1.25); 2**-10
    # between 0 and 2**-9.
    assert quantizers.e4m3_codes(values).tolist() == [0x38, 0x3A, 0xB8, 0, 0x80, 0x7E, 0x7F, 0]


def test_e2m1_ties_go_to_the_even_code() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.25])
    assert quantizers.e2m1_codes(values).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8]


@pytest.mark.parametrize(
    ("ratio", "byte"), [(1.0, 127), (1.0000001, 128), (0.5, 126), (2.0**-130, 1), (3e38, 254)]
)
def test_power_of_two_byte(ratio: float, byte: int) -> None:
    assert quantizers.power_of_two_byte(ratio) == byte


def test_words_are_little_endian() -> None:
    words = quantizers.pack_words(torch.tensor([1, 2, 3, 0x84, 5]))
    assert words.tolist() == [0x84030201 - 2**32, 5]


def test_chunk32_order_interleaves_the_heads() -> None:
    heads = torch.arange(2 * 512).view(1, 1, 1024)
    permuted = quantizers.chunk32_order(heads, 512, 32)[0, 0].view(32, 32)
    # Chunk 0 of head 0, chunk 0 of head 1, chunk 1 of head 0, ...
    assert permuted[:4, 0].tolist() == [0, 512, 32, 544]


def test_swizzled_offsets_match_the_listed_bytes() -> None:
    listed = {
        (0, 0): 0,
        (1, 0): 16,
        (0, 1): 1,
        (0, 4): 512,
        (4, 31): 3651,
        (32, 0): 4,
        (127, 0): 508,
    }
    assert {entry: quantizers.swizzled_offset(*entry, 32) for entry in listed} == listed


def test_round_to_bf16_is_nearest_even_in_one_step() -> None:
    values = torch.tensor(
        [1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1.0 + 2.0**-8 + 2.0**-40, -3.0], dtype=torch.float64
    )
    # The third value lies just above a tie; going through float32 first would land on the tie and
    # round down.
    assert oracles.round_to_bf16(values).tolist() == [1.0, 1.0 + 2.0**-6, 1.0 + 2.0**-7, -3.0]


def test_attend_two_equal_logits_and_a_sink() -> None:
    keys = torch.zeros(2, 512, dtype=torch.float64)
    keys[0, 0], keys[1, 1] = 3.0, 6.0
    result = oracles.attend(torch.zeros(1, 1, 512), [keys], sm_scale=1.0, attn_sink=torch.zeros(1))
    # Three equal terms in the denominator, two in the lse.
    assert result.out[0, 0, :3].tolist() == [1.0, 2.0, 0.0]
    assert float(result.lse) == pytest.approx(math.log(2.0), abs=1e-15)


def test_rotation_and_its_inverse() -> None:
    table = torch.cat((torch.zeros(32), torch.ones(32)))
    values = torch.arange(64, dtype=torch.float64)
    assert oracles.rotate(values, table, "interleaved")[:4].tolist() == [-1, 0, -3, 2]
    half = oracles.rotate(values, table, "half")
    assert (half[0].item(), half[1].item(), half[32].item()) == (-32, -33, 0)
    for pairing in ("interleaved", "half"):
        there = oracles.rotate(values, table, pairing)
        assert torch.equal(oracles.rotate(there, table, pairing, inverse=True), values)


def test_chunk16_order_follows_the_index_formula() -> None:
    heads = torch.arange(2 * 512).view(1, 2, 512)
    flat = oracles.chunk16_from_head_order(heads).view(-1)
    # d = 0..15 of head 0, the same of head 1, then d = 16..31 of head 0.
    assert flat[[0, 15, 16, 31, 32]].tolist() == [0, 15, 512, 527, 16]

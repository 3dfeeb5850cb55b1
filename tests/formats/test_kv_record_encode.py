"""KV records written: against the independent writer, and golden bytes from the byte maps."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from mlacast.formats.kv_record import encode_kv_record
from tests.cache_writers import NVFP4_384, V4, V32, V41, V41_FP4, RecordLayout
from tests.hand_codes import E2M1_MAGNITUDES, E4M3_MAGNITUDES, bf16_bits, bf16_value, e4m3_value
from tests.hand_records import (
    ENCODINGS,
    FP8_512,
    FP8_576,
    RECORD_NAMES,
    as_tensor,
    layout_id,
    write_record,
)

LARGEST_BF16 = bf16_value(0x7F7F)
POW2_TILES = [
    pytest.param(V32, 128, id="V32"),
    pytest.param(V4, 64, id="V4"),
    pytest.param(V41, 32, id="V41"),
]


def latent_of(bits: list[list[int]]) -> torch.Tensor:
    """bfloat16 [n, d] with these bit patterns."""
    signed = [[pattern - 65536 if pattern >= 32768 else pattern for pattern in row] for row in bits]
    return torch.tensor(signed, dtype=torch.int16).view(torch.bfloat16)


def token(layout: RecordLayout, values: dict[int, float]) -> torch.Tensor:
    """bfloat16 [1, d]: zeros but for the given dimensions."""
    latent = torch.zeros(1, layout.d_qk, dtype=torch.bfloat16)
    for dim, value in values.items():
        latent[0, dim] = value
        assert latent[0, dim].item() == value, "golden inputs are exact in bfloat16"
    return latent


def encode(latent: torch.Tensor, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode and check what every call must satisfy."""
    data, scale = encode_kv_record(latent, RECORD_NAMES[layout.name])
    assert data.dtype == torch.uint8
    assert scale.dtype == torch.uint8
    assert data.shape == (latent.shape[0], layout.data_bytes)
    assert scale.shape == (latent.shape[0], layout.scale_bytes)
    return data, scale


def random_tokens(layout: RecordLayout) -> list[list[int]]:
    """Values whose magnitude changes every 16 dimensions; a rope part is any bits, NaN too."""
    rng = random.Random(layout.d_qk + layout.data_bytes)
    rows = []
    for _ in range(6):
        row: list[int] = []
        while len(row) < layout.d_qk:
            spread = 10.0 ** rng.uniform(-8, 6)
            row += [bf16_bits(rng.gauss(0.0, spread)) for _ in range(16)]
        row[-64:] = (
            [rng.randrange(65536) for _ in range(64)]
            if layout in (V32, V4, NVFP4_384)
            else [bf16_bits(rng.gauss(0.0, 3.0)) for _ in range(64)]
        )
        rows.append(row)
    return rows


def tie_tokens(layout: RecordLayout) -> list[list[int]]:
    """Rounding ties of exactly representable scales, with their bfloat16 neighbours."""
    points: list[float] = []
    if layout in (V41_FP4, NVFP4_384):
        ties = [(a + b) / 2 for a, b in zip(E2M1_MAGNITUDES, E2M1_MAGNITUDES[1:], strict=False)]
        for code in range(0x30, 0x48):
            scale = e4m3_value(code)
            points += [
                6.0 * scale,
                *(sign * tie * scale for tie in ties for sign in (1.0, -1.0)),
                0.0,
            ]
    else:
        middles = [(a + b) / 2 for a, b in zip(E4M3_MAGNITUDES, E4M3_MAGNITUDES[1:], strict=False)]
        for index, middle in enumerate(middles):
            # One value of 448 in each tile of 32 keeps the scale at 1.
            points += [448.0] if index % 31 == 0 else []
            points.append(-middle if index % 2 else middle)
    exact = [bf16_bits(point) for point in points]
    near = [pattern + step for pattern in exact for step in (0, 1)]
    width = layout.d_qk
    filled = near + [0] * (-len(near) % width)
    return [filled[start : start + width] for start in range(0, len(filled), width)]


def peak_tokens(layout: RecordLayout) -> list[list[int]]:
    """Tiles of one value each: around the floors, powers of two, the extremes of bfloat16."""
    peaks = [0.0, 448.0, 3.5, 7.0, 0.875, 449.0, 3.0, 6.0, 2688.0, 2704.0, 11.25, LARGEST_BF16]
    peaks += [
        448.0 * 2.0**-13,
        448.0 * 2.0**-14,
        6.0 * 2.0**-9,
        6.0 * 2.0**-10,
        2.0**-126,
        2.0**-133,
    ]
    patterns = [max(bf16_bits(peak) + step, 0) for peak in peaks for step in (-1, 0, 1)]
    patterns = [pattern for pattern in patterns if pattern < 0x7F80]
    rows = []
    for index, pattern in enumerate(patterns):
        row = [0x8000 if dim % 3 == 0 else 0 for dim in range(layout.d_qk)]
        row[index % 16 :: 16] = [pattern | (0x8000 if index % 2 else 0)] * (layout.d_qk // 16)
        rows.append(row)
    return rows


@pytest.mark.parametrize("layout", ENCODINGS, ids=layout_id)
@pytest.mark.parametrize("kind", ["random", "ties", "peaks"])
def test_bytes_equal_the_independent_writer(layout: RecordLayout, kind: str) -> None:
    makers = {"random": random_tokens, "ties": tie_tokens, "peaks": peak_tokens}
    bits = makers[kind](layout)
    data, scale = encode(latent_of(bits), layout)
    records = [write_record(row, layout) for row in bits]
    assert torch.equal(data, as_tensor([record.data for record in records], layout.data_bytes))
    used = 7 if layout is V4 else layout.scale_bytes
    expected = as_tensor([record.scale for record in records], layout.scale_bytes)
    assert torch.equal(scale[:, :used], expected[:, :used])


def test_golden_v32() -> None:
    values = {0: 448.0, 1: -1.0, 127: 0.4375, 128: 3.5, 256: 3.0, 511: -896.0, 512: 1.0, 575: -2.0}
    data, _ = encode(token(V32, values), V32)
    row = data[0].tolist()
    # Scales 1, 2^-7, 2^-7 and 2; amax 3.0 needs 2^-7 because 2^-8 * 448 = 1.75.
    assert bytes(row[512:528]) == struct.pack("<4f", 1.0, 2.0**-7, 2.0**-7, 2.0)
    assert row[0] == 0x7E
    assert row[1] == 0xB8
    assert row[127] == 0x2E  # 0.4375 = 1.75 * 2^-2
    assert row[128] == 0x7E
    assert row[256] == 0x7C  # 3.0 * 128 = 384 = 1.5 * 2^8
    assert row[511] == 0xFE
    assert row[528:530] == [0x80, 0x3F]
    assert row[654:656] == [0x00, 0xC0]
    marked = {0, 1, 127, 128, 256, 511, *range(512, 530), 654, 655}
    assert all(byte == 0 for index, byte in enumerate(row) if index not in marked)


def test_golden_v4() -> None:
    values = {0: 448.0, 63: -448.0, 64: 7.0, 447: 0.875, 448: 1.0, 511: -2.0}
    data, scale = encode(token(V4, values), V4)
    row = data[0].tolist()
    assert row[0] == 0x7E
    assert row[63] == 0xFE
    assert row[64] == 0x7E
    assert row[447] == 0x7E
    assert row[448:450] == [0x80, 0x3F]
    assert row[574:576] == [0x00, 0xC0]
    # Empty tiles have the floor 2^-13, byte 114.
    assert scale[0, :7].tolist() == [127, 121, 114, 114, 114, 114, 118]
    assert sum(byte != 0 for byte in row) == 4 + 3


def test_golden_v41() -> None:
    data, scale = encode(
        token(V41, {0: 448.0, 32: 3.5, 63: -3.5, 511: 449.0 - 1.0, 510: -1.0}), V41
    )
    row = data[0].tolist()
    assert [row[0], row[32], row[63], row[510], row[511]] == [0x7E, 0x7E, 0xFE, 0xB8, 0x7E]
    assert sum(byte != 0 for byte in row) == 5
    assert scale[0].tolist() == [127, 120, *[114] * 13, 127]


def test_golden_v41_fp4() -> None:
    data, scale = encode(
        token(V41_FP4, {0: 6.0, 1: -1.0, 2: 0.25, 3: 5.0, 510: -3.0, 511: 12.0}), V41_FP4
    )
    row = data[0].tolist()
    # Even element in the low nibble. Last tile: scale 2, -3 / 2 = -1.5 (0xB), 12 / 2 = 6 (0x7).
    assert row[0] == 0xA7
    assert row[1] == 0x60
    assert row[255] == 0x7B
    assert sum(byte != 0 for byte in row) == 3
    assert scale[0].tolist() == [0x38, *[0x01] * 30, 0x40]


def test_golden_nvfp4_384() -> None:
    values = {0: 6.0, 1: -1.0, 446: -3.0, 447: 12.0, 448: 1.0, 511: -2.0}
    data, scale = encode(token(NVFP4_384, values), NVFP4_384)
    row = data[0].tolist()
    assert row[0] == 0xA7
    assert row[223] == 0x7B
    assert row[224:226] == [0x80, 0x3F]
    assert row[350:352] == [0x00, 0xC0]
    assert sum(byte != 0 for byte in row) == 2 + 3
    assert scale[0].tolist() == [0x38, *[0x00] * 26, 0x40, 0, 0, 0, 0]


@pytest.mark.parametrize("layout", [FP8_576, FP8_512], ids=layout_id)
def test_golden_fp8(layout: RecordLayout) -> None:
    last = layout.d_qk - 1
    data, _ = encode(token(layout, {0: 1.0, 1: -448.0, 2: 464.0, 3: -29952.0, last: 2.0}), layout)
    row = data[0].tolist()
    assert [*row[:4], row[last]] == [0x38, 0xFE, 0x7E, 0xFE, 0x40]
    assert sum(byte != 0 for byte in row) == 5


@pytest.mark.parametrize(("layout", "tile"), POW2_TILES)
def test_floor_of_power_of_two_scales_is_on_the_ratio(layout: RecordLayout, tile: int) -> None:
    limit = 448.0 * 2.0**-13
    above = bf16_value(bf16_bits(limit) + 1)
    expected = {0.0: 114, 2.0**-126: 114, 1e-4 * 448.0: 114, limit / 2: 114, limit: 114, above: 115}
    for amax, byte in expected.items():
        latent = torch.zeros(1, layout.d_qk, dtype=torch.bfloat16)
        latent[0, tile - 1] = -amax
        data, scale = encode(latent, layout)
        if layout is V32:
            assert struct.unpack("<f", bytes(data[0, 512:516].tolist()))[0] == 2.0 ** (byte - 127)
        else:
            assert scale[0, 0].item() == byte


def test_floor_of_v41_fp4_scales_is_2_to_the_minus_9() -> None:
    smallest = 6.0 * 2.0**-9
    amaxes = [0.0, 2.0**-126, 6.0 * 2.0**-10, smallest, 1.5 * smallest, 2 * smallest, 2688.0, 1e6]
    # 1.5 times the smallest subnormal is a tie between codes 1 and 2: to the even one.
    for amax, byte in zip(amaxes, [1, 1, 1, 1, 2, 2, 0x7E, 0x7E], strict=True):
        _, scale = encode(token(V41_FP4, {5: bf16_value(bf16_bits(amax))}), V41_FP4)
        assert scale[0, 0].item() == byte


def test_v41_fp4_below_the_floor_uses_the_floor_as_divisor() -> None:
    data, _ = encode(token(V41_FP4, {0: 2.0**-9, 1: -(2.0**-10), 2: 2.0**-11}), V41_FP4)
    # x / 2^-9 = 1, -0.5, 0.25 (a tie to zero).
    assert data[0, :2].tolist() == [0x92, 0x00]


def test_nvfp4_384_has_no_floor() -> None:
    tie = 6.0 * 2.0**-10
    above = bf16_value(bf16_bits(tie) + 1)
    for amax, byte, code in [
        (0.0, 0, 0),
        (2.0**-20, 0, 0),
        (tie, 0, 0),
        (above, 1, 5),
        (2704.0, 0x7E, 7),
    ]:
        data, scale = encode(token(NVFP4_384, {5: amax, 4: -amax / 1024}), NVFP4_384)
        assert scale[0, 0].item() == byte
        pair = int(data[0, 2])
        assert pair >> 4 == code
        # A zero scale leaves no sign behind either.
        assert pair & 15 == (0 if byte == 0 else 8)


def test_v41_fp4_divides_and_nvfp4_384_multiplies_by_the_reciprocal() -> None:
    # amax 11.25 has scale 1.875. 2.34375 / 1.875 is the tie 1.25 (code 2); times the float32
    # reciprocal of 1.875 it is just above the tie (code 3).
    values = {0: 11.25, 1: 2.34375, 2: 4.6875, 3: -2.34375}
    divided, divided_sf = encode(token(V41_FP4, values), V41_FP4)
    multiplied, multiplied_sf = encode(token(NVFP4_384, values), NVFP4_384)
    assert divided_sf[0, 0].item() == multiplied_sf[0, 0].item() == 0x3F
    assert divided[0, :2].tolist() == [0x27, 0xA4]
    assert multiplied[0, :2].tolist() == [0x37, 0xB5]


def test_large_tiles_saturate_fp4() -> None:
    for layout in (V41_FP4, NVFP4_384):
        data, scale = encode(token(layout, {0: 4000.0, 1: -(2.0**120), 2: 448.0}), layout)
        assert scale[0, 0].item() == 0x7E
        assert data[0, :2].tolist() == [0xF7, 0x02]


@pytest.mark.parametrize("layout", ENCODINGS, ids=layout_id)
def test_zeros_keep_their_sign_where_the_scale_is_not_zero(layout: RecordLayout) -> None:
    latent = torch.full((1, layout.d_qk), -0.0, dtype=torch.bfloat16)
    data, _ = encode(latent, layout)
    first = {V41_FP4: 0x88, NVFP4_384: 0x00}.get(layout, 0x80)
    assert data[0, 0].item() == first


@pytest.mark.parametrize(
    ("layout", "rope_at"), [(V32, 528), (V4, 448), (NVFP4_384, 224)], ids=["V32", "V4", "NVFP4"]
)
def test_rope_is_copied_bit_for_bit(layout: RecordLayout, rope_at: int) -> None:
    patterns = [0x7FC0, 0x7F81, 0xFF81, 0xFFFF, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x807F, 0x1234]
    patterns += list(range(0x4000, 0x4000 + 54))
    bits = [[0] * (layout.d_qk - 64) + patterns]
    data, _ = encode(latent_of(bits), layout)
    assert data[0, rope_at:].tolist() == list(struct.pack("<64H", *patterns))


@pytest.mark.parametrize("layout", ENCODINGS, ids=layout_id)
def test_other_float_dtypes_of_the_same_values(layout: RecordLayout) -> None:
    generator = torch.Generator().manual_seed(9)
    latent = torch.randn(3, layout.d_qk, generator=generator).to(torch.bfloat16)
    data, scale = encode(latent, layout)
    for dtype in (torch.float32, torch.float16):
        # bfloat16 values of ordinary size are exact in both.
        exact = latent.to(torch.float16).to(torch.bfloat16)
        same = encode(exact, layout)
        other = encode(exact.to(dtype), layout)
        assert torch.equal(same[0], other[0])
        assert torch.equal(same[1], other[1])
    assert data.shape[0] == scale.shape[0] == 3


@pytest.mark.parametrize("layout", ENCODINGS, ids=layout_id)
def test_strided_latents_no_tokens_and_untouched_input(layout: RecordLayout) -> None:
    generator = torch.Generator().manual_seed(10)
    parent = torch.randn(layout.d_qk + 8, 7, generator=generator).to(torch.bfloat16)
    before = parent.clone()
    view = parent.t()[1::2, 4 : 4 + layout.d_qk]
    data, scale = encode(view, layout)
    dense_data, dense_scale = encode(view.contiguous(), layout)
    assert torch.equal(data, dense_data)
    assert torch.equal(scale, dense_scale)
    assert torch.equal(parent, before)
    encode(parent.t()[:0, : layout.d_qk], layout)


def test_fp8_does_not_depend_on_the_cast_of_the_build(cast_gives_nan_above_448: None) -> None:
    values = {0: 448.0, 1: 450.0, 2: -464.0, 3: 1000.0, 4: -LARGEST_BF16}
    data, _ = encode(token(FP8_512, values), FP8_512)
    assert data[0, :5].tolist() == [0x7E, 0x7E, 0xFE, 0x7E, 0xFE]

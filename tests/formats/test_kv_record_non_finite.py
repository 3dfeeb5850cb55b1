"""NaN and infinity in KV records: what each format marks; the mark stays inside its tile."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from mlacast.formats.kv_record import decode_kv_record, encode_kv_record
from tests.cache_writers import NVFP4_384, V4, V32, V41, V41_FP4, RecordLayout
from tests.hand_codes import INF, NAN
from tests.hand_records import FP8_512, RECORD_NAMES, as_tensor, rows_as_bits, write_record

UE8M0_FORMATS = [pytest.param(V4, 64, id="V4"), pytest.param(V41, 32, id="V41")]
FP4_FORMATS = [pytest.param(V41_FP4, id="V41_FP4"), pytest.param(NVFP4_384, id="NVFP4_384")]
BAD = [NAN, -NAN, INF, -INF]


def ones(layout: RecordLayout) -> torch.Tensor:
    """bfloat16 [1, d] of alternating 1 and -1."""
    latent = torch.ones(1, layout.d_qk, dtype=torch.bfloat16)
    latent[:, 1::2] = -1.0
    return latent


def encode(latent: torch.Tensor, layout: RecordLayout) -> tuple[list[int], list[int]]:
    """Data and scale bytes of the one token."""
    data, scale = encode_kv_record(latent, RECORD_NAMES[layout.name])
    return data[0].tolist(), scale[0].tolist()


@pytest.mark.parametrize(("layout", "tile"), UE8M0_FORMATS)
def test_nan_marks_the_tile_of_ue8m0_formats(layout: RecordLayout, tile: int) -> None:
    clean_data, clean_scale = encode(ones(layout), layout)
    latent = ones(layout)
    latent[0, tile + 3] = NAN
    latent[0, tile + 4] = INF
    data, scale = encode(latent, layout)
    assert scale[1] == 0xFF
    assert data[tile : 2 * tile] == [0x7F] * tile
    assert scale[0] == clean_scale[0]
    assert scale[2:7] == clean_scale[2:7]
    assert data[:tile] + data[2 * tile :] == clean_data[:tile] + clean_data[2 * tile :]


@pytest.mark.parametrize(("layout", "tile"), UE8M0_FORMATS)
def test_infinity_without_nan_marks_itself(layout: RecordLayout, tile: int) -> None:
    clean_data, clean_scale = encode(ones(layout), layout)
    latent = ones(layout)
    latent[0, 0], latent[0, 1], latent[0, 2], latent[0, 3] = INF, -INF, 0.0, -0.0
    data, scale = encode(latent, layout)
    assert scale[0] == 0xFF
    assert data[:6] == [0x7F, 0x7F, 0x00, 0x80, 0x00, 0x80]
    assert data[4:tile] == [0x00, 0x80] * ((tile - 4) // 2)
    assert scale[1:7] == clean_scale[1:7]
    assert data[tile:] == clean_data[tile:]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_v32_marks_the_tile_with_a_nan_scale(bad: float) -> None:
    clean_data, _ = encode(ones(V32), V32)
    latent = ones(V32)
    latent[0, 130] = bad
    data, _ = encode(latent, V32)
    scales = struct.unpack("<4f", bytes(data[512:528]))
    assert math.isnan(scales[1])
    assert [scales[0], scales[2], scales[3]] == [2.0**-8] * 3
    assert data[128:256] == [0x7F] * 128
    assert data[:128] + data[256:516] == clean_data[:128] + clean_data[256:516]
    assert data[520:] == clean_data[520:]


@pytest.mark.parametrize("layout", FP4_FORMATS)
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_fp4_marks_the_tile_with_a_nan_scale(layout: RecordLayout, bad: float) -> None:
    clean_data, clean_scale = encode(ones(layout), layout)
    latent = ones(layout)
    latent[0, 16] = bad
    data, scale = encode(latent, layout)
    assert scale[1] == 0x7F
    assert data[8:16] == [0x77] * 8
    assert scale[:1] + scale[2:] == clean_scale[:1] + clean_scale[2:]
    assert data[:8] + data[16:] == clean_data[:8] + clean_data[16:]


@pytest.mark.parametrize("layout", [V32, V4, NVFP4_384], ids=lambda layout: layout.name)
def test_non_finite_rope_marks_no_tile(layout: RecordLayout) -> None:
    clean_data, clean_scale = encode(ones(layout), layout)
    latent = ones(layout)
    latent[0, -64:] = torch.tensor([NAN, INF, -INF, 1.0] * 16)
    data, scale = encode(latent, layout)
    assert scale == clean_scale
    assert data[:-128] == clean_data[:-128]
    assert data[-128:] == list(struct.pack("<64H", *rows_as_bits(latent)[0][-64:]))


def test_fp8_saturates_infinity_and_keeps_nan() -> None:
    latent = ones(FP8_512)
    latent[0, 0], latent[0, 1], latent[0, 2] = INF, -INF, NAN
    data, _ = encode(latent, FP8_512)
    assert data[:4] == [0x7E, 0xFE, 0x7F, 0xB8]


@pytest.mark.parametrize(
    "layout", [V32, V4, V41, V41_FP4, NVFP4_384], ids=lambda layout: layout.name
)
def test_non_finite_tokens_equal_the_independent_writer(layout: RecordLayout) -> None:
    latent = torch.randn(6, layout.d_qk, generator=torch.Generator().manual_seed(11)).to(
        torch.bfloat16
    )
    for row, bad in enumerate([NAN, INF, -INF]):
        latent[row, row * 100] = bad
    latent[3, 17], latent[3, 18] = INF, NAN
    latent[4, ::7] = -INF
    records = [write_record(bits, layout) for bits in rows_as_bits(latent)]
    data, scale = encode_kv_record(latent, RECORD_NAMES[layout.name])
    expected = as_tensor([record.data for record in records], layout.data_bytes)
    if layout is V32:
        # Any NaN will do as a scale: compare those four numbers by value.
        seen = data[:, 512:528].contiguous().view(torch.float32)
        wanted = expected[:, 512:528].contiguous().view(torch.float32)
        assert torch.equal(seen.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))
        data[:, 512:528] = expected[:, 512:528]
    assert torch.equal(data, expected)
    used = 7 if layout is V4 else layout.scale_bytes
    assert torch.equal(
        scale[:, :used], as_tensor([r.scale for r in records], layout.scale_bytes)[:, :used]
    )


@pytest.mark.parametrize(
    "layout", [V32, V4, V41, V41_FP4, NVFP4_384], ids=lambda layout: layout.name
)
@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
def test_a_marked_tile_reads_back_as_nan(layout: RecordLayout, bad: float) -> None:
    tile = {V32: 128, V4: 64, V41: 32}.get(layout, 16)
    latent = ones(layout)
    latent[0, 2 * tile] = bad
    name = RECORD_NAMES[layout.name]
    data, scale = encode_kv_record(latent, name)
    decoded = decode_kv_record(data, scale, name)[0]
    marked = torch.zeros(layout.d_qk, dtype=torch.bool)
    marked[2 * tile : 3 * tile] = True
    # ue8m0 255 is NaN and NaN times zero is NaN, so a tile with infinity is NaN throughout.
    assert torch.equal(decoded.isnan(), marked)

"""KV records read back: every code with every scale, float32 scales as stored, one rounding."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from mlacast.formats.kv_record import decode_kv_record
from tests.cache_writers import NVFP4_384, V4, V32, V41, V41_FP4, RecordLayout
from tests.hand_codes import bf16_bits, e4m3_value, f32
from tests.hand_records import (
    ENCODINGS,
    FP8_512,
    FP8_576,
    RECORD_NAMES,
    HandRecord,
    as_tensor,
    equals_bits,
    layout_id,
    read_record,
)

ALL_CODES = bytes(range(256))


def decode(records: list[HandRecord], layout: RecordLayout) -> torch.Tensor:
    """Run the reader on hand-made records."""
    rows = decode_kv_record(
        as_tensor([record.data for record in records], layout.data_bytes),
        as_tensor([record.scale for record in records], layout.scale_bytes),
        RECORD_NAMES[layout.name],
    )
    assert rows.dtype == torch.bfloat16
    assert rows.shape == (len(records), layout.d_qk)
    return rows


def check(records: list[HandRecord], layout: RecordLayout) -> None:
    """The reader against the loops."""
    expected = [read_record(record, layout) for record in records]
    assert equals_bits(decode(records, layout), expected)


@pytest.mark.parametrize("layout", [FP8_576, FP8_512], ids=layout_id)
def test_fp8_every_code(layout: RecordLayout) -> None:
    check([HandRecord((ALL_CODES * 3)[: layout.d_qk], b"")], layout)


def test_v41_every_code_with_every_exponent() -> None:
    check(
        [HandRecord(ALL_CODES * 2, bytes([byte] * 8 + [255 - byte] * 8)) for byte in range(256)],
        V41,
    )


def test_v4_every_code_with_every_exponent() -> None:
    rope = struct.pack("<64H", *range(0x7F60, 0x7FA0))
    records = [
        HandRecord((ALL_CODES[128:] + ALL_CODES * 2)[:448] + rope, bytes([*[byte] * 7, 0]))
        for byte in range(0, 256, 3)
    ]
    check(records, V4)


def test_v4_pad_byte_has_no_effect() -> None:
    data = (ALL_CODES * 2)[:448] + bytes(128)
    scale = bytes([120, 121, 122, 123, 124, 125, 126])
    plain, padded = decode(
        [HandRecord(data, scale + b"\x00"), HandRecord(data, scale + b"\xff")], V4
    ).view(torch.int16)
    assert torch.equal(plain, padded)


def test_nvfp4_384_pad_bytes_have_no_effect() -> None:
    data = ALL_CODES[:224] + bytes(128)
    scale = bytes(range(0x20, 0x20 + 28))
    plain, padded = decode(
        [HandRecord(data, scale + bytes(4)), HandRecord(data, scale + b"\xff" * 4)], NVFP4_384
    ).view(torch.int16)
    assert torch.equal(plain, padded)


@pytest.mark.parametrize("layout", [V41_FP4, NVFP4_384], ids=layout_id)
def test_fp4_every_code_with_every_scale(layout: RecordLayout) -> None:
    # 0x7F is the NaN scale; a NaN scale makes zero codes NaN too.
    packed = ALL_CODES * 2
    rope = b"" if layout is V41_FP4 else struct.pack("<64H", *range(0xFF60, 0xFFA0))
    records = [
        HandRecord(
            packed[start : start + layout.data_bytes - len(rope)] + rope,
            bytes([byte] * 28 + ([byte] * 4 if layout is V41_FP4 else [0] * 4)),
        )
        for byte in range(128)
        for start in (0, 100)
    ]
    check(records, layout)


def v32_record(codes: bytes, scales: list[float]) -> HandRecord:
    """One V32 token with these scales and a zero rope part."""
    return HandRecord(codes + struct.pack("<4f", *scales) + bytes(128), b"")


def test_v32_uses_the_stored_float32_scale() -> None:
    """Codes 1.0 with scales that are no powers of two: a power-of-two reading gives 0.25 or 0.5."""
    rows = decode([v32_record(b"\x38" * 512, [0.3, 3.0, 0.7, 1.0 / 3.0])], V32)[0]
    for tile, value in enumerate([0.30078125, 3.0, 0.69921875, 0.333984375]):
        assert bool((rows[128 * tile : 128 * tile + 128].float() == value).all())


def test_v32_every_code_with_arbitrary_scales() -> None:
    rng = random.Random(9)
    scales = [0.3, 3.0, 0.7, 1.0 / 3.0, 1e-6, 1000.0, float("nan"), 2.0**-13, 1e-38, 1e38]
    scales += [rng.uniform(0.0, 10.0) for _ in range(30)]
    records = [
        v32_record(ALL_CODES * 2, [scales[i], scales[i + 1], scales[i + 2], scales[i + 3]])
        for i in range(0, 36)
    ]
    check(records, V32)


def test_v32_result_is_rounded_once() -> None:
    """The scale lies just below the bfloat16 tie 1.00390625: rounded first it would be 1.0."""
    scale = f32(1.00390625 - 2.0**-20)
    assert bf16_bits(scale) == bf16_bits(1.0)
    # 1.875 * scale = 1.88232, and bfloat16 has 1.875 and 1.8828125 around it.
    rows = decode([v32_record(b"\x3f" * 512, [scale] * 4)], V32)
    assert bool((rows[0, :512].float() == 1.8828125).all())


@pytest.mark.parametrize("layout", ENCODINGS, ids=layout_id)
def test_random_bytes_equal_the_loops(layout: RecordLayout) -> None:
    rng = random.Random(layout.data_bytes)
    records = []
    for _ in range(8):
        data = bytearray(rng.randbytes(layout.data_bytes))
        if layout is V32:
            data[512:528] = struct.pack("<4f", *(rng.uniform(0.0, 100.0) for _ in range(4)))
        # e4m3 scales are non-negative in every writer.
        scale = bytes(
            byte & (0x7F if layout in (V41_FP4, NVFP4_384) else 0xFF)
            for byte in rng.randbytes(layout.scale_bytes)
        )
        records.append(HandRecord(bytes(data), scale))
    check(records, layout)


@pytest.mark.parametrize("layout", [V32, V4, NVFP4_384], ids=layout_id)
def test_rope_is_read_bit_for_bit(layout: RecordLayout) -> None:
    patterns = [
        0x7FC1,
        0x7F81,
        0xFF81,
        0xFFFF,
        0x7F80,
        0xFF80,
        0x8000,
        0x0001,
        *range(0x3F00, 0x3F00 + 56),
    ]
    data = bytes(layout.data_bytes - 128) + struct.pack("<64H", *patterns)
    rows = decode([HandRecord(data, bytes(layout.scale_bytes))], layout)
    seen = [bits & 0xFFFF for bits in rows.view(torch.int16)[0, -64:].tolist()]
    assert seen == patterns


@pytest.mark.parametrize("layout", ENCODINGS, ids=layout_id)
def test_no_tokens_and_strided_bytes(layout: RecordLayout) -> None:
    decode([], layout)
    rng = random.Random(12)
    data = as_tensor([rng.randbytes(layout.data_bytes) for _ in range(4)], layout.data_bytes)
    scale = as_tensor([bytes([0x30]) * layout.scale_bytes for _ in range(4)], layout.scale_bytes)
    wide = torch.cat([data, data], dim=1)[::2, : layout.data_bytes]
    name = RECORD_NAMES[layout.name]
    strided = decode_kv_record(wide, scale[::2], name)
    dense = decode_kv_record(wide.contiguous(), scale[::2].contiguous(), name)
    assert torch.equal(strided.view(torch.int16), dense.view(torch.int16))


def test_subnormal_products_are_exact() -> None:
    # Byte 0 means 2^-127: 448 * 2^-127 = 1.75 * 2^-119. 2^-6 * 2^-127 is the smallest bfloat16.
    record = HandRecord(bytes([0x7E, 0x08, 0x88]) + bytes(509), bytes([0] * 16))
    rows = decode([record], V41)
    assert rows[0, 0].item() == e4m3_value(0x7E) * 2.0**-127
    assert [bits & 0xFFFF for bits in rows.view(torch.int16)[0, 1:3].tolist()] == [0x0001, 0x8001]

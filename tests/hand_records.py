"""KV records from a latent, by hand: loops over one token, bytes put together with struct.

The reader and writer follow the written formulas; tests.cache_writers holds sizes and placements.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.cache_writers import (
    NVFP4_384,
    V4,
    V32,
    V41,
    V41_FP4,
    V41_FP4_INLINE,
    V41_INLINE,
    RecordLayout,
    page_bytes,
)
from tests.hand_codes import (
    NAN,
    bf16_bits,
    bf16_value,
    e2m1_code,
    e2m1_value,
    e4m3_code,
    e4m3_value,
    f32,
    ue8m0_byte,
    ue8m0_value,
)

FP8_576 = RecordLayout("FP8", 576, 576, 0, footer=False)
FP8_512 = RecordLayout("FP8", 512, 512, 0, footer=False)

RECORD_NAMES = {
    "FP8": "fp8",
    "V32": "v32",
    "V4": "v4",
    "V41": "v41",
    "V41_FP4": "v41_fp4",
    "V41_INLINE": "v41",
    "V41_FP4_INLINE": "v41_fp4",
    "NVFP4_384": "nvfp4_384",
}
"""KvFormat attribute -> name of its record in formats.kv_record."""

ENCODINGS = (FP8_576, FP8_512, V32, V4, V41, V41_FP4, NVFP4_384)
"""One layout for each way to encode a token; the inline formats encode like their footer twins."""

BYTE_LAYOUTS = (FP8_576, FP8_512, V32, V4, V41, V41_FP4, V41_INLINE, V41_FP4_INLINE, NVFP4_384)


def layout_id(layout: RecordLayout) -> str:
    """Readable test id."""
    return f"{layout.name}-{layout.d_qk}" if layout.name == "FP8" else layout.name


@dataclass(frozen=True)
class HandRecord:
    """Bytes of one token in the data plane and in the scale plane."""

    data: bytes
    scale: bytes


def rows_as_bits(latent: torch.Tensor) -> list[list[int]]:
    """bfloat16 [n, d] -> 16-bit patterns."""
    assert latent.dtype == torch.bfloat16
    return [[bits & 0xFFFF for bits in row] for row in latent.view(torch.int16).tolist()]


def _tiles(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _raw(bits: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(bits)}H", *bits)


def _pairs(codes: Sequence[int]) -> bytes:
    return bytes(even | odd << 4 for even, odd in zip(codes[0::2], codes[1::2], strict=True))


def _finite(tile: Sequence[float]) -> bool:
    return all(math.isfinite(value) for value in tile)


def _power_of_two_byte(tile: Sequence[float]) -> int:
    """Exponent byte of 2 ** ceil(log2(max(amax / 448, 1e-4)))."""
    amax = max(abs(value) for value in tile)
    return ue8m0_byte(max(f32(amax / 448.0), f32(1e-4)))


def _e4m3_tile(tile: Sequence[float], factor: float) -> bytes:
    return bytes(e4m3_code(f32(value / factor)) for value in tile)


def _v32(values: Sequence[float], bits: Sequence[int]) -> HandRecord:
    codes, scales = b"", b""
    for tile in _tiles(values[:512], 128):
        factor = ue8m0_value(_power_of_two_byte(tile)) if _finite(tile) else NAN
        codes += _e4m3_tile(tile, factor) if _finite(tile) else bytes([0x7F] * 128)
        scales += struct.pack("<f", factor)
    return HandRecord(codes + scales + _raw(bits[512:]), b"")


def _marked_tile(tile: Sequence[float]) -> tuple[bytes, int]:
    """Codes and exponent byte of one tile; a non-finite one is marked in both."""
    if any(math.isnan(value) for value in tile):
        return bytes([0x7F] * len(tile)), 0xFF
    if not _finite(tile):
        zero = {1.0: 0x00, -1.0: 0x80}
        marked = [0x7F if math.isinf(v) else zero[math.copysign(1.0, v)] for v in tile]
        return bytes(marked), 0xFF
    byte = _power_of_two_byte(tile)
    return _e4m3_tile(tile, ue8m0_value(byte)), byte


def _v4(values: Sequence[float], bits: Sequence[int]) -> HandRecord:
    marked = [_marked_tile(tile) for tile in _tiles(values[:448], 64)]
    codes = b"".join(tile for tile, _ in marked)
    return HandRecord(codes + _raw(bits[448:]), bytes([byte for _, byte in marked] + [0]))


def _v41(values: Sequence[float], bits: Sequence[int]) -> HandRecord:
    marked = [_marked_tile(tile) for tile in _tiles(values, 32)]
    return HandRecord(b"".join(tile for tile, _ in marked), bytes(byte for _, byte in marked))


def _v41_fp4(values: Sequence[float], bits: Sequence[int]) -> HandRecord:
    codes: list[int] = []
    scales: list[int] = []
    for tile in _tiles(values, 16):
        if not _finite(tile):
            codes += [7] * 16
            scales.append(0x7F)
            continue
        ratio = f32(max(abs(value) for value in tile) / 6.0)
        scales.append(e4m3_code(min(max(ratio, 2.0**-9), 448.0)))
        codes += [e2m1_code(f32(value / e4m3_value(scales[-1]))) for value in tile]
    return HandRecord(_pairs(codes), bytes(scales))


def _nvfp4_384(values: Sequence[float], bits: Sequence[int]) -> HandRecord:
    codes: list[int] = []
    scales: list[int] = []
    for tile in _tiles(values[:448], 16):
        if not _finite(tile):
            codes += [7] * 16
            scales.append(0x7F)
            continue
        scales.append(e4m3_code(f32(max(abs(value) for value in tile) / 6.0)))
        if scales[-1] == 0:
            codes += [0] * 16
            continue
        reciprocal = f32(1.0 / e4m3_value(scales[-1]))
        codes += [e2m1_code(f32(value * reciprocal)) for value in tile]
    return HandRecord(_pairs(codes) + _raw(bits[448:]), bytes(scales + [0, 0, 0, 0]))


def _fp8(values: Sequence[float], bits: Sequence[int]) -> HandRecord:
    return HandRecord(bytes(e4m3_code(value) for value in values), b"")


_WRITERS = {
    "FP8": _fp8,
    "V32": _v32,
    "V4": _v4,
    "V41": _v41,
    "V41_INLINE": _v41,
    "V41_FP4": _v41_fp4,
    "V41_FP4_INLINE": _v41_fp4,
    "NVFP4_384": _nvfp4_384,
}


def write_record(bits: Sequence[int], layout: RecordLayout) -> HandRecord:
    """Encode one token given as bfloat16 bit patterns."""
    assert len(bits) == layout.d_qk
    record = _WRITERS[layout.name]([bf16_value(pattern) for pattern in bits], bits)
    assert (len(record.data), len(record.scale)) == (layout.data_bytes, layout.scale_bytes)
    return record


def _scaled_e4m3(codes: bytes, factors: Sequence[float], size: int) -> list[int]:
    return [
        bf16_bits(f32(e4m3_value(code) * factors[index // size]))
        for index, code in enumerate(codes)
    ]


def _scaled_e2m1(packed: bytes, scales: bytes) -> list[int]:
    codes = [nibble for byte in packed for nibble in (byte & 15, byte >> 4)]
    return [
        bf16_bits(f32(e2m1_value(code) * e4m3_value(scales[index // 16])))
        for index, code in enumerate(codes)
    ]


def _shorts(raw: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(raw) // 2}H", raw))


def read_record(record: HandRecord, layout: RecordLayout) -> list[int]:
    """Decode one token to bfloat16 bit patterns, any NaN of a scaled value as 0x7FC0."""
    data, scale = record.data, record.scale
    if layout.name == "FP8":
        return _scaled_e4m3(data, [1.0], len(data))
    if layout.name == "V32":
        return _scaled_e4m3(data[:512], struct.unpack("<4f", data[512:528]), 128) + _shorts(
            data[528:]
        )
    if layout.name == "V4":
        return _scaled_e4m3(data[:448], [ue8m0_value(b) for b in scale[:7]], 64) + _shorts(
            data[448:]
        )
    if layout.name in ("V41", "V41_INLINE"):
        return _scaled_e4m3(data, [ue8m0_value(b) for b in scale], 32)
    if layout.name in ("V41_FP4", "V41_FP4_INLINE"):
        return _scaled_e2m1(data, scale)
    return _scaled_e2m1(data[:224], scale[:28]) + _shorts(data[224:])


def equals_bits(rows: torch.Tensor, expected: Sequence[Sequence[int]]) -> bool:
    """bfloat16 [n, d] against bit patterns, any NaN equal to any NaN."""
    if rows.dtype != torch.bfloat16 or rows.shape[0] != len(expected):
        return False
    wanted = torch.tensor(expected, dtype=torch.int32).reshape(rows.shape)
    seen = rows.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    both_nan = ((seen & 0x7FFF) > 0x7F80) & ((wanted & 0x7FFF) > 0x7F80)
    return bool(((seen == wanted) | both_nan).all())


def as_tensor(raw: Sequence[bytes], width: int) -> torch.Tensor:
    """Byte strings of one width -> uint8 [n, width]."""
    return torch.tensor([list(row) for row in raw], dtype=torch.uint8).reshape(len(raw), width)


def paint(
    buffer: bytearray,
    layout: RecordLayout,
    page_size: int,
    records: dict[int, HandRecord],
    *,
    start: int = 0,
    page_stride: int | None = None,
) -> None:
    """Write the record of every slot into a flat buffer; ``start`` is the first byte of page 0."""
    stride = page_bytes(layout, page_size) if page_stride is None else page_stride
    for slot, record in records.items():
        page, token = divmod(slot, page_size)
        base = start + page * stride
        if layout.footer:
            data_at = base + token * layout.data_bytes
            scale_at = base + page_size * layout.data_bytes + token * layout.scale_bytes
        else:
            data_at = base + token * (layout.data_bytes + layout.scale_bytes)
            scale_at = data_at + layout.data_bytes
        buffer[data_at : data_at + layout.data_bytes] = record.data
        buffer[scale_at : scale_at + layout.scale_bytes] = record.scale

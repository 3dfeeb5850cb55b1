"""Independent KV records: bytes put together in the test from the byte maps, with the rows they
must decode to.

Codes and scales are drawn, not computed from a latent, so no quantiser is involved: every finite
code can occur. The written rows are exact in bf16 (a code has at most four significant bits and the
scales are powers of two or have four bits themselves), hence decoding leaves no room for rounding.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.quantizers import e2m1_values, e4m3_values


@dataclass(frozen=True)
class RecordLayout:
    """Where the bytes of one token go.

    Attributes:
        name: Attribute of KvFormat.
        d_qk: Width of the decoded row.
        data_bytes: Bytes of a token in the data plane.
        scale_bytes: Bytes of a token in the scale plane.
        footer: The scales of a page follow the data of all its tokens; else they follow the token's
            own data.
        page_align: Page bytes are rounded up to a multiple of this.
    """

    name: str
    d_qk: int
    data_bytes: int
    scale_bytes: int
    footer: bool
    page_align: int = 1

    @property
    def token_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes


V32 = RecordLayout("V32", 576, 656, 0, footer=False)
V4 = RecordLayout("V4", 512, 576, 8, footer=True, page_align=576)
V41 = RecordLayout("V41", 512, 512, 16, footer=True, page_align=512)
V41_FP4 = RecordLayout("V41_FP4", 512, 256, 32, footer=True, page_align=512)
V41_INLINE = RecordLayout("V41_INLINE", 512, 512, 16, footer=False)
V41_FP4_INLINE = RecordLayout("V41_FP4_INLINE", 512, 256, 32, footer=False)
NVFP4_384 = RecordLayout("NVFP4_384", 512, 352, 32, footer=True)
PACKED_LAYOUTS = (V32, V4, V41, V41_FP4, V41_INLINE, V41_FP4_INLINE, NVFP4_384)


@dataclass(frozen=True)
class Records:
    """n tokens: ``data`` [n, data_bytes], ``scale`` [n, scale_bytes] uint8 and ``rows`` [n, d_qk]
    float64.
    """

    data: Tensor
    scale: Tensor
    rows: Tensor


@dataclass(frozen=True)
class FilledCache:
    """A cache tensor, the slot of every written token and the decoded rows of all slots (NaN where
    unwritten).
    """

    cache: Tensor
    slots: Tensor
    rows: Tensor


def bf16_bytes(values: Tensor) -> Tensor:
    """bf16 [n, m] -> uint8 [n, 2m], little endian."""
    bits = values.bfloat16().view(torch.int16).to(torch.int64) & 0xFFFF
    return torch.stack((bits & 0xFF, bits >> 8), -1).flatten(1).to(torch.uint8)


def float32_bytes(values: Sequence[float]) -> list[int]:
    """Little-endian bytes of float32 numbers."""
    return list(struct.pack(f"<{len(values)}f", *values))


def _draw_e4m3(n: int, count: int) -> tuple[Tensor, Tensor]:
    """Finite codes of moderate size: exponent fields 0..9, both signs."""
    codes = torch.randint(0, 80, (n, count)) + 128 * torch.randint(0, 2, (n, count))
    return codes.to(torch.uint8), e4m3_values(codes)


def _draw_e2m1(n: int, count: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 16, (n, count))
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.to(torch.uint8), e2m1_values(codes)


def _draw_exponents(n: int, count: int) -> tuple[Tensor, Tensor]:
    exponents = torch.randint(123, 129, (n, count))
    return exponents.to(torch.uint8), torch.pow(2.0, (exponents - 127).double())


def _draw_positive_e4m3(n: int, count: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(40, 64, (n, count))
    return codes.to(torch.uint8), e4m3_values(codes)


def _v32(n: int) -> Records:
    codes, values = _draw_e4m3(n, 512)
    # Not powers of two, but only three significant bits, so that code * scale is exact in bf16 as
    # well.
    choices = torch.tensor([0.25, 0.3125, 0.75, 1.25, 0.0625], dtype=torch.float32)
    scales = choices[torch.randint(0, 5, (n, 4))]
    rope = torch.randn(n, 64).bfloat16()
    scale_bytes = torch.tensor(
        [float32_bytes(line) for line in scales.tolist()], dtype=torch.uint8
    ).view(n, 16)
    latent = values * scales.double().repeat_interleave(128, 1)
    data = torch.cat((codes, scale_bytes, bf16_bytes(rope)), 1)
    return Records(
        data, torch.empty(n, 0, dtype=torch.uint8), torch.cat((latent, rope.double()), 1)
    )


def _v4(n: int) -> Records:
    codes, values = _draw_e4m3(n, 448)
    exponents, scales = _draw_exponents(n, 7)
    rope = torch.randn(n, 64).bfloat16()
    pad = torch.full((n, 1), 0xFF, dtype=torch.uint8)
    rows = torch.cat((values * scales.repeat_interleave(64, 1), rope.double()), 1)
    return Records(torch.cat((codes, bf16_bytes(rope)), 1), torch.cat((exponents, pad), 1), rows)


def _v41(n: int) -> Records:
    codes, values = _draw_e4m3(n, 512)
    exponents, scales = _draw_exponents(n, 16)
    return Records(codes, exponents, values * scales.repeat_interleave(32, 1))


def _v41_fp4(n: int) -> Records:
    packed, values = _draw_e2m1(n, 512)
    sf, scales = _draw_positive_e4m3(n, 32)
    return Records(packed, sf, values * scales.repeat_interleave(16, 1))


def _nvfp4_384(n: int) -> Records:
    packed, values = _draw_e2m1(n, 448)
    sf, scales = _draw_positive_e4m3(n, 28)
    rope = torch.randn(n, 64).bfloat16()
    zeros = torch.zeros(n, 4, dtype=torch.uint8)
    rows = torch.cat((values * scales.repeat_interleave(16, 1), rope.double()), 1)
    return Records(torch.cat((packed, bf16_bytes(rope)), 1), torch.cat((sf, zeros), 1), rows)


_DRAWERS: dict[str, Callable[[int], Records]] = {
    "V32": _v32,
    "V4": _v4,
    "V41": _v41,
    "V41_FP4": _v41_fp4,
    "V41_INLINE": _v41,
    "V41_FP4_INLINE": _v41_fp4,
    "NVFP4_384": _nvfp4_384,
}


def draw_records(layout: RecordLayout, n: int) -> Records:
    """Random records of ``n`` tokens."""
    return _DRAWERS[layout.name](n)


def page_bytes(layout: RecordLayout, page_size: int) -> int:
    """Bytes of one page, padding included."""
    payload = page_size * layout.token_bytes
    return (payload + layout.page_align - 1) // layout.page_align * layout.page_align


def cache_view(
    flat: Tensor, layout: RecordLayout, num_pages: int, page_size: int, stride: int, start: int
) -> Tensor:
    """The [num_pages, page_size, 1, token_bytes] view of a flat byte buffer."""
    width = layout.token_bytes
    return flat.as_strided((num_pages, page_size, 1, width), (stride, width, width, 1), start)


def empty_cache(
    layout: RecordLayout, num_pages: int, page_size: int, fill: int = 0xFF
) -> tuple[Tensor, Tensor]:
    """(flat buffer, cache view) filled with one byte; 0xFF is NaN as e4m3, as ue8m0 and as bf16."""
    stride = page_bytes(layout, page_size)
    flat = torch.full((num_pages * stride,), fill, dtype=torch.uint8)
    return flat, cache_view(flat, layout, num_pages, page_size, stride, 0)


def record_offsets(layout: RecordLayout, page_size: int, stride: int, slot: int) -> tuple[int, int]:
    """(data, scale): where the bytes of a slot begin, counted from the first page."""
    page, offset = divmod(slot, page_size)
    if layout.footer:
        scales = page * stride + page_size * layout.data_bytes
        return page * stride + offset * layout.data_bytes, scales + offset * layout.scale_bytes
    data_at = page * stride + offset * layout.token_bytes
    return data_at, data_at + layout.data_bytes


def put_records(
    flat: Tensor,
    layout: RecordLayout,
    page_size: int,
    stride: int,
    start: int,
    slots: Sequence[int],
    records: Records,
) -> None:
    """Write the bytes of token i at slot slots[i]: one copy per plane, at offsets computed here."""
    for token, slot in enumerate(slots):
        data_at, scale_at = record_offsets(layout, page_size, stride, slot)
        data_at, scale_at = start + data_at, start + scale_at
        flat[data_at : data_at + layout.data_bytes] = records.data[token]
        flat[scale_at : scale_at + layout.scale_bytes] = records.scale[token]


def fill_cache(
    layout: RecordLayout,
    records: Records,
    *,
    num_pages: int,
    page_size: int,
    slots: Sequence[int] | None = None,
) -> FilledCache:
    """Put ``records`` at ``slots`` (default: 0, 1, 2, ...) of a cache of 0xFF bytes."""
    count = records.data.shape[0]
    chosen = list(range(count)) if slots is None else list(slots)
    flat, cache = empty_cache(layout, num_pages, page_size)
    put_records(flat, layout, page_size, page_bytes(layout, page_size), 0, chosen, records)
    rows = torch.full((num_pages * page_size, layout.d_qk), float("nan"), dtype=torch.float64)
    rows[torch.tensor(chosen, dtype=torch.int64)] = records.rows
    return FilledCache(cache, torch.tensor(chosen, dtype=torch.int32), rows)


def fill_plain_cache(
    name: str, d_qk: int, *, num_pages: int, page_size: int, slots: Sequence[int]
) -> FilledCache:
    """A BF16 or per-tensor FP8 cache with random rows at ``slots`` and NaN everywhere else."""
    chosen = torch.tensor(list(slots), dtype=torch.int64)
    rows = torch.full((num_pages * page_size, d_qk), float("nan"), dtype=torch.float64)
    if name == "BF16":
        rows[chosen] = torch.randn(len(chosen), d_qk).bfloat16().double()
        flat = rows.bfloat16()
    else:
        codes, values = _draw_e4m3(len(chosen), d_qk)
        rows[chosen] = values
        raw = torch.full(rows.shape, 0x7F, dtype=torch.uint8)
        raw[chosen] = codes
        flat = raw.view(torch.float8_e4m3fn)
    return FilledCache(flat.view(num_pages, page_size, 1, d_qk), chosen.to(torch.int32), rows)

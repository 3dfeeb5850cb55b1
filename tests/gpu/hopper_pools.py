"""Paged caches for the Hopper decode kernel, bytes and pages laid out by the tests themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.cache_writers import (
    PACKED_LAYOUTS,
    RecordLayout,
    Records,
    cache_view,
    draw_records,
    page_bytes,
    put_records,
)
from tests.gpu.hopper_cases import moved
from tests.hand_records import HandRecord, read_record

# What a byte of codes can be: zeros of both signs, the largest numbers of both signs.
_EDGE_CODES = {"e4m3": (0x00, 0x80, 0x7E, 0xFE), "e2m1": (0x08, 0x80, 0x77, 0xFF, 0xF8)}
_CODE_BYTES = {"V32": 512, "V4": 448, "V41": 512, "V41_FP4": 256}


@dataclass(frozen=True)
class Geometry:
    """Where the pages of a cache stand.

    Attributes:
        pages: Number of pages.
        page_size: Tokens of a page.
        gap: Bytes between two pages beyond their padding.
        start: Byte of the storage where the first page begins.
    """

    pages: int
    page_size: int
    gap: int = 0
    start: int = 0

    @property
    def slots(self) -> int:
        return self.pages * self.page_size


MAIN = Geometry(9, 64)
EXTRA = Geometry(40, 17)


@dataclass(frozen=True)
class Pool:
    """A cache and the values [slots, d_qk] float64 in it; NaN in both where nobody wrote."""

    name: str
    cache: Tensor
    rows: Tensor

    def on(self, device: str) -> Pool:
        """The same cache, gaps between pages included, on ``device``."""
        return Pool(self.name, moved(self.cache, device), self.rows.to(device))


def layout_of(name: str) -> RecordLayout:
    """Layout of the records of a format."""
    return next(layout for layout in PACKED_LAYOUTS if layout.name == name)


def build_pool(
    name: str, geometry: Geometry, slots: Sequence[int], records: Records | None = None
) -> Pool:
    """A cache of 0xFF bytes, gaps included, with ``records`` (default: random) at ``slots``."""
    layout = layout_of(name)
    if records is None:
        records = draw_records(layout, len(slots))
    stride = page_bytes(layout, geometry.page_size) + geometry.gap
    flat = torch.full((geometry.start + geometry.pages * stride,), 0xFF, dtype=torch.uint8)
    size = (geometry.pages, geometry.page_size)
    cache = cache_view(flat, layout, *size, stride, geometry.start)
    put_records(flat, layout, geometry.page_size, stride, geometry.start, slots, records)
    rows = torch.full((geometry.slots, layout.d_qk), float("nan"), dtype=torch.float64)
    rows[torch.tensor(slots, dtype=torch.int64)] = records.rows
    return Pool(name, cache, rows)


def draw_edge_records(name: str, count: int) -> Records:
    """Records a third of whose codes are zeros of either sign or the largest numbers.

    Of unscaled dimensions a third are minus zero. The float32 scales of "V32" have 12 bits: with
    more, the kernel may round a key's product with its scale twice.
    """
    layout = layout_of(name)
    data = draw_records(layout, count).data
    scale = draw_records(layout, count).scale
    family = name.removesuffix("_INLINE")
    width = _CODE_BYTES[family]
    edges = torch.tensor(_EDGE_CODES["e2m1" if "FP4" in name else "e4m3"], dtype=torch.uint8)
    chosen = torch.rand(count, width) < 0.3
    drawn = edges[torch.randint(0, len(edges), (count, width))]
    data[:, :width] = torch.where(chosen, drawn, data[:, :width])
    if family == "V32":
        scales = (torch.rand(count, 4) * 1.5 + 0.05).view(torch.int32) & ~0xFFF
        data[:, 512:528] = scales.view(torch.uint8)
    if family in ("V32", "V4"):
        pairs = data[:, -128:].view(torch.int16)
        pairs[torch.rand(count, 64) < 0.3] = -(2**15)
    return decoded(layout, Records(data, scale, torch.empty(0)))


def minus_zeros(name: str, count: int) -> Records:
    """Records of nothing but minus zero, under ordinary scales."""
    layout = layout_of(name)
    records = draw_records(layout, count)
    family = name.removesuffix("_INLINE")
    records.data[:, : _CODE_BYTES[family]] = 0x88 if "FP4" in name else 0x80
    if family in ("V32", "V4"):
        records.data[:, -128:].view(torch.int16).fill_(-(2**15))
    return decoded(layout, records)


def decoded(layout: RecordLayout, records: Records) -> Records:
    """The same bytes with the rows that a loop over single codes reads from them."""
    bits = [
        read_record(HandRecord(bytes(data), bytes(scale)), layout)
        for data, scale in zip(records.data.tolist(), records.scale.tolist(), strict=True)
    ]
    patterns = torch.tensor(bits, dtype=torch.int32).to(torch.int16)
    return replace(records, rows=patterns.view(torch.bfloat16).double())

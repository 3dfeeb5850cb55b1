"""KV caches of any bytes: drawn records, put into pages by arithmetic, and the rows they hold.

Records are drawn as codes and scales, so every finite code occurs; what they decode to follows the
byte maps and the rule "code * scale in float32, rounded once to bfloat16". Slots that nobody
selects, and the gaps between pages, hold bytes 0xFF, which are NaN in every format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import mlacast
from tests.fuzz import numbers
from tests.fuzz.draw import Draw
from tests.fuzz.tensors import Values


@dataclass(frozen=True)
class Layout:
    """Where a format keeps its bytes: data and scale bytes of a record, and scales in a footer.

    ``tile`` is the elements under one scale, ``quantised`` those that have scales.
    """

    name: str
    d_qk: int
    data: int
    scale: int = 0
    footer: bool = False
    tile: int = 0
    quantised: int = 0

    @property
    def kv_format(self) -> mlacast.KvFormat:
        """Descriptor of the library."""
        return mlacast.KvFormat.from_name(self.name)


LAYOUTS = (
    Layout("BF16", 512, 1024),
    Layout("BF16", 576, 1152),
    Layout("FP8", 512, 512),
    Layout("FP8", 576, 576),
    Layout("V32", 576, 656, tile=128, quantised=512),
    Layout("V4", 512, 576, 8, True, 64, 448),
    Layout("V41", 512, 512, 16, True, 32, 512),
    Layout("V41_FP4", 512, 256, 32, True, 16, 512),
    Layout("V41_INLINE", 512, 512, 16, False, 32, 512),
    Layout("V41_FP4_INLINE", 512, 256, 32, False, 16, 512),
    Layout("NVFP4_384", 512, 352, 32, True, 16, 448),
)


def finite_codes(values: Values, count: int, width: int) -> Tensor:
    """e4m3 codes but NaN, of all sizes, [count, width] uint8."""
    codes = values.integers(0, 254, count, width)
    return (codes + (codes >= 127).int()).to(torch.uint8)


def _bf16_bytes(rows: Tensor) -> Tensor:
    return rows.bfloat16().contiguous().view(torch.uint8)


def draw_records(
    draw: Draw, layout: Layout, values: Values, count: int, *, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """Data [count, data] and scale bytes [count, scale] of finite records.

    ``exact``: every product of a code and its scale is a bfloat16 number.
    """
    device = values.device
    none = torch.empty((count, 0), dtype=torch.uint8, device=device)
    size = draw.choice((1.0, 0.1, 8.0))
    if layout.name == "BF16":
        return _bf16_bytes(values.normal(count, layout.d_qk) * size), none
    if layout.name == "FP8":
        return finite_codes(values, count, layout.d_qk), none
    rope = _bf16_bytes(values.normal(count, 64) * size)
    tiles = layout.quantised // layout.tile
    if layout.name == "V32":
        scales = torch.exp2(values.normal(count, tiles) * 2 - 6)
        if exact or draw.chance():
            scales = torch.exp2(torch.round(torch.log2(scales)))
        data = (finite_codes(values, count, 512), scales.view(torch.uint8), rope)
        return torch.cat(data, 1), none
    if layout.tile == 16:
        codes = values.integers(0, 256, count, layout.quantised // 2).to(torch.uint8)
        low, high = draw.choice(((32, 64), (0, 127), (1, 8)))
        scales = values.integers(low, high, count, tiles).to(torch.uint8)
    else:
        codes = finite_codes(values, count, layout.quantised)
        low, high = draw.choice(((116, 122), (105, 128), (0, 3)))
        scales = values.integers(low, high, count, tiles).to(torch.uint8)
    # Bytes behind the scales are padding: nobody may read them.
    rest = torch.full((count, layout.scale - tiles), 0xFF, dtype=torch.uint8, device=device)
    parts = [codes] if layout.quantised == 512 else [codes, rope]
    return torch.cat(parts, 1), torch.cat((scales, rest), 1)


def _to_bf16(values: Tensor) -> Tensor:
    """float32 to the nearest bfloat16 by its bits, as float64."""
    bits = values.view(torch.int32).to(torch.int64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    rounded = torch.where(rounded >= 2**31, rounded - 2**32, rounded).to(torch.int32)
    return torch.where(values.isnan(), values, rounded.view(torch.float32)).double()


def decode(layout: Layout, data: Tensor, scale: Tensor) -> Tensor:
    """Rows [count, d_qk] float64 of records."""
    if layout.name == "BF16":
        return data.contiguous().view(torch.bfloat16).double()
    if layout.name == "FP8":
        return numbers.e4m3_numbers(data)
    tiles = layout.quantised // layout.tile
    if layout.tile == 16:
        code_bytes = layout.quantised // 2
        codes = numbers.e2m1_numbers(data[:, :code_bytes])
        factors = numbers.e4m3_numbers(scale[:, :tiles])
    else:
        code_bytes = layout.quantised
        codes = numbers.e4m3_numbers(data[:, :code_bytes])
        if layout.name == "V32":
            code_bytes += 16
            factors = data[:, 512:528].contiguous().view(torch.float32).double()
        else:
            factors = numbers.ue8m0_numbers(scale[:, :tiles])
    # Seven bits times 24 are exact in float64, so float() rounds the product once.
    products = (codes * factors.repeat_interleave(layout.tile, 1)).float()
    rope = data[:, code_bytes:].contiguous().view(torch.bfloat16).double()
    return torch.cat((_to_bf16(products), rope), 1)


@dataclass(frozen=True)
class Cache:
    """A cache and what its slots hold.

    Attributes:
        layout: Its format.
        tensor: [pages, page_size, (1,) width].
        rows: [pages * page_size, d_qk] float64.
        records: Byte number, in the storage, of each byte of each slot: [slots, data + scale].
    """

    layout: Layout
    tensor: Tensor
    rows: Tensor
    records: Tensor

    @property
    def slots(self) -> int:
        """Tokens that it has room for."""
        return self.rows.shape[0]


def record_bytes(
    layout: Layout, pages: int, page_size: int, stride: int, start: int, device: torch.device
) -> Tensor:
    """Places of the bytes of each record, counted from the start of the storage."""
    slots = torch.arange(pages * page_size, device=device)
    page, token = slots // page_size, slots % page_size
    width = layout.data + layout.scale
    first = start + page * stride
    data = first + token * (layout.data if layout.footer else width)
    scale = data + layout.data
    if layout.footer:
        scale = first + page_size * layout.data + token * layout.scale
    columns = [data[:, None] + torch.arange(layout.data, device=device)]
    columns.append(scale[:, None] + torch.arange(layout.scale, device=device))
    return torch.cat(columns, 1)


def draw_cache(
    draw: Draw,
    layout: Layout,
    values: Values,
    *,
    pages: int,
    page_size: int,
    used: Tensor | None = None,
    unit: int = 1,
    fill: int = 0xFF,
    exact: bool = False,
) -> Cache:
    """A cache with records in the used slots (None for all), ``fill`` in all other bytes.

    Page stride and start are multiples of ``unit`` elements; where pages stand is a compile-time
    matter of some kernels.
    """
    device, width = values.device, layout.data + layout.scale
    size = 2 if layout.name == "BF16" else 1
    payload = page_size * width
    step = unit * size
    align = {"V4": 576, "V41": 512, "V41_FP4": 512}.get(layout.name, 1)
    if draw.fixed.chance(60):
        stride = -(-payload // align) * align
        start = 0
    else:
        # Between pages: gaps of any size.
        stride = -(-payload // step) * step + step * draw.fixed.integer(0, 5)
        start = step * draw.fixed.integer(0, 3)
    total = start + pages * stride
    total += -total % 16
    flat = torch.full((total,), fill, dtype=torch.uint8, device=device)
    slots = pages * page_size
    where = record_bytes(layout, pages, page_size, stride, start, device)
    data, scale = draw_records(draw, layout, values, slots, exact=exact)
    rows = decode(layout, data, scale)
    kept = torch.ones(slots, dtype=torch.bool, device=device) if used is None else used
    flat[where[kept]] = torch.cat((data, scale), 1)[kept]
    rows = torch.where(
        kept[:, None], rows, torch.full((), torch.nan, dtype=rows.dtype, device=device)
    )
    typed = flat
    if layout.name == "BF16":
        typed = flat.view(torch.bfloat16)
    elif layout.name == "FP8" or draw.fixed.chance(10):
        typed = flat.view(torch.float8_e4m3fn)
    shape, strides = [pages, page_size, width // size], [stride // size, width // size, 1]
    if draw.chance():
        shape.insert(2, 1)
        strides.insert(2, width // size)
    tensor = typed.as_strided(shape, strides, start // size)
    return Cache(layout, tensor, rows, where)

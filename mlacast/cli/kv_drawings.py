"""One KV cache format as a dictionary and as a picture made of text."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mlacast.descriptors.kv_format import ELEMENT_D_QK, ByteField, KvFormat

PAGE_SIZE = 64
BAR_WIDTH = 72
_COLORS = ("cyan", "magenta", "yellow", "green", "blue")


def _fields(kv_format: KvFormat, d_qk: int) -> tuple[ByteField, ...]:
    """Fields of a record of ``d_qk`` values; one of 512 values has no field for the other 64."""
    data_bytes = kv_format.record_data_bytes(d_qk)
    limits = {"data": data_bytes, "scale": kv_format.scale_bytes}
    return tuple(field for field in kv_format.byte_map if field.stop <= limits[field.plane])


def describe_kv_format(kv_format: KvFormat) -> dict[str, Any]:
    """Return every size and field of a format; sizes are given per ``d_qk``."""
    widths = (kv_format.d_qk,) if kv_format.d_qk is not None else ELEMENT_D_QK
    return {
        "name": kv_format.name,
        "placement": kv_format.placement,
        "page_align": kv_format.page_align,
        "per_d_qk": [
            {
                "d_qk": d_qk,
                "bytes_per_token": kv_format.bytes_per_token(d_qk),
                "page_size": PAGE_SIZE,
                "page_bytes": kv_format.page_bytes(PAGE_SIZE, d_qk),
                "fields": [
                    {
                        "name": field.name,
                        "plane": field.plane,
                        "start": field.start,
                        "stop": field.stop,
                        "dtype": field.dtype,
                        "note": field.note,
                    }
                    for field in _fields(kv_format, d_qk)
                ],
            }
            for d_qk in widths
        ],
    }


def bar(sizes: list[tuple[str, str, int]], width: int = BAR_WIDTH) -> Text:
    """Draw parts side by side, each as wide as its share of the bytes but at least one character.

    Args:
        sizes: (letter, colour, bytes) of each part.
        width: Characters of the whole bar, about.
    """
    total = sum(size for _, _, size in sizes)
    text = Text()
    for letter, color, size in sizes:
        text.append(letter * max(1, round(width * size / total)), style=f"black on {color}")
    return text


def _page_text(kv_format: KvFormat, d_qk: int) -> str:
    layout = kv_format.page_layout(PAGE_SIZE, d_qk)
    last = PAGE_SIZE - 1
    lines = [f"page of {PAGE_SIZE} tokens: {kv_format.page_bytes(PAGE_SIZE, d_qk)} bytes"]
    if kv_format.page_align > 1:
        lines[0] += f" ({layout.payload_bytes} rounded up to a multiple of {kv_format.page_align})"
    size, stride = layout.data_bytes, layout.data_stride
    lines.append(f"data of token t: {size} bytes at t * {stride}")
    if layout.scale_bytes:
        first, step = layout.scale_offset(0), layout.scale_stride
        end = layout.scale_offset(last) + layout.scale_bytes
        lines.append(
            f"scales of token t: {layout.scale_bytes} bytes at {first} + t * {step}"
            f" (the last ends at {end})"
        )
    return "\n".join(lines)


def draw_kv_format(kv_format: KvFormat) -> RenderableType:
    """Draw the record of a token and its place in a page."""
    d_qk = kv_format.d_qk if kv_format.d_qk is not None else ELEMENT_D_QK[-1]
    fields = _fields(kv_format, d_qk)
    table = Table("", "bytes", "size", "type", "plane", "holds", box=None, pad_edge=False)
    parts = []
    for number, field in enumerate(fields):
        letter, color = chr(ord("a") + number), _COLORS[number % len(_COLORS)]
        size = field.stop - field.start
        parts.append((letter, color, size))
        table.add_row(
            Text(letter, style=f"black on {color}"),
            f"{field.start}..{field.stop - 1}",
            str(size),
            field.dtype,
            field.plane,
            f"{field.name}: {field.note}" if field.note else field.name,
        )
    width = f"d_qk {d_qk}" if kv_format.d_qk is not None else f"drawn for d_qk {d_qk}"
    title = f"KvFormat.{kv_format.name}: {kv_format.bytes_per_token(d_qk)} bytes per token, {width}"
    where = "scales in the page's footer" if kv_format.placement == "footer" else "one piece"
    body = Group(bar(parts), table, Text(_page_text(kv_format, d_qk)))
    return Panel(body, title=title, subtitle=where, title_align="left", subtitle_align="right")

"""One output format as a dictionary and as a picture made of text, on a buffer of five tokens."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mlacast import Bf16, Fp8Group, Fp8Tensor, Mxfp8, Nvfp4, OutFormat, QuantizedTensor
from mlacast.layouts.element_order import chunk32_position
from mlacast.layouts.sf_mn_major import ceil4
from mlacast.layouts.sf_swizzled_128x4 import swizzled_offset

NUM_TOKENS, NUM_GROUPS, FEATURES = 5, 2, 1024
OUT_FORMATS: tuple[OutFormat, ...] = (
    Bf16(),
    Fp8Tensor(1.0),
    Fp8Group(128, "float32", "row_major"),
    Fp8Group(128, "float32", "mn_major"),
    Fp8Group(128, "ue8m0_packed", "mn_major"),
    Mxfp8("chunk32"),
    Nvfp4(1.0),
)


def _sample(out_format: OutFormat) -> QuantizedTensor:
    return QuantizedTensor.empty(NUM_TOKENS, NUM_GROUPS, FEATURES, out_format)


def _name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def describe_out_format(out_format: OutFormat) -> dict[str, Any]:
    """Return the static part of a format and the shapes of a small buffer in it."""
    buffer = _sample(out_format)
    sf = buffer.sf
    return {
        "name": type(out_format).__name__,
        "key": out_format.key,
        "data_dtype": _name_of(out_format.data_dtype),
        "element_order": out_format.order,
        "sf_kind": out_format.sf_kind,
        "sf_layout": out_format.sf_layout,
        "sf_dtype": None if sf is None else _name_of(sf.dtype),
        "sf_vec_size": out_format.sf_vec_size,
        "example": {
            "num_tokens": NUM_TOKENS,
            "num_groups": NUM_GROUPS,
            "features": FEATURES,
            "data_shape": list(buffer.data.shape),
            "data_strides": list(buffer.data.stride()),
            "sf_shape": None if sf is None else list(sf.shape),
            "sf_strides": None if sf is None else list(sf.stride()),
        },
    }


def _strided_map(buffer: QuantizedTensor) -> Table:
    """Element offsets of the first scale-factor words; padding rows are marked."""
    sf = buffer.sf
    assert sf is not None, "only called for formats with scale factors"
    columns = [(group, word) for group in range(NUM_GROUPS) for word in range(2)]
    table = Table("token", *(f"g{group} w{word}" for group, word in columns), title="sf element")
    rows = ceil4(NUM_TOKENS) if buffer.format.sf_layout == "mn_major" else NUM_TOKENS
    for token in range(rows):
        offsets = [
            token * sf.stride(0) + group * sf.stride(1) + word * sf.stride(2)
            for group, word in columns
        ]
        label = str(token) if token < NUM_TOKENS else "pad"
        table.add_row(label, *(str(offset) for offset in offsets))
    return table


def _swizzled_map(columns: int) -> Table:
    """Byte offsets of a few rows and columns of the 128x4 swizzle."""
    shown = (0, 1, 2, 3, 4, 5)
    table = Table("token", *(f"sf {column}" for column in shown), title="sf byte")
    for row in (0, 1, 31, 32, 64, 127, 128):
        table.add_row(str(row), *(str(swizzled_offset(row, column, columns)) for column in shown))
    return table


def _chunk32_text() -> Text:
    """Say where the first chunks of a group of two heads stand."""
    heads = FEATURES // 512
    places = [
        (chunk32_position(head, 32 * chunk, heads) // 32, f"h{head}.c{chunk}")
        for head in range(heads)
        for chunk in range(3)
    ]
    order = " ".join(name for _, name in sorted(places))
    return Text(f"32-chunks of a group of {heads} heads, in memory: {order} ...")


def draw_out_format(out_format: OutFormat) -> RenderableType:
    """Draw the data and the scale factors of a format."""
    buffer = _sample(out_format)
    sf = buffer.sf
    lines = Text(
        f"buffer of {NUM_TOKENS} tokens, {NUM_GROUPS} groups of {FEATURES} features\n"
        f"data {list(buffer.data.shape)} {_name_of(buffer.data.dtype)}"
    )
    parts: list[RenderableType] = [lines]
    if sf is not None:
        lines.append(
            f"\nsf   {list(sf.shape)} {_name_of(sf.dtype)}, strides {list(sf.stride())},"
            f" {out_format.sf_kind}, one per {out_format.sf_vec_size} features"
        )
    if out_format.order == "chunk32":
        parts.append(_chunk32_text())
    if sf is not None and out_format.sf_layout == "swizzled_128x4":
        parts.append(_swizzled_map(NUM_GROUPS * out_format.sf_words(FEATURES)))
    elif sf is not None:
        parts.append(_strided_map(buffer))
    return Panel(Group(*parts), title=repr(out_format), title_align="left")

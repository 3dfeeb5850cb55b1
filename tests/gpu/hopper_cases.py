"""Cases of the Hopper kernels: options, hostile inputs, and ranges of buffers to write into.

Every distinct combination of compile-time values costs seconds of compilation, and so does every
size that turns from a multiple of 16 into none, or into 1. So a test item is a case with all its
shapes, and the sizes here are alike in that: tokens are no multiples of 16, index columns are,
slices start at multiples of 16 bytes, and a buffer that is written to its end lacks two or three
rows to a multiple of four, which is none of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.gpu.steps import copy_storage
from tests.scenarios import draw_indices

POISON = 0x5A
BEFORE = 4
TABLE_ROWS = 97
# Rows of a longer call that are also run alone.
SOME_ROWS = slice(4, 6)
# A token without a valid index; one of them.
EMPTY_TOKEN = 4

MX = mlacast.Mxfp8("head")
MX32 = mlacast.Mxfp8("chunk32")
NVFP4 = mlacast.Nvfp4(50.0)
# Formats with padding cost a variant for each place.
ENDS = (True, True)
MIDDLE = (False, False)


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


on_hopper = [
    pytest.mark.skipif(
        not _is_hopper(), reason="needs a GPU of compute capability 9.0, which the kernel is for"
    ),
    pytest.mark.usefixtures("end_hanging_process"),
]


@dataclass(frozen=True)
class Case:
    """Options of a call that are compile-time values of its kernel.

    Attributes:
        name: Test id.
        heads: Query heads.
        out_format: Format of the output.
        groups: Groups of the output.
        pairing: RoPE pairing, or None.
        norm: With the query norm.
        sink: With sinks, of both infinities too.
        lengths: With a length for each token.
        order: Element order of the query.
        pools: Cache formats of a decode, one or two.
        places: For two shapes, whether the rows end their buffer and so own its padding.
    """

    name: str
    heads: int = 64
    out_format: mlacast.OutFormat = mlacast.Bf16()
    groups: int = 1
    pairing: str | None = None
    norm: bool = False
    sink: bool = False
    lengths: bool = False
    order: str = "head"
    pools: tuple[str, ...] = ()
    places: tuple[bool, bool] = (False, True)


def case_id(case: Case) -> str:
    """Readable parametrisation id."""
    return case.name


@dataclass(frozen=True)
class Shape:
    """Sizes of a call that are no compile-time values.

    Attributes:
        tokens: Query tokens.
        topk: Index columns.
        ends: The tokens end their buffer, so that its padding is theirs; else rows follow.
        extra_topk: Index columns of the second pool of a decode.
        num_splits: Of a decode.
    """

    tokens: int
    topk: int
    ends: bool = True
    extra_topk: int = 0
    num_splits: int | None = 1


def storage_of(tensor: Tensor) -> Tensor:
    """Every byte behind a tensor, on its device and shared with it."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage())


def poisoned_rows(case: Case, tokens: int, ends: bool, device: str) -> mlacast.QuantizedTensor:
    """Rows of a longer buffer all of whose bytes, padding and scales too, are poison."""
    total = BEFORE + tokens + (0 if ends else 3)
    features = case.heads * 512 // case.groups
    buffer = mlacast.QuantizedTensor.empty(total, case.groups, features, case.out_format, device)
    storage_of(buffer.data).fill_(POISON)
    if buffer.sf is not None:
        storage_of(buffer.sf).fill_(POISON)
    return buffer[BEFORE : BEFORE + tokens]


def inside_wider_rows(tensor: Tensor, fill: float = float("nan")) -> Tensor:
    """The same numbers as a view of rows that are 32 elements longer, ``fill`` around them."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + 32)
    wide = torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)
    view = wide[..., 16:-16]
    view.copy_(tensor)
    return view


def draw_query(case: Case, tokens: int, width: int) -> Tensor:
    """Strided queries whose rotation by `draw_rope` has one right rounding.

    In chunk16 order a token's heads leave no gaps.
    """
    queries = oracles.exact_queries(tokens, case.heads, width)
    if case.order == "chunk16":
        return inside_wider_rows(queries.flatten(1)).view(tokens, case.heads, width)
    return inside_wider_rows(queries)


def draw_hostile_indices(tokens: int, topk: int, rows: int) -> Tensor:
    """Strided indices with repeats; of the first half of the tokens many are invalid.

    Token 0 starts with a block of invalid ones, ``EMPTY_TOKEN`` has no others. Row ``rows // 2`` is
    never selected, but stands around the list. Blocks without any invalid index take another branch
    in some kernels, hence the other half.
    """
    indices = draw_indices(tokens, topk, rows, invalid=0.0)
    half = max(tokens // 2, min(tokens, 4))
    indices[:half] = draw_indices(half, topk, rows)
    indices[indices == rows // 2] = 0
    indices[0, :64] = -1
    if tokens > EMPTY_TOKEN:
        indices[EMPTY_TOKEN] = -1
    return inside_wider_rows(indices, rows // 2)


def draw_lengths(case: Case, tokens: int, topk: int) -> Tensor | None:
    """Lengths from below zero to beyond the width."""
    if not case.lengths:
        return None
    lengths = torch.randint(-3, topk + 70, (tokens,), dtype=torch.int32)
    lengths[tokens // 2] = 0
    return lengths


def draw_sink(case: Case) -> Tensor | None:
    """Finite sinks, and both infinities."""
    if not case.sink:
        return None
    sink = torch.randn(case.heads)
    sink[1:3] = torch.tensor((float("inf"), -float("inf")))
    return sink


def draw_rope(case: Case, tokens: int) -> mlacast.Rope | None:
    """A table whose products with the queries are exact; positions inside and outside of it."""
    if case.pairing is None:
        return None
    positions = torch.randint(-5, TABLE_ROWS + 5, (tokens,))
    return mlacast.Rope(oracles.exact_rope_table(TABLE_ROWS), positions, case.pairing)


def moved(tensor: Tensor, device: str) -> Tensor:
    """The tensor on ``device``, a view with everything around it."""
    return tensor if device == "cpu" else copy_storage(tensor)


def options_on(options: dict[str, Any], device: str) -> dict[str, Any]:
    """Options of a call with their tensors on ``device``."""
    result = dict(options)
    for name, value in options.items():
        if isinstance(value, Tensor):
            result[name] = moved(value, device)
        elif isinstance(value, mlacast.Rope):
            table, positions = value.cos_sin_cache.to(device), value.positions.to(device)
            result[name] = mlacast.Rope(table, positions, value.pairing)
    return result


def options_for(options: dict[str, Any], rows: slice) -> dict[str, Any]:
    """The same options for some of the tokens."""
    result = dict(options)
    for name in ("topk_length", "extra_topk_length", "extra_indices"):
        if options.get(name) is not None:
            result[name] = options[name][rows]
    rope = options["rope"]
    if rope is not None:
        result["rope"] = mlacast.Rope(rope.cos_sin_cache, rope.positions[rows], rope.pairing)
    return result


def spoil_query(q: Tensor) -> Tensor:
    """The same queries with NaN for the empty token."""
    spoilt = q.clone(memory_format=torch.preserve_format)
    spoilt[EMPTY_TOKEN] = float("nan")
    return spoilt


def spoil_angles(options: dict[str, Any]) -> dict[str, Any]:
    """The same options with NaN in the row of the table that the empty token alone points at."""
    rope, row = options["rope"], TABLE_ROWS // 2
    positions = torch.where(rope.positions == row, row + 1, rope.positions)
    positions[EMPTY_TOKEN] = row
    table = rope.cos_sin_cache.clone()
    table[row] = float("nan")
    return options | {"rope": mlacast.Rope(table, positions, rope.pairing)}

"""The 128x4 swizzle of one-byte scale factors that block-scaled tensor-core GEMMs read.

A logical [M, C] grid is padded to [ceil128(M), ceil4(C)] and cut into tiles of 128 rows by 4
columns, 512 bytes each, in row-major order of tiles. Inside a tile, row r and column c stand at
byte ``(r % 32) * 16 + (r // 32) * 4 + c``. A row is scattered over its tile, so a token range can
only be addressed in the whole buffer.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from mlacast.errors import fail

Index = TypeVar("Index", int, Tensor)


def swizzled_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the padded shape (rows to a multiple of 128, columns to a multiple of 4)."""
    return (rows + 127) // 128 * 128, (columns + 3) // 4 * 4


def swizzled_offset(row: Index, column: Index, num_columns: int) -> Index:
    """Return the byte that holds (row, column); ints or broadcastable integer tensors.

    Args:
        row: Absolute row of the buffer.
        column: Column, below ``num_columns``.
        num_columns: Columns of the logical grid, padded or not.
    """
    column_tiles = (num_columns + 3) // 4
    tile = row // 128 * column_tiles + column // 4
    return tile * 512 + row % 32 * 16 + row // 32 % 4 * 4 + column % 4


def _check_rows(op: str, buffer: Tensor, row_start: int, num_rows: int, columns: int) -> None:
    if buffer.element_size() != 1 or buffer.dim() != 2 or not buffer.is_contiguous():
        actual = f"shape {list(buffer.shape)}, strides {buffer.stride()}, {buffer.dtype}"
        fail(op, "buffer", "be a contiguous 2-D tensor of one-byte elements", actual)
    if row_start < 0:
        fail(op, "row_start", "be at least 0", row_start)
    rows, width = swizzled_shape(row_start + num_rows, columns)
    if buffer.shape[0] % 128 or buffer.shape[0] < rows or buffer.shape[1] != width:
        requirement = f"have shape [multiple of 128 and at least {rows}, {width}]"
        fail(op, "buffer", requirement, list(buffer.shape))


def _offsets(buffer: Tensor, row_start: int, num_rows: int, columns: int) -> Tensor:
    """Return [num_rows, columns] int64 byte offsets."""
    row = torch.arange(row_start, row_start + num_rows, device=buffer.device)
    column = torch.arange(columns, device=buffer.device)
    return swizzled_offset(row[:, None], column[None, :], columns)


def scatter_swizzled(buffer: Tensor, values: Tensor, row_start: int) -> None:
    """Write ``values`` [n, C] to rows ``row_start .. row_start + n`` of a swizzled buffer.

    Args:
        buffer: [ceil128(M), ceil4(C)] contiguous, one-byte dtype, changed in place.
        values: [n, C] one-byte dtype.
        row_start: First absolute row; any row.

    Raises:
        ValueError: A buffer that is too small, not contiguous or not of bytes; values of another
            kind.
    """
    if values.dim() != 2 or values.element_size() != 1:
        actual = f"shape {list(values.shape)} of {values.dtype}"
        fail("scatter_swizzled", "values", "be a 2-D tensor of one-byte elements", actual)
    num_rows, columns = values.shape
    _check_rows("scatter_swizzled", buffer, row_start, num_rows, columns)
    flat = buffer.view(torch.uint8).view(-1)
    offsets = _offsets(buffer, row_start, num_rows, columns).reshape(-1)
    flat[offsets] = values.contiguous().view(torch.uint8).reshape(-1)


def gather_swizzled(buffer: Tensor, row_start: int, num_rows: int, columns: int) -> Tensor:
    """Read rows ``row_start .. row_start + num_rows`` of a swizzled buffer as [num_rows, columns].

    Raises:
        ValueError: A buffer that is too small, not contiguous or not of bytes.
    """
    _check_rows("gather_swizzled", buffer, row_start, num_rows, columns)
    flat = buffer.view(torch.uint8).view(-1)
    return flat[_offsets(buffer, row_start, num_rows, columns)].view(buffer.dtype)


def to_swizzled_128x4(linear: Tensor) -> Tensor:
    """Return a [M, C] grid of bytes as a new buffer [ceil128(M), ceil4(C)], padding zero."""
    rows, columns = linear.shape
    shape = swizzled_shape(rows, columns)
    buffer = torch.zeros(shape, dtype=torch.uint8, device=linear.device)
    scatter_swizzled(buffer, linear, 0)
    return buffer.view(linear.dtype)


def from_swizzled_128x4(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """Return the logical [rows, columns] grid of a swizzled buffer, padding cropped."""
    return gather_swizzled(buffer, 0, rows, columns)

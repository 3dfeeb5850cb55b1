"""128x4 swizzled scales: golden offsets, a bijection on the padded grid, zero padding, any row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlacast.layouts.sf_swizzled_128x4 import (
    from_swizzled_128x4,
    gather_swizzled,
    scatter_swizzled,
    swizzled_offset,
    swizzled_shape,
    to_swizzled_128x4,
)

ROWS = (0, 1, 5, 31, 32, 33, 127, 128, 129, 300, 513)
COLUMNS = (1, 4, 30, 32, 96)


def hand_offset(row: int, column: int, columns: int) -> int:
    """The formula as the consumers of the layout state it."""
    tiles = (columns + 3) // 4
    in_tile = (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
    return ((row // 128) * tiles + column // 4) * 512 + in_tile


def hand_swizzle(linear: torch.Tensor) -> torch.Tensor:
    """Pad, cut into tiles of 4 x 32 rows by 4 columns, bring the 32 rows before the quarters."""
    rows, columns = linear.shape
    padded_rows, padded_columns = -(-rows // 128) * 128, -(-columns // 4) * 4
    padded = torch.zeros(padded_rows, padded_columns, dtype=torch.uint8)
    padded[:rows, :columns] = linear
    tiles = padded.reshape(padded_rows // 128, 4, 32, padded_columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_columns)


def random_bytes(rows: int, columns: int) -> torch.Tensor:
    """uint8 [rows, columns], no zeros, so that padding can be told from entries."""
    return torch.randint(1, 256, (rows, columns), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("row", "column", "offset"),
    [
        (0, 0, 0),
        (1, 0, 16),
        (0, 1, 1),
        (0, 3, 3),
        (0, 4, 512),
        (4, 31, 3651),
        (31, 0, 496),
        (32, 0, 4),
        (64, 0, 8),
        (127, 0, 508),
        (128, 0, 4096),
        (129, 5, 4096 + 512 + 16 + 1),
    ],
)
def test_golden_offsets_of_32_columns(row: int, column: int, offset: int) -> None:
    assert swizzled_offset(row, column, 32) == offset


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_shape(rows: int, columns: int) -> None:
    shape = swizzled_shape(rows, columns)
    assert shape == (-(-rows // 128) * 128, -(-columns // 4) * 4)


def test_golden_shapes() -> None:
    assert swizzled_shape(5, 32) == (128, 32)
    assert swizzled_shape(128, 32) == (128, 32)
    assert swizzled_shape(129, 96) == (256, 96)
    assert swizzled_shape(0, 32) == (0, 32)
    assert swizzled_shape(1, 30) == (128, 32)


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (256, 32), (384, 12)])
def test_offsets_are_a_bijection_on_the_padded_grid(rows: int, columns: int) -> None:
    offsets = [
        swizzled_offset(row, column, columns) for row in range(rows) for column in range(columns)
    ]
    assert sorted(offsets) == list(range(rows * columns))


def test_offsets_of_tensors() -> None:
    rows = torch.arange(300)[:, None]
    columns = torch.arange(30)[None]
    expected = [[hand_offset(row, column, 30) for column in range(30)] for row in range(300)]
    assert swizzled_offset(rows, columns, 30).tolist() == expected


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_map_and_inverse(rows: int, columns: int) -> None:
    linear = random_bytes(rows, columns)
    buffer = to_swizzled_128x4(linear)
    assert buffer.dtype == torch.uint8
    assert buffer.is_contiguous()
    assert torch.equal(buffer, hand_swizzle(linear))
    assert torch.equal(from_swizzled_128x4(buffer, rows, columns), linear)


def test_golden_bytes_of_five_rows(poisoned_empty: None) -> None:
    linear = random_bytes(5, 32)
    raw = to_swizzled_128x4(linear).flatten().tolist()
    assert len(raw) == 4096
    for row in range(5):
        for column in range(32):
            assert raw[hand_offset(row, column, 32)] == linear[row, column]
    assert sum(byte == 0 for byte in raw) == 4096 - 160


def test_column_padding_is_zero(poisoned_empty: None) -> None:
    buffer = to_swizzled_128x4(random_bytes(129, 30)).flatten()
    assert int((buffer != 0).sum()) == 129 * 30
    padding = [hand_offset(row, column, 30) for row in range(129) for column in (30, 31)]
    assert bool((buffer[padding] == 0).all())


def test_float8_scales_keep_their_dtype() -> None:
    linear = random_bytes(130, 8)
    buffer = to_swizzled_128x4(linear.view(torch.float8_e4m3fn))
    assert buffer.dtype == torch.float8_e4m3fn
    assert torch.equal(buffer.view(torch.uint8), hand_swizzle(linear))
    back = from_swizzled_128x4(buffer, 130, 8)
    assert back.dtype == torch.float8_e4m3fn
    assert torch.equal(back.view(torch.uint8), linear)


@pytest.mark.parametrize("row_start", [0, 1, 3, 31, 32, 100, 126, 127, 128, 250])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 33, 140])
def test_scatter_writes_its_rows_only(row_start: int, rows: int) -> None:
    total, columns = 400, 12
    values = random_bytes(rows, columns)
    buffer = torch.full(swizzled_shape(total, columns), 0x5A, dtype=torch.uint8)
    scatter_swizzled(buffer, values, row_start)
    expected = torch.full((buffer.numel(),), 0x5A, dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            expected[hand_offset(row_start + row, column, columns)] = values[row, column]
    assert torch.equal(buffer.flatten(), expected)
    assert torch.equal(gather_swizzled(buffer, row_start, rows, columns), values)


def test_scatter_of_disjoint_rows_makes_the_whole() -> None:
    linear = random_bytes(300, 32)
    buffer = torch.zeros(swizzled_shape(300, 32), dtype=torch.uint8)
    for start, stop in [(129, 300), (0, 7), (7, 129)]:
        scatter_swizzled(buffer, linear[start:stop], start)
    assert torch.equal(buffer, to_swizzled_128x4(linear))


def test_scatter_and_gather_float8() -> None:
    values = random_bytes(5, 4)
    buffer = torch.zeros(256, 4, dtype=torch.float8_e4m3fn)
    scatter_swizzled(buffer, values.view(torch.float8_e4m3fn), 126)
    assert torch.equal(gather_swizzled(buffer.view(torch.uint8), 126, 5, 4), values)
    assert torch.equal(gather_swizzled(buffer, 126, 5, 4).view(torch.uint8), values)


def test_rows_past_the_buffer_are_refused_and_nothing_is_written() -> None:
    buffer = torch.full((128, 4), 0x5A, dtype=torch.uint8)
    with pytest.raises(ValueError, match="128"):
        scatter_swizzled(buffer, random_bytes(5, 4), 124)
    assert bool((buffer == 0x5A).all())
    with pytest.raises(ValueError, match="128"):
        gather_swizzled(buffer, 124, 5, 4)
    with pytest.raises(ValueError, match="128"):
        from_swizzled_128x4(buffer, 129, 4)


def test_a_buffer_with_other_columns_is_refused() -> None:
    buffer = torch.full((128, 4), 0x5A, dtype=torch.uint8)
    with pytest.raises(ValueError, match="4"):
        scatter_swizzled(buffer, random_bytes(5, 8), 0)
    assert bool((buffer == 0x5A).all())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 260), st.integers(1, 20), st.integers(0, 2**31))
def test_round_trip_of_any_shape(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    linear = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    buffer = to_swizzled_128x4(linear)
    assert buffer.shape == swizzled_shape(rows, columns)
    assert torch.equal(from_swizzled_128x4(buffer, rows, columns), linear)

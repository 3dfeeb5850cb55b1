"""Rope: width, dtype, strides and device of the table; the positions; the pairing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mlacast.descriptors.rope import Rope


def table(rows: int = 100, width: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A cos/sin table of this shape and dtype."""
    return torch.zeros(rows, width, dtype=dtype)


def positions(count: int = 3, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Positions 0, 1, 2, ..."""
    return torch.arange(count).to(dtype)


def check(rope: Rope, s_q: int = 3) -> None:
    """Run the check of a call with s_q query tokens."""
    sizes: dict[str, Any] = {"s_q": s_q}
    rope.check("some_op", sizes)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_good_arguments(dtype: torch.dtype, pairing: str) -> None:
    check(Rope(table(), positions(dtype=dtype), pairing))
    check(Rope(table(1), positions(dtype=dtype), pairing))
    check(Rope(table(), positions(0, dtype), pairing), s_q=0)


def test_the_default_pairing_is_interleaved_and_the_value_is_frozen() -> None:
    rope = Rope(table(), positions())
    assert rope.pairing == "interleaved"
    with pytest.raises(dataclasses.FrozenInstanceError):
        rope.pairing = "half"  # type: ignore[misc]


def test_rows_may_be_strided() -> None:
    check(Rope(table(width=96)[:, 32:], positions()))
    check(Rope(table()[::2], positions(6)[::2]))


@pytest.mark.parametrize("width", [8, 32, 63, 65, 128])
def test_other_widths_name_64(width: int) -> None:
    pattern = rf"^some_op: .*cos_sin_cache must .*64.*got .*\b{width}\b"
    with pytest.raises(ValueError, match=pattern):
        check(Rope(table(width=width), positions()))


@pytest.mark.parametrize("shape", [(64,), (2, 100, 64)], ids=str)
def test_rank_of_the_table(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^some_op: .*cos_sin_cache must .*64.*got "):
        check(Rope(torch.zeros(shape), positions()))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32], ids=str
)
def test_other_table_dtypes_name_float32(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"^some_op: .*cos_sin_cache must .*float32, got {name}"):
        check(Rope(table(dtype=dtype), positions()))


def test_last_dimension_of_the_table_must_be_contiguous() -> None:
    for strided in (table(width=128)[:, ::2], torch.zeros(64, 100).t()):
        with pytest.raises(ValueError, match=r"^some_op: .*cos_sin_cache must .*stride"):
            check(Rope(strided, positions()))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8, torch.bool], ids=str
)
def test_other_position_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"^some_op: .*positions must .*int32.*int64.*got "):
        check(Rope(table(), positions(dtype=dtype)))


def test_one_position_for_each_query_token() -> None:
    for count in (0, 2, 4):
        with pytest.raises(
            ValueError, match=rf"^some_op: .*positions must .*s_q=3.*got \[{count}\]"
        ):
            check(Rope(table(), positions(count)))
    with pytest.raises(ValueError, match=r"^some_op: .*positions must .*got \[3, 1\]"):
        check(Rope(table(), positions()[:, None]))


def test_table_and_positions_on_one_device() -> None:
    with pytest.raises(ValueError, match=r"^some_op: .*positions must be on cpu.*got meta"):
        check(Rope(table(), positions().to("meta")))
    sizes: dict[str, Any] = {"s_q": 3}
    with pytest.raises(ValueError, match=r"^some_op: .*cos_sin_cache must be on meta.*got cpu"):
        Rope(table(), positions()).check("some_op", sizes, torch.device("meta"))


@pytest.mark.parametrize("pairing", ["neox", "Interleaved", "", None])
def test_unknown_pairing(pairing: Any) -> None:
    with pytest.raises(ValueError, match=r"pairing must be .*interleaved.*half.*got "):
        check(Rope(table(), positions(), pairing))


@pytest.mark.parametrize("stray", [None, [0, 1, 2], 3], ids=str)
def test_no_tensors(stray: Any) -> None:
    with pytest.raises(TypeError, match=r"cos_sin_cache must be a torch\.Tensor, got"):
        check(Rope(stray, positions()))
    with pytest.raises(TypeError, match=r"positions must be a torch\.Tensor, got"):
        check(Rope(table(), stray))


def test_values_are_not_read() -> None:
    """Kernels clamp positions outside the table; the check must not synchronise to see them."""
    check(Rope(table(), torch.tensor([-1, 100, 2**31 - 1], dtype=torch.int32)))
    meta = Rope(table().to("meta"), positions().to("meta"))
    check(meta)

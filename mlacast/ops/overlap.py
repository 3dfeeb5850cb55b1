"""Detect outputs that share memory with an input or with each other, before anything is written."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from mlacast.errors import fail


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    extent = sum(
        (size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return start, start + (extent + 1) * tensor.element_size()


def _row_window(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Bytes of the outer step and of one outer row, or None where rows are not apart."""
    strides = [
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1
    ]
    if not strides:
        return None
    step = max(strides)[0] * tensor.element_size()
    row = sum((size - 1) * stride for stride, size in sorted(strides)[:-1]) + 1
    row_bytes = row * tensor.element_size()
    return (step, row_bytes) if row_bytes <= step else None


def overlaps(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two views share a byte.

    Exact for disjoint ranges and for row-interleaved views with the same row step (columns of one
    wider buffer); other interleavings of intersecting ranges count as overlapping.
    """
    if first.numel() == 0 or second.numel() == 0 or first.device != second.device:
        return False
    first_start, first_stop = _byte_range(first)
    second_start, second_stop = _byte_range(second)
    if first_stop <= second_start or second_stop <= first_start:
        return False
    first_rows, second_rows = _row_window(first), _row_window(second)
    if first_rows is None or second_rows is None or first_rows[0] != second_rows[0]:
        return True
    step = first_rows[0]
    gap = (second_start - first_start) % step
    return gap < first_rows[1] or gap + second_rows[1] > step


def check_no_overlap(
    op: str,
    outputs: Sequence[tuple[str, torch.Tensor | None]],
    inputs: Sequence[tuple[str, torch.Tensor | None]],
) -> None:
    """Raise ValueError if an output shares memory with an input or with another output."""
    present = [(name, tensor) for name, tensor in outputs if tensor is not None]
    read = [(name, tensor) for name, tensor in inputs if tensor is not None]
    for (name, output), (other_name, other) in itertools.chain(
        itertools.product(present, read), itertools.combinations(present, 2)
    ):
        if overlaps(output, other):
            fail(op, name, f"not share memory with {other_name}", "overlapping memory")

"""Detect outputs that share memory with an input or with each other, before anything is written."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mlacast.errors import fail

# Beyond this many runs a pair with intersecting ranges counts as overlapping without a closer look.
_MAX_RUNS = 1 << 24


class _Span(NamedTuple):
    """A view as addresses: from ``start`` up to ``stop``, in runs of ``run`` contiguous bytes.

    ``dims`` holds stride in bytes and size of the dimensions that place the runs, ascending.
    """

    device: torch.device
    start: int
    stop: int
    dims: list[tuple[int, int]]
    run: int


def _span(tensor: torch.Tensor) -> _Span:
    dims = sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1 and stride > 0
    )
    run = 1
    while dims and dims[0][0] <= run:
        stride, size = dims.pop(0)
        run += (size - 1) * stride
    itemsize = tensor.element_size()
    dims = [(stride * itemsize, size) for stride, size in dims]
    start, run = tensor.data_ptr(), run * itemsize
    return _Span(tensor.device, start, start + sum(s * (n - 1) for s, n in dims) + run, dims, run)


def _starts(first: int, dims: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Ascending start addresses of the runs, on the host."""
    starts = torch.tensor([first], dtype=torch.int64, device="cpu")
    for stride, size in dims:
        steps = torch.arange(size, dtype=torch.int64, device="cpu") * stride
        starts = (starts[:, None] + steps[None, :]).flatten()
    return starts.sort().values


def _never_meet(first: _Span, second: _Span) -> bool:
    """Whether two views are different columns of rows of one width.

    If all strides are multiples of the smallest, every run of a view stands at the same place
    between two multiples of it, and it is enough to compare two of them.
    """
    strides = [stride for stride, _ in (*first.dims, *second.dims)]
    if not strides:
        return False
    width = min(strides)
    if any(stride % width for stride in strides):
        return False
    place = (second.start - first.start) % width
    return first.run <= place and place + second.run <= width


def overlaps(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two views share a byte.

    Ranges of addresses decide nearly every case, and the place in a row most others: columns of one
    wider buffer. Where neither does, all runs of contiguous bytes are compared. Only addresses are
    looked at, on the host; nothing synchronises.
    """
    if first.numel() == 0 or second.numel() == 0:
        return False
    return _share_a_byte(_span(first), _span(second))


def _share_a_byte(first: _Span, second: _Span) -> bool:
    if first.stop <= second.start or second.stop <= first.start or first.device != second.device:
        return False
    if _never_meet(first, second):
        return False
    counts = [1, 1]
    for side, span in enumerate((first, second)):
        for _, size in span.dims:
            counts[side] *= size
    if max(counts) > _MAX_RUNS:
        return True
    starts, others = _starts(first.start, first.dims), _starts(second.start, second.dims)
    # For each run of the second view: the last run of the first that starts at or before it must
    # end before it, and the next one must start after it ends.
    after = torch.searchsorted(starts, others, right=True)
    before_stops = starts[(after - 1).clamp(min=0)] + first.run
    hit_before = (after > 0) & (before_stops > others)
    next_starts = starts[after.clamp(max=starts.shape[0] - 1)]
    hit_after = (after < starts.shape[0]) & (next_starts < others + second.run)
    return bool((hit_before | hit_after).any())


def check_apart(op: str, argument: str, output: torch.Tensor) -> None:
    """Raise ValueError if two elements of an output may be the same memory.

    Each dimension has to step over all that the ones with smaller steps reach: wider rows,
    transposed heads and pages with gaps do.
    """
    if output.numel() == 0:
        return
    reach = 1
    for stride, size in sorted(zip(output.stride(), output.shape, strict=True)):
        if size > 1 and stride < reach:
            actual = f"strides {list(output.stride())} for shape {list(output.shape)}"
            fail(op, argument, "have each element in memory of its own", actual)
        reach += (size - 1) * stride


def check_no_overlap(
    op: str,
    outputs: Sequence[tuple[str, torch.Tensor | None]],
    inputs: Sequence[tuple[str, torch.Tensor | None]],
) -> None:
    """Raise ValueError if an output shares memory with an input or with another output."""
    present, read = (
        [(name, _span(tensor)) for name, tensor in part if tensor is not None and tensor.numel()]
        for part in (outputs, inputs)
    )
    for (name, output), (other_name, other) in itertools.chain(
        itertools.product(present, read), itertools.combinations(present, 2)
    ):
        if _share_a_byte(output, other):
            fail(op, name, f"not share memory with {other_name}", "overlapping memory")

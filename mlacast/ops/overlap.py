"""Detect outputs that share memory with an input or with each other, before anything is written."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from mlacast.errors import fail

# Beyond this many runs a pair with intersecting ranges counts as overlapping without a closer look.
_MAX_RUNS = 1 << 24


def _runs(tensor: torch.Tensor) -> tuple[list[tuple[int, int]], int]:
    """Describe a view as runs of bytes: the (stride, size) of their starts, and bytes per run."""
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
    return [(stride * itemsize, size) for stride, size in dims], run * itemsize


def _starts(first: int, dims: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Ascending start addresses of the runs, on the host."""
    starts = torch.tensor([first], dtype=torch.int64, device="cpu")
    for stride, size in dims:
        steps = torch.arange(size, dtype=torch.int64, device="cpu") * stride
        starts = (starts[:, None] + steps[None, :]).flatten()
    return starts.sort().values


def overlaps(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two views share a byte.

    Ranges of addresses decide nearly every case. Where they intersect, the runs of contiguous bytes
    are compared, so interleaved views (columns of one wider buffer) are told apart from overlaps.
    Only addresses are looked at, on the host; nothing synchronises.
    """
    if first.numel() == 0 or second.numel() == 0 or first.device != second.device:
        return False
    first_dims, first_run = _runs(first)
    second_dims, second_run = _runs(second)
    first_start, second_start = first.data_ptr(), second.data_ptr()
    first_stop = first_start + sum(s * (n - 1) for s, n in first_dims) + first_run
    second_stop = second_start + sum(s * (n - 1) for s, n in second_dims) + second_run
    if first_stop <= second_start or second_stop <= first_start:
        return False
    counts = [1, 1]
    for side, dims in enumerate((first_dims, second_dims)):
        for _, size in dims:
            counts[side] *= size
    if max(counts) > _MAX_RUNS:
        return True
    starts, others = _starts(first_start, first_dims), _starts(second_start, second_dims)
    # For each run of the second view: the last run of the first that starts at or before it must
    # end before it, and the next one must start after it ends.
    after = torch.searchsorted(starts, others, right=True)
    before_stops = starts[(after - 1).clamp(min=0)] + first_run
    hit_before = (after > 0) & (before_stops > others)
    next_starts = starts[after.clamp(max=starts.shape[0] - 1)]
    hit_after = (after < starts.shape[0]) & (next_starts < others + second_run)
    return bool((hit_before | hit_after).any())


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

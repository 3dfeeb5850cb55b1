"""Range, mean and non-finite counts of a tensor, for level 5."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# float64 copies of one piece are all the memory that a cache of many GiB costs.
_PIECE = 1 << 22


def statistics_of(tensor: Tensor) -> str:
    """Say minimum, maximum and mean of the finite elements, and how many are NaN and infinite.

    Reads the data, so it waits for the device.

    Args:
        tensor: Any dtype that torch converts to float64; codes count as the numbers they encode,
            packed FP4 and scale bytes as integers.
    """
    if tensor.numel() == 0:
        return "empty"
    try:
        low, high, total, finite, nan, inf = _sums(tensor)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        return f"no statistics: {str(error).splitlines()[0]}"
    counts = f"nan {nan} inf {inf}"
    if finite == 0:
        return f"no finite element {counts}"
    return f"min {low:.6g} max {high:.6g} mean {total / finite:.6g} {counts}"


def _sums(tensor: Tensor) -> tuple[float, float, float, int, int, int]:
    low, high, total = float("inf"), float("-inf"), 0.0
    finite = nan = inf = 0
    for piece in _pieces(tensor):
        # FP8 has no direct conversion to float64 on every device.
        values = piece.float().double() if piece.element_size() == 1 else piece.double()
        is_nan, is_inf = values.isnan(), values.isinf()
        is_out = is_nan | is_inf
        facts = torch.stack(
            [
                values.masked_fill(is_out, float("inf")).min(),
                values.masked_fill(is_out, float("-inf")).max(),
                values.masked_fill(is_out, 0.0).sum(),
                is_nan.sum().double(),
                is_inf.sum().double(),
            ]
        ).tolist()
        low, high, total = min(low, facts[0]), max(high, facts[1]), total + facts[2]
        nan, inf = nan + int(facts[3]), inf + int(facts[4])
        finite += piece.numel() - int(facts[3]) - int(facts[4])
    return low, high, total, finite, nan, inf


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Split along the longest dimension until the pieces are small; nothing is copied."""
    if tensor.numel() <= _PIECE:
        yield tensor
        return
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    for half in tensor.chunk(2, dim=longest):
        yield from _pieces(half)

"""Tensors of a drawn call: values by seed, views of wider memory, bytes that must stay."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.fuzz.draw import Draw

POISON = 0x5A
INT32 = torch.int32
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


class Values:
    """Random tensors on a device, by seed."""

    def __init__(self, draw: Draw, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device)
        self._generator.manual_seed(draw.seed())

    def normal(self, *shape: int) -> Tensor:
        """float32."""
        return torch.randn(shape, generator=self._generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        """float32 in [0, 1)."""
        return torch.rand(shape, generator=self._generator, device=self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = INT32) -> Tensor:
        """Numbers from ``low`` up to, without, ``high``."""
        return torch.randint(
            low, high, shape, generator=self._generator, device=self.device, dtype=dtype
        )

    def permutation(self, count: int) -> Tensor:
        """The numbers below ``count``, int64."""
        return torch.randperm(count, generator=self._generator, device=self.device)


def raw(tensor: Tensor) -> Tensor:
    """Every byte behind a tensor, shared with it."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def poison(dtype: torch.dtype) -> float | int:
    """What nobody may read: NaN, or a number that is no index of anything."""
    return math.nan if dtype.is_floating_point else INT_MAX - 7


def embed(draw: Draw, values: Tensor, *, unit: int = 1, permute: bool = True) -> Tensor:
    """The same numbers as a view of wider memory, its last dimension contiguous.

    Leading dimensions may lie in another order and further apart; ``unit`` divides all distances.
    What lies between is ``poison``. Layout is a compile-time choice of many kernels.
    """
    layout = draw.fixed.integer(0, 3)
    if layout == 0 or values.dim() == 0:
        return values.contiguous()
    front = unit * draw.fixed.integer(0, 2)
    back = unit * draw.fixed.integer(0, 2)
    lead = list(range(values.dim() - 1))
    order = lead[::-1] if layout == 3 and permute else lead
    more = [draw.fixed.integer(0, 1) for _ in order]
    sizes = [values.shape[dim] + extra for dim, extra in zip(order, more, strict=True)]
    wide = torch.full(
        (*sizes, front + values.shape[-1] + back),
        poison(values.dtype),
        dtype=torch.float32 if values.dtype.itemsize == 1 else values.dtype,
        device=values.device,
    ).to(values.dtype)
    view = wide
    for at, dim in enumerate(order):
        view = view.narrow(at, more[at], values.shape[dim])
    view = view.narrow(len(order), front, values.shape[-1])
    view = view.permute(*[order.index(dim) for dim in lead], len(order))
    view.copy_(values)
    return view


def embed_ints(draw: Draw, values: Tensor) -> Tensor:
    """Integers as a view of wider rows at any place; nothing is compiled for that."""
    if not draw.chance(40) or values.dim() == 0:
        return values.contiguous()
    front, back = draw.integer(0, 3), draw.integer(0, 3)
    wide = torch.full(
        (*values.shape[:-1], front + values.shape[-1] + back),
        poison(values.dtype),
        dtype=values.dtype,
        device=values.device,
    )
    view = wide.narrow(-1, front, values.shape[-1])
    view.copy_(values)
    return view


def lengths_for(draw: Draw, count: int, width: int, device: torch.device) -> Tensor:
    """int32 lengths [count]: nothing, one, all, more than all, and numbers that are no lengths."""
    special = (width, 0, 1, width // 2, width + 1, width + 70, -1, INT_MAX, INT_MIN)
    lengths = [
        draw.choice(special) if draw.chance() else draw.integer(0, width) for _ in range(count)
    ]
    return torch.tensor(lengths, dtype=INT32, device=device)


def draw_indices(draw: Draw, values: Values, tokens: int, width: int, rows: int) -> Tensor:
    """int32 [tokens, width]: rows, numbers that are none, repeats, runs and tiles of nothing."""
    shape = (tokens, width)
    pattern = draw.choice(("any", "any", "sorted", "one", "page", "ascending"))
    top = max(rows, 1)
    indices = values.integers(0, top, *shape)
    if pattern == "one":
        indices = indices[:, :1].expand(shape).clone() if width else indices
    elif pattern == "page":
        first = draw.integer(0, top - 1)
        indices = (first + values.integers(0, min(8, top), *shape)) % top
    elif pattern == "ascending":
        steps = torch.arange(width, device=values.device, dtype=INT32)
        indices = (values.integers(0, top, tokens, 1) + steps) % top
    if pattern == "sorted":
        indices = indices.sort(dim=1).values
    if rows == 0 or draw.chance(60):
        none = torch.tensor(
            [-1, INT_MIN, INT_MAX, rows, rows + 1, -rows - 1], dtype=INT32, device=values.device
        )
        share = 1.0 if rows == 0 else draw.choice((0.2, 0.02, 0.8, 0.5))
        where = values.uniform(*shape) < share
        indices = torch.where(where, none[values.integers(0, 6, *shape).long()], indices)
    if tokens and width:
        for _ in range(draw.integer(0, 2)):
            # A whole tile without anything, whatever the size of a kernel's tiles.
            row, start = draw.integer(0, tokens - 1), draw.choice((0, 0, 16, 32, 64))
            indices[row, start : start + draw.choice((64, 16, 128, 1, 10**6))] = -1
    return embed_ints(draw, indices.contiguous())


def valid_entries(indices: Tensor, lengths: Tensor | None, rows: int) -> Tensor:
    """Bool [tokens, width]: which entries count."""
    valid = (indices >= 0) & (indices.long() < rows)
    if lengths is not None:
        columns = torch.arange(indices.shape[1], device=indices.device)
        valid &= columns[None] < lengths.long()[:, None]
    return valid


def used_rows(indices: Tensor, valid: Tensor, rows: int) -> Tensor:
    """Bool [rows]: which rows any entry names."""
    used = torch.zeros(rows, dtype=torch.bool, device=indices.device)
    used[indices[valid].long()] = True
    return used


def forget(rows: Tensor, used: Tensor) -> Tensor:
    """The rows with NaN in those that nobody names."""
    return torch.where(used[:, None], rows, torch.full((), math.nan, device=rows.device)).to(
        rows.dtype
    )


def snapshot(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Copies of every byte behind the tensors."""
    return [raw(tensor).clone() for tensor in tensors if tensor is not None]


def assert_unchanged(tensors: Sequence[Tensor | None], before: Sequence[Tensor]) -> None:
    """Every byte behind the tensors is what it was."""
    present = [tensor for tensor in tensors if tensor is not None]
    for tensor, old in zip(present, before, strict=True):
        changed = int((raw(tensor) != old).sum())
        assert changed == 0, f"{changed} bytes changed of a tensor that nobody writes"

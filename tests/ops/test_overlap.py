"""Overlap of strided views, against sets of byte addresses."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from mlacast.ops import overlap


def _addresses(view: Tensor) -> set[int]:
    """Every byte of a view."""
    index = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        index = (index[:, None] + torch.arange(size) * stride).flatten()
    first = view.data_ptr() + index * view.element_size()
    return set((first[:, None] + torch.arange(view.element_size())).flatten().tolist())


def _draw(buffer: Tensor, random_number: random.Random) -> Tensor:
    """Rows of a few heads at strides that are multiples of each other, or not."""
    flat = buffer.view(random_number.choice([torch.uint8, torch.int16]))
    width = random_number.choice([1, 2, 3, 8, 16])
    stride = random_number.choice([12, 16, 24, 32])
    heads, rows = random_number.choice([1, 2, 3]), random_number.choice([1, 2, 5])
    row_stride = random_number.choice([stride * heads, stride * (heads + 1), stride * 3, 50])
    return flat.as_strided(
        (rows, heads, width), (row_stride, stride, 1), random_number.randint(0, 60)
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_views(seed: int) -> None:
    random_number = random.Random(seed)
    buffer = torch.zeros(4000, dtype=torch.uint8)
    answers = []
    for _ in range(150):
        first, second = (_draw(buffer, random_number) for _ in range(2))
        answers.append(bool(_addresses(first) & _addresses(second)))
        assert overlap.overlaps(first, second) == answers[-1], (first.stride(), second.stride())
    assert 20 < sum(answers) < 130, "both answers have to occur"


def test_columns_are_told_apart_without_looking_at_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With more rows than are ever compared one by one, everything else counts as overlapping."""
    monkeypatch.setattr(overlap, "_MAX_RUNS", 10)
    wide = torch.zeros(64, 576, dtype=torch.uint8)
    heads = wide.view(16, 4, 576)
    assert not overlap.overlaps(wide[:, :512], wide[:, 512:])
    assert not overlap.overlaps(heads[..., 512:], heads[:, :2, :512])
    assert overlap.overlaps(wide[:, :513], wide[:, 512:])

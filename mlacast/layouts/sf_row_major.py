"""Row-major scale factors: the words of a token are neighbours, no padding.

Entry (token t, group g, word w) of [T, groups, words] stands at element ``(t * groups + g) * words
+ w``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_major_strides(num_tokens: int, num_groups: int, words: int) -> tuple[int, int, int]:
    """Return the element strides of [num_tokens, num_groups, words]."""
    return num_groups * words, words, 1


def row_major_offset(token: int, group: int, word: int, num_groups: int, words: int) -> int:
    """Return the element that holds entry (token, group, word)."""
    return (token * num_groups + group) * words + word


def allocate_row_major(
    num_tokens: int,
    num_groups: int,
    words: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return a zero-filled contiguous [num_tokens, num_groups, words]."""
    return torch.zeros((num_tokens, num_groups, words), dtype=dtype, device=device)


def to_row_major(linear: Tensor) -> Tensor:
    """Copy [T, groups, words] of any strides into a new row-major tensor."""
    return linear.clone(memory_format=torch.contiguous_format)


def from_row_major(view: Tensor) -> Tensor:
    """Return a row-major view [T, groups, words], rows possibly strided, as a contiguous tensor."""
    return view.contiguous()

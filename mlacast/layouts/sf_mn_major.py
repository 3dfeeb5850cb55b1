"""MN-major scale factors: stride 1 along tokens, every column padded to a multiple of four tokens.

Entry (token t, group g, word w) of a [T, groups, words] view stands at element ``t + (g * words +
w) * ceil4(T)``. Four 4-byte entries are the 16 bytes that a bulk copy of a column has to be aligned
to.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ceil4(value: int) -> int:
    """Round up to a multiple of four."""
    return (value + 3) // 4 * 4


def mn_major_strides(num_tokens: int, num_groups: int, words: int) -> tuple[int, int, int]:
    """Return the element strides of the [num_tokens, num_groups, words] view."""
    column = ceil4(num_tokens)
    return 1, words * column, column


def mn_major_offset(token: int, group: int, word: int, num_tokens: int, words: int) -> int:
    """Return the element that holds entry (token, group, word)."""
    return token + (group * words + word) * ceil4(num_tokens)


def allocate_mn_major_padded(
    num_tokens: int,
    num_groups: int,
    words: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return a zero-filled view [ceil4(num_tokens), num_groups, words] with `mn_major_strides`."""
    column = ceil4(num_tokens)
    if column == 0:
        # Without tokens torch would pick other strides than the formula.
        strides = mn_major_strides(0, num_groups, words)
        return torch.empty_strided((0, num_groups, words), strides, dtype=dtype, device=device)
    columns = torch.zeros((num_groups, words, column), dtype=dtype, device=device)
    return columns.permute(2, 0, 1)


def allocate_mn_major(
    num_tokens: int,
    num_groups: int,
    words: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return a zero-filled view [num_tokens, num_groups, words] with `mn_major_strides`.

    The rows that pad a column belong to the storage and are zero too. Zero tokens give an empty
    view.
    """
    padded = allocate_mn_major_padded(num_tokens, num_groups, words, dtype, device)
    return padded[:num_tokens]


def to_mn_major(linear: Tensor) -> Tensor:
    """Copy [T, groups, words] of any strides into a new MN-major view of the same shape."""
    num_tokens, num_groups, words = linear.shape
    view = allocate_mn_major(num_tokens, num_groups, words, linear.dtype, linear.device)
    view.copy_(linear)
    return view


def from_mn_major(view: Tensor) -> Tensor:
    """Copy an MN-major view [T, groups, words] into a contiguous tensor."""
    return view.contiguous()

"""Dense decodes over shuffled pages, and the rows that each token sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.scenarios import CacheCase


@dataclass(frozen=True)
class Problem:
    """Requests over shuffled pages, some entries of the table out of range.

    Attributes:
        case: Cache format.
        cache: Pages; rows that no token sees are NaN.
        page_table: [B, max_pages].
        seq_lens: [B].
        selected: Rows that each of B * Q tokens sees.
    """

    case: CacheCase
    cache: Tensor
    page_table: Tensor
    seq_lens: Tensor
    selected: list[Tensor]


def make_problem(
    case: CacheCase,
    seq_lens: Sequence[int],
    *,
    per_request: int = 2,
    page_size: int = 5,
    max_pages: int = 9,
    causal: bool = True,
) -> Problem:
    """Draw a problem; rows that no token sees are NaN."""
    batch = len(seq_lens)
    pages = batch * max_pages
    table = torch.randperm(pages).view(batch, max_pages).int()
    # One page of each request is missing.
    table[:, 1] = torch.tensor([-1, pages, 2**31 - 1])[torch.arange(batch) % 3].int()
    seen: list[list[int]] = []
    for request, length in enumerate(seq_lens):
        bounded = min(max(length, 0), max_pages * page_size)
        for token in range(per_request):
            stop = bounded - (per_request - 1 - token) if causal else bounded
            seen.append(
                [
                    int(table[request, at // page_size]) * page_size + at % page_size
                    for at in range(max(stop, 0))
                    if 0 <= int(table[request, at // page_size]) < pages
                ]
            )
    slots = sorted({slot for line in seen for slot in line})
    filled = case.fill(num_pages=pages, page_size=page_size, slots=slots or [0])
    selected = [filled.rows[torch.tensor(line, dtype=torch.int64)].double() for line in seen]
    return Problem(case, filled.cache, table, torch.tensor(seq_lens, dtype=torch.int32), selected)

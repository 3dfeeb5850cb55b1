"""Random inputs for the attention tests, as hostile as the contract allows.

Unread rows are NaN, invalid indices come from a list of nasty values, repeats occur, and queries
are strided. Wherever RoPE is on, queries and tables are drawn so that the rotation is exact (see
``oracles.exact_rope_table``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import mlacast
from tests import cache_writers, oracles
from tests.cache_writers import FilledCache
from tests.format_cases import fill_storage

NASTY_INDICES = (-1, -2, -(2**31), 2**31 - 1, 1 << 20)
INT32 = torch.int32


@dataclass(frozen=True)
class PrefillInputs:
    """q [s_q, h, d], kv [s_kv, d] with NaN in unread rows, indices [s_q, topk]."""

    q: Tensor
    kv: Tensor
    indices: Tensor


def draw_indices(s_q: int, topk: int, rows: int, *, invalid: float = 0.25) -> Tensor:
    """Indices into ``rows`` rows, with repeats; a share ``invalid`` is out of range."""
    indices = (
        torch.randint(0, rows, (s_q, topk), dtype=INT32)
        if rows
        else torch.full((s_q, topk), -1, dtype=INT32)
    )
    nasty = torch.tensor(NASTY_INDICES, dtype=INT32)[
        torch.randint(0, len(NASTY_INDICES), (s_q, topk))
    ]
    past_the_end = torch.rand(s_q, topk) < 0.2
    nasty = torch.where(past_the_end, torch.full_like(nasty, rows), nasty)
    return torch.where(torch.rand(s_q, topk) < invalid, nasty, indices)


def used_rows(indices: Tensor, rows: int, topk_length: Tensor | None = None) -> set[int]:
    """Row numbers that some query token attends to."""
    used: set[int] = set()
    for token, line in enumerate(indices.tolist()):
        length = (
            len(line) if topk_length is None else min(max(int(topk_length[token]), 0), len(line))
        )
        used.update(index for index in line[:length] if 0 <= index < rows)
    return used


def forget_unused(kv: Tensor, used: set[int]) -> Tensor:
    """A copy of ``kv`` whose rows outside ``used`` are NaN."""
    keep = torch.zeros(kv.shape[0], dtype=torch.bool)
    keep[torch.tensor(sorted(used), dtype=torch.int64)] = True
    return torch.where(
        keep.view(-1, *([1] * (kv.dim() - 1))), kv, torch.full_like(kv, float("nan"))
    )


def transposed_queries(s_q: int, heads: int, width: int) -> Tensor:
    """Exact bf16 queries [s_q, heads, width] laid out head by head, as a batched matmul leaves
    them.
    """
    return oracles.exact_queries(heads, s_q, width).transpose(0, 1)


def prefill_inputs(
    *, s_q: int, heads: int, width: int, s_kv: int, topk: int, topk_length: Tensor | None = None
) -> PrefillInputs:
    """A prefill problem with every nuisance the contract allows."""
    indices = draw_indices(s_q, topk, s_kv)
    kv = torch.randn(s_kv, width).bfloat16()
    kv = forget_unused(kv, used_rows(indices, s_kv, topk_length))
    return PrefillInputs(transposed_queries(s_q, heads, width), kv, indices)


@dataclass(frozen=True)
class CacheCase:
    """A cache format, with its row width where the format leaves it open.

    Attributes:
        name: Attribute of KvFormat.
        d_qk: Width of a row.
    """

    name: str
    d_qk: int

    @property
    def id(self) -> str:
        return f"{self.name.lower()}_{self.d_qk}"

    def fill(self, *, num_pages: int, page_size: int, slots: Sequence[int]) -> FilledCache:
        """A cache with random rows at ``slots`` and NaN bytes elsewhere."""
        for layout in cache_writers.PACKED_LAYOUTS:
            if layout.name == self.name:
                records = cache_writers.draw_records(layout, len(slots))
                return cache_writers.fill_cache(
                    layout, records, num_pages=num_pages, page_size=page_size, slots=slots
                )
        return cache_writers.fill_plain_cache(
            self.name, self.d_qk, num_pages=num_pages, page_size=page_size, slots=slots
        )


CACHES = (
    CacheCase("BF16", 576),
    CacheCase("BF16", 512),
    CacheCase("FP8", 576),
    CacheCase("FP8", 512),
    CacheCase("V32", 576),
    CacheCase("V4", 512),
    CacheCase("V41", 512),
    CacheCase("V41_FP4", 512),
    CacheCase("V41_INLINE", 512),
    CacheCase("V41_FP4_INLINE", 512),
    CacheCase("NVFP4_384", 512),
)


def cache_id(case: CacheCase) -> str:
    """Readable parametrisation id."""
    return case.id


def poisoned_cache(case: CacheCase, pages: int, page_size: int) -> Tensor:
    """A cache of 0x5A bytes on the CPU, padding of its pages included."""
    kv_format = mlacast.KvFormat.from_name(case.name)
    width = None if kv_format.d_qk is not None else case.d_qk
    target = kv_format.allocate(pages, page_size, d_qk=width)
    fill_storage(target, 0x5A)
    return target


def indices_of(lines: Sequence[Sequence[int]]) -> Tensor:
    """int32 index tensor from literal lists."""
    return torch.tensor(lines, dtype=INT32)


def lengths_of(*lengths: int) -> Tensor:
    """int32 length tensor."""
    return torch.tensor(lengths, dtype=INT32)


def one_hot_rows(count: int, width: int, *positions: int) -> Tensor:
    """``count`` bf16 rows [count, width]; row i is one at positions[i] and zero elsewhere."""
    rows = torch.zeros(count, width, dtype=torch.bfloat16)
    for row, position in enumerate(positions):
        rows[row, position] = 1.0
    return rows

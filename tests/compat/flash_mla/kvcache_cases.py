"""Random calls of ``flash_mla_with_kvcache`` with every row's keys, sparse and dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlacast.compat import flash_mla
from tests.cache_writers import RecordLayout
from tests.compat.flash_mla.cases import (
    INT32_MAX,
    half_full_cache,
    make_indices,
    make_lengths,
    make_sink,
    poison_tails,
)
from tests.compat.flash_mla.oracle import Attended, attend, join_keys, select_keys

SM_SCALE = 0.05


@dataclass(frozen=True)
class KvCall:
    """Keyword arguments without the metadata, and per (request, token) row its keys."""

    arguments: dict[str, Any]
    keys: list[Tensor]

    def run(self, metadata: Any = None, **changes: Any) -> tuple[Tensor, Tensor]:
        """Call with ``metadata``, or with a fresh one."""
        fresh = flash_mla.get_mla_metadata()[0] if metadata is None else metadata
        arguments: dict[str, Any] = {"tile_scheduler_metadata": fresh} | self.arguments | changes
        result: tuple[Tensor, Tensor] = flash_mla.flash_mla_with_kvcache(**arguments)
        return result

    def attended(self) -> Attended:
        """The exact result with [b, s_q] in front."""
        q = self.arguments["q"]
        flat = attend(
            q.flatten(0, 1),
            self.keys,
            sm_scale=self.arguments["softmax_scale"],
            sink=self.arguments.get("attn_sink"),
        )
        return flat.reshaped(*q.shape[:2])


@dataclass(frozen=True)
class SparseCase:
    """A sparse call over one or two caches."""

    id: str
    caches: tuple[RecordLayout, ...]
    b: int = 2
    s_q: int = 1
    h_q: int = 8
    topk: int = 10
    rows: int = 48
    page_size: int = 8
    sink: str = "none"
    lengths: bool = False
    extra_topk: int = 6
    extra_page_size: int = 4


def _segment(
    case: SparseCase, layout: RecordLayout, topk: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    cache = half_full_cache(layout, case.rows, page_size)
    indices = make_indices(case.b * case.s_q, topk, len(cache.rows), cache.slots)
    lengths = make_lengths(case.b, topk) if case.lengths else None
    # A length belongs to a request; its s_q rows share it.
    per_row = None if lengths is None else lengths.repeat_interleave(case.s_q)
    poison_tails(indices, per_row, dead_row=1)
    keys = select_keys(cache.rows, indices, per_row)
    return cache.cache, indices.view(case.b, case.s_q, topk), lengths, keys


def sparse_call(case: SparseCase) -> KvCall:
    """A call with ``indices``."""
    cache, indices, lengths, keys = _segment(case, case.caches[0], case.topk, case.page_size)
    arguments: dict[str, Any] = {
        "q": torch.randn(case.b, case.s_q, case.h_q, case.caches[0].d_qk).bfloat16(),
        "k_cache": cache,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "softmax_scale": SM_SCALE,
        "is_fp8_kvcache": True,
        "indices": indices,
        "attn_sink": make_sink(case.sink, case.h_q),
        "topk_length": lengths,
    }
    if len(case.caches) == 2:
        extra, more, limits, extra_keys = _segment(
            case, case.caches[1], case.extra_topk, case.extra_page_size
        )
        arguments |= {
            "extra_k_cache": extra,
            "extra_indices_in_kvcache": more,
            "extra_topk_length": limits,
        }
        keys = join_keys(keys, extra_keys)
    return KvCall(arguments, keys)


@dataclass(frozen=True)
class DenseCase:
    """A dense bf16 call; ``lengths`` are the requests' cached tokens, the new ones included."""

    id: str
    lengths: tuple[int, ...] = (13, 5, 32)
    s_q: int = 1
    h_q: int = 8
    d_qk: int = 576
    page_size: int = 8
    causal: bool = False


def dense_call(case: DenseCase) -> KvCall:
    """A call with ``block_table``; other pages, page tails and unused table entries are poison."""
    batch, size = len(case.lengths), case.page_size
    owned = [-(-length // size) for length in case.lengths]
    width = max(owned) + 1
    pages = torch.randperm(sum(owned) + 2)
    cache = torch.full((len(pages), size, 1, case.d_qk), float("nan")).bfloat16()
    table = torch.full((batch, width), INT32_MAX, dtype=torch.int32)
    keys: list[Tensor] = []
    taken = 0
    for request, length in enumerate(case.lengths):
        rows = torch.randn(length, case.d_qk).bfloat16()
        for number in range(owned[request]):
            page = int(pages[taken])
            taken += 1
            part = rows[number * size : (number + 1) * size]
            cache[page, : len(part), 0] = part
            table[request, number] = page
        for token in range(case.s_q):
            # Bottom-right aligned: the last query token sees all, each one before it a key less.
            visible = length - (case.s_q - 1 - token) if case.causal else length
            keys.append(rows[: max(visible, 0)].double())
    arguments = {
        "q": torch.randn(batch, case.s_q, case.h_q, case.d_qk).bfloat16(),
        "k_cache": cache,
        "block_table": table,
        "cache_seqlens": torch.tensor(case.lengths, dtype=torch.int32),
        "head_dim_v": 512,
        "softmax_scale": SM_SCALE,
        "causal": case.causal,
    }
    return KvCall(arguments, keys)

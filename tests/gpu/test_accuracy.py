"""Prefill and decode on the device against the reference in float64 on CPU copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.gpu import steps
from tests.gpu.low_precision import (
    assert_as_accurate,
    assert_logarithms,
    attend_with_bf16_weights,
)
from tests.gpu.steps import CUDA, SM_SCALE, copy_storage
from tests.scenarios import (
    CACHES,
    CacheCase,
    cache_id,
    draw_indices,
    forget_unused,
    used_rows,
)

pytestmark = pytest.mark.usefixtures("each_backend")

POSITIONS = torch.tensor([2, 400, -5])


@dataclass(frozen=True)
class Case:
    """Options of a call of three rows.

    Attributes:
        heads: Query heads.
        width: d_qk.
        topk: Index columns.
        norm: With the query norm.
        pairing: RoPE pairing, or None.
        order: Element order of the query.
        lengths: topk_length, or None.
    """

    heads: int
    width: int = 512
    topk: int = 300
    norm: bool = False
    pairing: str | None = None
    order: str = "head"
    lengths: tuple[int, int, int] | None = None

    @property
    def id(self) -> str:
        norm = "norm" if self.norm else "raw"
        return f"h{self.heads}-d{self.width}-topk{self.topk}-{norm}-{self.pairing}-{self.order}"


CASES = (
    Case(1, topk=1),
    Case(8, topk=33, pairing="half", norm=True),
    Case(17, topk=0),
    Case(20, lengths=(300, 0, 7)),
    Case(64, norm=True, pairing="interleaved", order="chunk16", topk=512),
    Case(128, norm=True, pairing="interleaved", order="chunk16", lengths=(64, 300, 1)),
    Case(128, width=576, topk=512),
    Case(16, width=576, pairing="half"),
    Case(65, pairing="interleaved"),
)


def _options(case: Case) -> dict[str, Any]:
    """Scale, sink, norm and rotation. The table is exact in its products with the queries, so that
    the rotated query has one right rounding.
    """
    rope = None
    if case.pairing is not None:
        rope = mlacast.Rope(oracles.exact_rope_table(9), POSITIONS, case.pairing)
    sink = torch.randn(case.heads)
    sink[case.heads // 2] = -float("inf")
    return {
        "sm_scale": SM_SCALE,
        "attn_sink": sink,
        "q_norm_eps": 0.75 if case.norm else None,
        "rope": rope,
        "q_order": case.order,
    }


def _on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    moved = dict(options)
    for name, value in options.items():
        if isinstance(value, Tensor):
            moved[name] = value.to(CUDA)
        elif isinstance(value, mlacast.Rope):
            moved[name] = mlacast.Rope(
                value.cos_sin_cache.to(CUDA), value.positions.to(CUDA), value.pairing
            )
    return moved


def _query(case: Case) -> Tensor:
    q = oracles.exact_queries(3, case.heads, case.width)
    return oracles.chunk16_from_head_order(q) if case.order == "chunk16" else q


def _size(q: Tensor, selected: list[Tensor], norm: bool) -> float:
    """An upper bound of |scale| |q| |k|; a normed query has the length sqrt(512)."""
    keys = [rows.norm(dim=1).max() for rows in selected if rows.shape[0]]
    largest = float(max(keys)) if keys else 0.0
    length = 23.0 if norm else float(q.double().norm(dim=2).max())
    return SM_SCALE * 2 * length * largest


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_prefill(case: Case) -> None:
    lengths = None if case.lengths is None else torch.tensor(case.lengths, dtype=torch.int32)
    indices = draw_indices(3, case.topk, 250)
    indices[1, : case.topk // 2] = -1
    rows = torch.randn(250, case.width).bfloat16()
    kv = forget_unused(rows, used_rows(indices, 250, lengths))
    q, options = _query(case), _options(case)
    out, max_logits, lse = mlacast.reference.sparse_mla_prefill(
        q,
        kv,
        indices,
        topk_length=lengths,
        compute_dtype=torch.float64,
        **options,
    )
    selected = oracles.select_rows(kv, indices, lengths)
    low = attend_with_bf16_weights(q, selected, **options)
    actual, actual_max, actual_lse = mlacast.sparse_mla_prefill(
        q.to(CUDA),
        kv.to(CUDA),
        indices.to(CUDA),
        topk_length=None if lengths is None else lengths.to(CUDA),
        backend=steps.BACKEND,
        **_on_gpu(options),
    )
    assert isinstance(actual, Tensor)
    assert_as_accurate(actual, low, out)
    size = _size(q, selected, case.norm)
    assert_logarithms(actual_lse, lse, case.width, size)
    assert_logarithms(actual_max, max_logits, case.width, size)


def _pool(
    case: CacheCase, topk: int, page_size: int, lengths: Tensor | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Cache and indices on the CPU, and the rows of every token."""
    pages = -(-100 // page_size)
    indices = draw_indices(3, topk, pages * page_size)
    used = sorted(used_rows(indices, pages * page_size, lengths))
    filled = case.fill(num_pages=pages, page_size=page_size, slots=used)
    return filled.cache, indices, oracles.select_rows(filled.rows, indices, lengths)


def _check_decode(
    main: CacheCase,
    extra: CacheCase | None,
    case: Case,
    page_size: int,
    num_splits: int | None,
) -> None:
    lengths = torch.tensor([case.topk, 0, case.topk // 3], dtype=torch.int32)
    cache, indices, selected = _pool(main, case.topk, page_size, lengths)
    q, options = _query(case), _options(case)
    pools: dict[str, Any] = {
        "kv_format": mlacast.KvFormat.from_name(main.name),
        "topk_length": lengths,
    }
    if extra is not None:
        extra_lengths = torch.tensor([0, 90, 40], dtype=torch.int32)
        extra_cache, extra_indices, more = _pool(extra, 90, 64, extra_lengths)
        selected = oracles.join_selections(selected, more)
        pools.update(
            extra_k_cache=extra_cache,
            extra_indices=extra_indices,
            extra_topk_length=extra_lengths,
            extra_kv_format=mlacast.KvFormat.from_name(extra.name),
        )
    out, lse = mlacast.reference.sparse_mla_decode(
        q, cache, indices, compute_dtype=torch.float64, **pools, **options
    )
    low = attend_with_bf16_weights(q, selected, **options)
    actual, actual_lse = mlacast.sparse_mla_decode(
        q.to(CUDA),
        copy_storage(cache),
        indices.to(CUDA),
        num_splits=num_splits,
        backend=steps.BACKEND,
        **_pools_to_gpu(pools),
        **_on_gpu(options),
    )
    assert isinstance(actual, Tensor)
    assert_as_accurate(actual, low, out)
    assert_logarithms(actual_lse, lse, case.width, _size(q, selected, case.norm))


def _pools_to_gpu(pools: dict[str, Any]) -> dict[str, Any]:
    return {
        name: copy_storage(value)
        if name == "extra_k_cache"
        else value.to(CUDA)
        if isinstance(value, Tensor)
        else value
        for name, value in pools.items()
    }


@pytest.mark.parametrize("main", CACHES, ids=cache_id)
def test_decode_of_every_format(main: CacheCase) -> None:
    pairing = "half" if main.d_qk == 576 else "interleaved"
    case = Case(16, width=main.d_qk, topk=200, norm=main.d_qk == 512, pairing=pairing)
    _check_decode(main, None, case, 5, 1)
    _check_decode(main, None, case, 64, 3)


@pytest.mark.parametrize(
    ("main", "extra"),
    [("V4", "V4"), ("V41", "V41_FP4"), ("BF16", "NVFP4_384"), ("V41_INLINE", "V41_FP4_INLINE")],
)
def test_decode_of_two_pools(main: str, extra: str) -> None:
    case = Case(64, topk=100, norm=True, pairing="interleaved", order="chunk16")
    for num_splits in (1, None):
        _check_decode(CacheCase(main, 512), CacheCase(extra, 512), case, 64, num_splits)


@pytest.mark.parametrize("heads", [1, 20, 128])
def test_decode_with_any_number_of_heads(heads: int) -> None:
    _check_decode(CacheCase("V32", 576), None, Case(heads, width=576, topk=300), 64, None)

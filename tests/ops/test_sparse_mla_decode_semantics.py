"""sparse_mla_decode on every backend: caches, splits, the extra cache, prologue and epilogue."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.cache_writers import FilledCache
from tests.oracles import RopeSpec
from tests.scenarios import (
    CACHES,
    CacheCase,
    cache_id,
    draw_indices,
    lengths_of,
    transposed_queries,
)

SM_SCALE = 0.02
LIVE = (0, 2, 3, 4, 7, 9, 12, 14)
V4, V41, V41_FP4 = CacheCase("V4", 512), CacheCase("V41", 512), CacheCase("V41_FP4", 512)


def _filled(cache: CacheCase) -> FilledCache:
    """15 slots in pages of five, half of them NaN."""
    return cache.fill(num_pages=3, page_size=5, slots=LIVE)


def _live_indices(filled: FilledCache, s_q: int, topk: int) -> Tensor:
    """Random slots with nuisances, none of which selects an unwritten (NaN) row."""
    rows = filled.rows.shape[0]
    indices = draw_indices(s_q, topk, rows)
    written = ~filled.rows.isnan().any(1)
    for token, line in enumerate(indices.tolist()):
        for column, index in enumerate(line):
            if 0 <= index < rows and not bool(written[index]):
                indices[token, column] = -2
    return indices


@pytest.mark.parametrize("num_splits", [None, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_every_cache_format_and_split_count(
    cache: CacheCase, num_splits: int | None, backend: str
) -> None:
    filled = _filled(cache)
    indices = _live_indices(filled, 4, 18)
    lengths = lengths_of(18, 0, 7, 40)
    q = transposed_queries(4, 3, cache.d_qk)
    sink = torch.tensor([0.0, 1.0, -float("inf")])
    out, lse = mlacast.sparse_mla_decode(
        q,
        filled.cache,
        indices,
        kv_format=mlacast.KvFormat.from_name(cache.name),
        sm_scale=SM_SCALE,
        topk_length=lengths,
        attn_sink=sink,
        num_splits=num_splits,
        backend=backend,
    )
    expected = oracles.attend(
        q, oracles.select_rows(filled.rows, indices, lengths), sm_scale=SM_SCALE, attn_sink=sink
    )
    assert (oracles.plain(out).dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    oracles.assert_matches(out, lse, expected)


@dataclass(frozen=True)
class ExtraCase:
    """A pair of caches of one call."""

    main: CacheCase
    extra: CacheCase

    @property
    def id(self) -> str:
        return f"{self.main.id}+{self.extra.id}"


EXTRA = (
    ExtraCase(V4, V4),
    ExtraCase(V41, V41_FP4),
    ExtraCase(V41, V41),
    ExtraCase(CacheCase("V41_INLINE", 512), CacheCase("V41_FP4_INLINE", 512)),
    ExtraCase(CacheCase("BF16", 512), CacheCase("BF16", 512)),
    ExtraCase(CacheCase("BF16", 576), CacheCase("V32", 576)),
)


@pytest.mark.parametrize("num_splits", [None, 1, 2, 3, 8])
@pytest.mark.parametrize("case", EXTRA, ids=lambda case: case.id)
def test_two_caches_share_one_softmax(
    case: ExtraCase, num_splits: int | None, backend: str
) -> None:
    main = _filled(case.main)
    extra = case.extra.fill(num_pages=2, page_size=3, slots=[0, 1, 4, 5])
    indices, extra_indices = _live_indices(main, 4, 10), _live_indices(extra, 4, 21)
    lengths, extra_lengths = lengths_of(0, 10, 4, 0), lengths_of(21, 0, 9, 0)
    q = transposed_queries(4, 2, case.main.d_qk)
    out, lse = mlacast.sparse_mla_decode(
        q,
        main.cache,
        indices,
        kv_format=mlacast.KvFormat.from_name(case.main.name),
        sm_scale=SM_SCALE,
        topk_length=lengths,
        extra_k_cache=extra.cache,
        extra_indices=extra_indices,
        extra_topk_length=extra_lengths,
        extra_kv_format=mlacast.KvFormat.from_name(case.extra.name),
        num_splits=num_splits,
        backend=backend,
    )
    selected = oracles.join_selections(
        oracles.select_rows(main.rows, indices, lengths),
        oracles.select_rows(extra.rows, extra_indices, extra_lengths),
    )
    oracles.assert_matches(out, lse, oracles.attend(q, selected, sm_scale=SM_SCALE))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("q_order", ["head", "chunk16"])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_norm_rope_and_inverse_rope(
    pairing: str, q_order: str, num_splits: int, backend: str
) -> None:
    filled = _filled(V4)
    indices = _live_indices(filled, 3, 16)
    q = transposed_queries(3, 8, 512)
    spec = RopeSpec(oracles.exact_rope_table(6), torch.tensor([5, 0, 2]), pairing)
    sink = torch.randn(8)
    out, lse = mlacast.sparse_mla_decode(
        q if q_order == "head" else oracles.chunk16_from_head_order(q),
        filled.cache,
        indices,
        kv_format=mlacast.KvFormat.V4,
        sm_scale=SM_SCALE,
        attn_sink=sink,
        q_norm_eps=1e-6,
        rope=mlacast.Rope(spec.cos_sin, spec.positions, pairing=pairing),
        q_order=q_order,
        num_splits=num_splits,
        backend=backend,
    )
    expected = oracles.attend(
        q,
        oracles.select_rows(filled.rows, indices),
        sm_scale=SM_SCALE,
        attn_sink=sink,
        q_norm_eps=1e-6,
        rope=spec,
    )
    oracles.assert_matches(out, lse, expected)


def test_rope_on_576_turns_the_query_and_leaves_the_output(backend: str) -> None:
    filled = _filled(CacheCase("V32", 576))
    indices = _live_indices(filled, 3, 16)
    q = transposed_queries(3, 2, 576)
    spec = RopeSpec(oracles.exact_rope_table(6), torch.tensor([5, 0, 2]), "half")
    out, lse = mlacast.sparse_mla_decode(
        q,
        filled.cache,
        indices,
        kv_format=mlacast.KvFormat.V32,
        sm_scale=SM_SCALE,
        rope=mlacast.Rope(spec.cos_sin, spec.positions, pairing="half"),
        backend=backend,
    )
    expected = oracles.attend(
        q, oracles.select_rows(filled.rows, indices), sm_scale=SM_SCALE, rope=spec
    )
    oracles.assert_matches(out, lse, expected)


def test_batch_invariant_rows_have_the_same_bits_alone_and_together(backend: str) -> None:
    filled = _filled(V4)
    indices = _live_indices(filled, 6, 64)
    q = transposed_queries(6, 2, 512)

    def run(first: int, last: int) -> tuple[Tensor, Tensor]:
        out, lse = mlacast.sparse_mla_decode(
            q[first:last],
            filled.cache,
            indices[first:last],
            kv_format=mlacast.KvFormat.V4,
            sm_scale=SM_SCALE,
            batch_invariant=True,
            backend=backend,
        )
        assert isinstance(out, Tensor)
        return out, lse

    out, lse = run(0, 6)
    for row in range(6):
        out_alone, lse_alone = run(row, row + 1)
        assert oracles.same_bits(out_alone, out[row : row + 1])
        assert oracles.same_bits(lse_alone, lse[row : row + 1])


def test_batch_invariance_can_be_switched_on_by_environment(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    filled = _filled(V4)
    indices = _live_indices(filled, 6, 64)
    q = transposed_queries(6, 2, 512)

    def run(batch_invariant: bool) -> tuple[Tensor, Tensor]:
        out, lse = mlacast.sparse_mla_decode(
            q,
            filled.cache,
            indices,
            kv_format=mlacast.KvFormat.V4,
            sm_scale=SM_SCALE,
            batch_invariant=batch_invariant,
            backend=backend,
        )
        assert isinstance(out, Tensor)
        return out, lse

    asked = run(True)
    monkeypatch.setenv("MLACAST_BATCH_INVARIANT", "1")
    for by_argument, by_environment in zip(asked, run(False), strict=True):
        assert oracles.same_bits(by_argument, by_environment)


def test_a_schedule_and_a_workspace_change_no_bit(backend: str) -> None:
    filled = _filled(V4)
    indices = _live_indices(filled, 4, 64)
    q = transposed_queries(4, 2, 512)
    for num_splits in (None, 1, 4):
        schedule = mlacast.plan_sparse_decode(
            4, 2, 64, kv_format=mlacast.KvFormat.V4, num_splits=num_splits
        )
        workspace = torch.full((mlacast.workspace_size(schedule),), 0xFF, dtype=torch.uint8)
        results = [
            mlacast.sparse_mla_decode(
                q,
                filled.cache,
                indices,
                kv_format=mlacast.KvFormat.V4,
                sm_scale=SM_SCALE,
                backend=backend,
                **options,
            )
            for options in (
                {"num_splits": num_splits},
                {"schedule": schedule},
                {"schedule": schedule, "workspace": workspace},
            )
        ]
        for out, lse in results[1:]:
            assert oracles.same_bits(out, results[0][0])
            assert oracles.same_bits(lse, results[0][1])

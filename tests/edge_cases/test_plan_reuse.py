"""One plan for calls whose lengths and indices change.

BC-41, vllm-project/vllm#36611 (also vllm-project/FlashMLA#3), CPU analogue: a schedule decided on
the values of one call was reused for another and lost parts of the KV.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.oracles import same_bits
from tests.scenarios import CacheCase, lengths_of

LENGTHS = (
    [1] * 8,
    [64, 0, 1, 33, 64, 64, 5, 0],
    [64] * 8,
    [0] * 8,
    [7, 64, 2, 0, 0, 0, 0, 0],
)


@pytest.mark.parametrize("num_splits", [None, 1, 2, 8])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_plan_serves_any_lengths(
    num_splits: int | None, batch_invariant: bool, backend: str
) -> None:
    filled = CacheCase("V4", 512).fill(num_pages=8, page_size=8, slots=range(64))
    q = oracles.exact_queries(8, 2, 512)
    kv_format = mlacast.KvFormat.V4
    plan = mlacast.plan_sparse_decode(
        8, 2, 64, kv_format=kv_format, num_splits=num_splits, batch_invariant=batch_invariant
    )
    workspace = torch.full((mlacast.workspace_size(plan),), 0xFF, dtype=torch.uint8)
    for lengths in LENGTHS:
        indices = torch.randint(0, 64, (8, 64), dtype=torch.int32)
        topk_length = lengths_of(*lengths)

        def run(**options: object) -> tuple[Tensor, Tensor]:
            out, lse = mlacast.sparse_mla_decode(
                q,
                filled.cache,
                indices,  # noqa: B023
                kv_format=kv_format,
                sm_scale=0.02,
                topk_length=topk_length,  # noqa: B023
                backend=backend,
                **options,  # type: ignore[arg-type]
            )
            assert isinstance(out, Tensor)
            return out, lse

        out, lse = run(schedule=plan, workspace=workspace)
        oracle = oracles.attend(
            q, oracles.select_rows(filled.rows, indices, topk_length), sm_scale=0.02
        )
        oracles.assert_matches(out, lse, oracle)
        fresh_out, fresh_lse = run(num_splits=num_splits, batch_invariant=batch_invariant)
        assert same_bits(out, fresh_out) and same_bits(lse, fresh_lse)


def test_a_plan_with_an_extra_cache_serves_any_lengths(backend: str) -> None:
    main = CacheCase("V41", 512).fill(num_pages=4, page_size=4, slots=range(16))
    extra = CacheCase("V41_FP4", 512).fill(num_pages=4, page_size=4, slots=range(16))
    q = oracles.exact_queries(3, 2, 512)
    plan = mlacast.plan_sparse_decode(
        3,
        2,
        16,
        kv_format=mlacast.KvFormat.V41,
        extra_topk=24,
        extra_kv_format=mlacast.KvFormat.V41_FP4,
        num_splits=4,
    )
    indices = torch.randint(0, 16, (3, 16), dtype=torch.int32)
    extra_indices = torch.randint(0, 16, (3, 24), dtype=torch.int32)
    for lengths, extra_lengths in (
        ([16, 0, 3], [0, 24, 9]),
        ([0, 0, 0], [0, 0, 0]),
        ([1, 1, 1], [24, 24, 24]),
    ):
        topk_length, extra_topk_length = lengths_of(*lengths), lengths_of(*extra_lengths)
        out, lse = mlacast.sparse_mla_decode(
            q,
            main.cache,
            indices,
            kv_format=mlacast.KvFormat.V41,
            sm_scale=0.02,
            topk_length=topk_length,
            extra_k_cache=extra.cache,
            extra_indices=extra_indices,
            extra_topk_length=extra_topk_length,
            extra_kv_format=mlacast.KvFormat.V41_FP4,
            schedule=plan,
            backend=backend,
        )
        selected = oracles.join_selections(
            oracles.select_rows(main.rows, indices, topk_length),
            oracles.select_rows(extra.rows, extra_indices, extra_topk_length),
        )
        oracles.assert_matches(out, lse, oracles.attend(q, selected, sm_scale=0.02))

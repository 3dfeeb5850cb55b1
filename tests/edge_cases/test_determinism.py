"""The same call gives the same bits, wherever the pages lie.

BC-48, 1CatAI/1Cat-vLLM#162 (also deepseek-ai/FlashMLA#212): two writers for one element, results
that varied by run and by page placement.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlacast
from tests import cache_writers, oracles
from tests.cache_writers import V4
from tests.format_cases import storage_bytes
from tests.oracles import same_bits
from tests.scenarios import CACHES, CacheCase, cache_id

KV_FORMAT = mlacast.KvFormat.V4


def _decode(
    q: Tensor, cache: Tensor, indices: Tensor, num_splits: int | None, backend: str
) -> list[Tensor]:
    out, lse = mlacast.sparse_mla_decode(
        q,
        cache,
        indices,
        kv_format=KV_FORMAT,
        sm_scale=0.02,
        attn_sink=torch.zeros(q.shape[1]),
        num_splits=num_splits,
        out_format=mlacast.Mxfp8(),
        backend=backend,
    )
    assert isinstance(out, mlacast.QuantizedTensor) and out.sf is not None
    return [out.data, out.sf, lse]


def test_200_runs_give_the_same_bits(backend: str) -> None:
    filled = CacheCase("V4", 512).fill(num_pages=4, page_size=16, slots=range(64))
    q = oracles.exact_queries(2, 4, 512)
    indices = torch.randint(0, 64, (2, 64), dtype=torch.int32)
    first = _decode(q, filled.cache, indices, None, backend)
    for _ in range(200):
        for left, right in zip(
            _decode(q, filled.cache, indices, None, backend), first, strict=True
        ):
            assert same_bits(left, right)


@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_eight_page_placements_give_the_same_bits(num_splits: int | None, backend: str) -> None:
    records = cache_writers.draw_records(V4, 64)
    q = oracles.exact_queries(64, 4, 512)
    logical = torch.randint(0, 64, (64, 64), dtype=torch.int32)
    results = []
    for _ in range(8):
        pages = torch.randperm(12)[:8].to(torch.int32)
        slots = (pages.unsqueeze(1) * 8 + torch.arange(8, dtype=torch.int32)).flatten()
        cache = cache_writers.fill_cache(
            V4, records, num_pages=12, page_size=8, slots=slots.tolist()
        ).cache
        results.append(_decode(q, cache, slots[logical.long()], num_splits, backend))
    for other in results[1:]:
        for left, right in zip(other, results[0], strict=True):
            assert same_bits(left, right)


@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_writing_the_same_tokens_again_gives_the_same_bytes(cache: CacheCase, backend: str) -> None:
    """Into caches of 0xFF; slot -1 writes nothing and of duplicates the lowest row wins, every
    time.
    """
    kv_format = mlacast.KvFormat.from_name(cache.name)
    width = None if kv_format.d_qk is not None else cache.d_qk
    latent = torch.randn(6, cache.d_qk).bfloat16()
    slots = torch.tensor([4, -1, 0, 4, 7, 0])
    first: Tensor | None = None
    for _ in range(20):
        target = kv_format.allocate(2, 4, d_qk=width)
        storage_bytes(target).fill_(0xFF)
        mlacast.kv_cache_append(latent, slots, target, kv_format, backend=backend)
        if first is None:
            first = storage_bytes(target).clone()
        assert torch.equal(storage_bytes(target), first)
    alone = kv_format.allocate(2, 4, d_qk=width)
    storage_bytes(alone).fill_(0xFF)
    mlacast.kv_cache_append(latent[[0, 2, 4]], slots[[0, 2, 4]], alone, kv_format, backend=backend)
    assert first is not None
    assert torch.equal(storage_bytes(alone), first)

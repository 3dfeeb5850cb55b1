"""A cache that does not match its declared format is refused before anything runs.

BC-37, vllm-project/vllm#47716 (also sgl-project/sglang#39123): 512-wide pages where 584 were
required failed deep in the kernel.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import cache_writers, oracles
from tests.cache_writers import PACKED_LAYOUTS, RecordLayout
from tests.oracles import same_bits

INDICES = torch.zeros(1, 2, dtype=torch.int32)


def _decode(cache: Any, kv_format: Any, width: int = 512, **options: Any) -> Any:
    q = torch.zeros(1, 2, width, dtype=torch.bfloat16)
    return mlacast.sparse_mla_decode(
        q, cache, INDICES, kv_format=kv_format, sm_scale=1.0, **options
    )


@pytest.mark.parametrize("found", [512, 528, 576, 656])
def test_584_declared_and_another_size_passed(found: int) -> None:
    cache = torch.zeros(2, 4, 1, found, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=rf"sparse_mla_decode: k_cache must .*584.*V4.*got .*{found}"
    ):
        _decode(cache, mlacast.KvFormat.V4)
    with pytest.raises(ValueError, match=rf"extra_k_cache must .*584.*V4.*got .*{found}"):
        _decode(
            mlacast.KvFormat.V4.allocate(1, 2),
            mlacast.KvFormat.V4,
            extra_k_cache=cache,
            extra_indices=INDICES,
            extra_kv_format=mlacast.KvFormat.V4,
        )


@pytest.mark.parametrize("layout", PACKED_LAYOUTS, ids=lambda layout: layout.name.lower())
def test_every_packed_format_states_its_own_size(layout: RecordLayout) -> None:
    cache = torch.zeros(2, 4, 1, layout.token_bytes + 1, dtype=torch.uint8)
    with pytest.raises(
        ValueError,
        match=rf"k_cache must .*{layout.token_bytes}.*{layout.name}.*got .*{cache.shape[-1]}",
    ):
        _decode(cache, mlacast.KvFormat.from_name(layout.name), layout.d_qk)


@pytest.mark.parametrize("page_size", [4, 1])
def test_two_kv_heads_are_refused(page_size: int) -> None:
    """Also where pages have one token, so that no stride gives the second head away."""
    cache = torch.zeros(2, page_size, 2, 584, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"sparse_mla_decode: k_cache must have h_kv = 1.*got"):
        _decode(cache, mlacast.KvFormat.V4)


def test_the_query_width_must_fit_the_format() -> None:
    with pytest.raises(ValueError, match=r"sparse_mla_decode: (q|k_cache) must .*d_qk"):
        _decode(mlacast.KvFormat.V32.allocate(2, 4), mlacast.KvFormat.V32, 512)
    with pytest.raises(ValueError, match=r"sparse_mla_decode: (q|k_cache) must .*d_qk"):
        _decode(mlacast.KvFormat.V4.allocate(2, 4), mlacast.KvFormat.V4, 576)


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(2, 4, 1, 600, dtype=torch.uint8)[..., :584],
        torch.zeros(2, 8, 1, 584, dtype=torch.uint8)[:, ::2],
        torch.zeros(2, 1, 4, 584, dtype=torch.uint8)
        .transpose(1, 2)[:, :, :, ::1]
        .expand(2, 4, 1, 584)
        .flip(1)[:, ::1]
        .as_strided((2, 4, 1, 584), (100, 584, 584, 1)),
    ],
    ids=["gap_after_each_token", "every_other_token", "overlapping_pages"],
)
def test_pages_that_are_not_packed_are_refused(cache: Tensor) -> None:
    with pytest.raises(ValueError, match="sparse_mla_decode: k_cache must .*got"):
        _decode(cache, mlacast.KvFormat.V4)


@pytest.mark.parametrize("name", ["BF16", "FP8"])
def test_unscaled_caches_check_dtype_and_width(name: str) -> None:
    kv_format = mlacast.KvFormat.from_name(name)
    with pytest.raises(ValueError, match=rf"sparse_mla_decode: k_cache must .*{name}.*got"):
        _decode(torch.zeros(2, 4, 1, 512), kv_format)
    dtype = torch.bfloat16 if name == "BF16" else torch.float8_e4m3fn
    with pytest.raises(ValueError, match=r"sparse_mla_decode: .* must .*got .*"):
        _decode(torch.zeros(2, 4, 1, 576, dtype=dtype), kv_format, 512)
    with pytest.raises(ValueError, match=r"sparse_mla_decode: .* must .*got .*"):
        _decode(torch.zeros(2, 4, 1, 500, dtype=dtype), kv_format, 512)


@pytest.mark.parametrize("layout", PACKED_LAYOUTS, ids=lambda layout: layout.name.lower())
def test_byte_views_and_three_dims_mean_the_same(layout: RecordLayout, backend: str) -> None:
    """uint8, int8 and float8_e4m3fn views of the same bytes, [P, ps, 1, B] and [P, ps, B]:
    identical bits.
    """
    records = cache_writers.draw_records(layout, 6)
    cache = cache_writers.fill_cache(layout, records, num_pages=2, page_size=3).cache
    q = oracles.exact_queries(1, 2, layout.d_qk)
    indices = torch.tensor([[5, 0, 3]], dtype=torch.int32)
    views = [
        cache,
        cache.view(torch.int8),
        cache.view(torch.float8_e4m3fn),
        cache.squeeze(2),
        cache.squeeze(2).view(torch.int8),
    ]
    results = [
        mlacast.sparse_mla_decode(
            q,
            view,
            indices,
            kv_format=mlacast.KvFormat.from_name(layout.name),
            sm_scale=0.02,
            backend=backend,
        )
        for view in views
    ]
    for out, lse in results[1:]:
        assert same_bits(out, results[0][0]) and same_bits(lse, results[0][1])

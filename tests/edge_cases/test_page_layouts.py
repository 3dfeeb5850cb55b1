"""Page layouts: data plane then scale plane, for any page size.

BC-29, vllm-project/vllm#47716 (also sgl-project/sglang#25556): reading a footer page as records of
584 bytes works for nothing but a page of one token.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlacast
from tests import cache_writers, oracles
from tests.cache_writers import PACKED_LAYOUTS, V4, RecordLayout, Records
from tests.oracles import same_bits

PAGE_SIZES = (1, 2, 3, 5, 10, 63, 64, 65, 256)
TOKENS = 10


def _layout_id(layout: RecordLayout) -> str:
    return layout.name.lower()


def _placed(layout: RecordLayout, records: Records, page_size: int) -> tuple[Tensor, Tensor]:
    """(cache, slots): the ten tokens in order, on pages stored in reverse with an unused page in
    front.
    """
    used = (TOKENS + page_size - 1) // page_size
    slots = [(used - token // page_size) * page_size + token % page_size for token in range(TOKENS)]
    filled = cache_writers.fill_cache(
        layout, records, num_pages=used + 1, page_size=page_size, slots=slots
    )
    return filled.cache, torch.tensor(slots, dtype=torch.int32)


@pytest.mark.parametrize("layout", PACKED_LAYOUTS, ids=_layout_id)
def test_results_do_not_depend_on_the_page_size(layout: RecordLayout, backend: str) -> None:
    records = cache_writers.draw_records(layout, TOKENS)
    q = oracles.exact_queries(1, 2, layout.d_qk)
    oracle = oracles.attend(q, [records.rows], sm_scale=0.02)
    kv_format = mlacast.KvFormat.from_name(layout.name)
    results = []
    for page_size in PAGE_SIZES:
        cache, slots = _placed(layout, records, page_size)
        out, lse = mlacast.sparse_mla_decode(
            q,
            cache,
            slots.unsqueeze(0),
            kv_format=kv_format,
            sm_scale=0.02,
            num_splits=1,
            backend=backend,
        )
        assert isinstance(out, Tensor)
        oracles.assert_matches(out, lse, oracle)
        results.append((out, lse))
        rows = mlacast.kv_cache_gather(cache, slots, kv_format, backend=backend)
        assert torch.equal(rows.double(), records.rows)
    for out, lse in results[1:]:
        assert same_bits(out, results[0][0]) and same_bits(lse, results[0][1])


@pytest.mark.parametrize("layout", PACKED_LAYOUTS, ids=_layout_id)
def test_appended_bytes_lie_where_an_independent_reader_looks(
    layout: RecordLayout, backend: str
) -> None:
    """The bytes of one token are the same wherever the page size puts them."""
    kv_format = mlacast.KvFormat.from_name(layout.name)
    latent = torch.randn(TOKENS, layout.d_qk).bfloat16()
    reference: Tensor | None = None
    for page_size in PAGE_SIZES:
        pages = (TOKENS + page_size - 1) // page_size
        flat, cache = cache_writers.empty_cache(layout, pages, page_size, fill=0)
        mlacast.kv_cache_append(latent, torch.arange(TOKENS), cache, kv_format, backend=backend)
        stride = cache_writers.page_bytes(layout, page_size)
        collected = []
        for token in range(TOKENS):
            data_at, scale_at = cache_writers.record_offsets(layout, page_size, stride, token)
            data = flat[data_at : data_at + layout.data_bytes]
            collected.append(torch.cat((data, flat[scale_at : scale_at + layout.scale_bytes])))
        current = torch.stack(collected)
        assert bool(current.any())
        if reference is None:
            reference = current
        assert torch.equal(current, reference)


@pytest.mark.parametrize("layout", PACKED_LAYOUTS, ids=_layout_id)
def test_pages_are_allocated_with_their_padding(layout: RecordLayout) -> None:
    """Page bytes are rounded up to the format's multiple."""
    for page_size in PAGE_SIZES:
        cache = mlacast.KvFormat.from_name(layout.name).allocate(3, page_size)
        assert cache.shape == (3, page_size, 1, layout.token_bytes)
        assert cache.stride(0) == cache_writers.page_bytes(layout, page_size)
        assert not cache.any()


def test_v4_pages_of_64_tokens_take_65_times_576_bytes() -> None:
    assert mlacast.KvFormat.V4.allocate(2, 64).stride(0) == 65 * 576 == 37_440


def test_the_pad_byte_of_a_584_byte_token_has_no_effect(backend: str) -> None:
    records = cache_writers.draw_records(V4, TOKENS)
    q = oracles.exact_queries(1, 2, 512)
    results = []
    for pad in (0x00, 0xFF):
        records.scale[:, 7] = pad
        cache, slots = _placed(V4, records, 5)
        results.append(
            mlacast.sparse_mla_decode(
                q,
                cache,
                slots.unsqueeze(0),
                kv_format=mlacast.KvFormat.V4,
                sm_scale=0.02,
                backend=backend,
            )
        )
    for left, right in zip(*results, strict=True):
        assert same_bits(left, right)


def test_v41_placements_are_different_readings_of_the_same_bytes(backend: str) -> None:
    """Same sizes, other places: the two placements must not be interchangeable."""
    layout = cache_writers.V41
    records = cache_writers.draw_records(layout, TOKENS)
    cache, slots = _placed(layout, records, 5)
    footer = mlacast.kv_cache_gather(cache, slots, mlacast.KvFormat.V41, backend=backend)
    inline = mlacast.kv_cache_gather(cache, slots, mlacast.KvFormat.V41_INLINE, backend=backend)
    assert torch.equal(footer.double(), records.rows)
    assert not torch.equal(footer, inline)

"""Cache offsets that do not fit in 31 bits.

BC-23, vllm-project/vllm-xpu-kernels#445 (also vllm-project/vllm#47671): page number times page
stride wrapped. The big buffers here are never touched as a whole, so they cost only the pages that
are written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import cache_writers, oracles
from tests.cache_writers import V4, V32, V41_FP4, RecordLayout
from tests.oracles import same_bits

PAGE_SIZE = 64
PAGE_STRIDE = 1_039_680
"""Bytes between pages in a packed allocation of many layers; page 2066 starts 495,232 bytes past
2**31.
"""
FAR_PAGES = (0, 2065, 2066, 2067)


def _far_and_compact(layout: RecordLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(far cache, far slots, compact cache, compact slots) with the same eight tokens."""
    assert FAR_PAGES[2] * PAGE_STRIDE > 2**31 > FAR_PAGES[1] * PAGE_STRIDE
    records = cache_writers.draw_records(layout, 8)
    offsets = [0, 63, 1, 62, 17, 40, 5, 33]
    pages = [0, 0, 1, 1, 2, 2, 3, 3]
    near = [page * PAGE_SIZE + offset for page, offset in zip(pages, offsets, strict=True)]
    far = [
        FAR_PAGES[page] * PAGE_SIZE + offset for page, offset in zip(pages, offsets, strict=True)
    ]
    num_pages = FAR_PAGES[-1] + 1
    flat = torch.empty(num_pages * PAGE_STRIDE, dtype=torch.uint8)
    cache_writers.put_records(flat, layout, PAGE_SIZE, PAGE_STRIDE, 0, far, records)
    big = cache_writers.cache_view(flat, layout, num_pages, PAGE_SIZE, PAGE_STRIDE, 0)
    compact = cache_writers.fill_cache(
        layout, records, num_pages=4, page_size=PAGE_SIZE, slots=near
    ).cache
    as_indices = [torch.tensor([slots], dtype=torch.int32) for slots in (far, near)]
    return big, as_indices[0], compact, as_indices[1]


@pytest.mark.parametrize("layout", [V4, V41_FP4], ids=lambda layout: layout.name.lower())
def test_decode_across_2_gib_equals_a_compact_cache(layout: RecordLayout, backend: str) -> None:
    big, far, compact, near = _far_and_compact(layout)
    q = oracles.exact_queries(1, 1, 512)
    results = []
    for cache, indices in ((big, far), (compact, near)):
        for extra in (False, True):
            more: dict[str, Any] = (
                {
                    "extra_k_cache": cache,
                    "extra_indices": indices,
                    "extra_kv_format": mlacast.KvFormat.from_name(layout.name),
                }
                if extra
                else {}
            )
            out, lse = mlacast.sparse_mla_decode(
                q,
                cache,
                indices,
                kv_format=mlacast.KvFormat.from_name(layout.name),
                sm_scale=0.02,
                backend=backend,
                **more,
            )
            results.append((out, lse))
    for far_result, near_result in zip(results[:2], results[2:], strict=True):
        for left, right in zip(far_result, near_result, strict=True):
            assert same_bits(left, right)


@pytest.mark.parametrize("layout", [V4, V41_FP4], ids=lambda layout: layout.name.lower())
def test_append_and_gather_across_2_gib(layout: RecordLayout, backend: str) -> None:
    big, far, compact, near = _far_and_compact(layout)
    kv_format = mlacast.KvFormat.from_name(layout.name)
    latent = torch.randn(8, 512).bfloat16()
    gathered = []
    for cache, slots in ((big, far[0]), (compact, near[0])):
        mlacast.kv_cache_append(latent, slots.long(), cache, kv_format, backend=backend)
        gathered.append(mlacast.kv_cache_gather(cache, slots.long(), kv_format, backend=backend))
    assert same_bits(gathered[0], gathered[1])
    assert bool(gathered[0].isfinite().all())


def test_a_contiguous_656_byte_cache_past_2_gib(backend: str) -> None:
    """Slot 3,273,604 of a plain cache starts past 2**31 bytes."""
    num_pages = 51_153
    flat = torch.empty(num_pages * PAGE_SIZE * 656, dtype=torch.uint8)
    slots = [3, 3_273_602, 3_273_603, 3_273_604, num_pages * PAGE_SIZE - 1]
    assert slots[3] * 656 > 2**31
    records = cache_writers.draw_records(V32, len(slots))
    cache_writers.put_records(flat, V32, PAGE_SIZE, PAGE_SIZE * 656, 0, slots, records)
    cache = flat.view(num_pages, PAGE_SIZE, 1, 656)
    q = oracles.exact_queries(1, 1, 576)
    out, lse = mlacast.sparse_mla_decode(
        q,
        cache,
        torch.tensor([slots], dtype=torch.int32),
        kv_format=mlacast.KvFormat.V32,
        sm_scale=0.02,
        backend=backend,
    )
    assert isinstance(out, Tensor)
    oracles.assert_matches(out, lse, oracles.attend(q, [records.rows], sm_scale=0.02))


def test_dense_decode_past_2_gib(backend: str) -> None:
    """A bf16 cache with a page stride of 2**29 elements, seen through the page table."""
    width, page_size, stride = 576, 2, 2**29
    flat = torch.empty(2 * stride + page_size * width, dtype=torch.bfloat16)
    cache = flat.as_strided((3, page_size, 1, width), (stride, width, width, 1))
    rows = torch.randn(4, width).bfloat16()
    cache[2, :, 0], cache[0, :, 0] = rows[:2], rows[2:]
    q = oracles.exact_queries(1, 1, 1, width)
    out, lse = mlacast.dense_mla_decode(
        q,
        cache,
        torch.tensor([[2, 0]], dtype=torch.int32),
        torch.tensor([4], dtype=torch.int32),
        kv_format=mlacast.KvFormat.BF16,
        sm_scale=0.02,
        backend=backend,
    )
    assert isinstance(out, Tensor)
    oracles.assert_matches(out[0], lse[0], oracles.attend(q[0], [rows.double()], sm_scale=0.02))

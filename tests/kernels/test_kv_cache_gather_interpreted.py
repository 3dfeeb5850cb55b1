"""The gather kernel, interpreted: bits equal the reference's for caches of random bytes."""

from __future__ import annotations

import pytest
import torch

import mlacast
from mlacast.kernels.triton.kv_cache_gather import launch_kv_cache_gather
from tests.format_cases import storage_bytes
from tests.scenarios import CACHES, CacheCase, cache_id


def _gathered(
    cache: torch.Tensor, slots: torch.Tensor, *, kv_format: mlacast.KvFormat
) -> torch.Tensor:
    rows = launch_kv_cache_gather(cache, slots, kv_format=kv_format).result
    assert rows is not None
    return rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_every_format(cache: CacheCase, dtype: torch.dtype) -> None:
    """Random bytes are every code and every scale, NaN and subnormals included."""
    kv_format = mlacast.KvFormat.from_name(cache.name)
    width = None if kv_format.d_qk is not None else cache.d_qk
    target = kv_format.allocate(40, 5, d_qk=width)
    flat = storage_bytes(target)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))
    slots = torch.randint(-3, 204, (101,)).to(dtype)
    rows = _gathered(target, slots, kv_format=kv_format)
    expected = kv_format.gather(target, slots)
    assert (rows.dtype, rows.shape) == (torch.bfloat16, (101, cache.d_qk))
    assert torch.equal(rows.view(torch.int16), expected.view(torch.int16))


def test_pages_at_odd_distances_and_strided_slots() -> None:
    kv_format = mlacast.KvFormat.V4
    flat = torch.randint(0, 256, (4 * 2345 + 7,), dtype=torch.uint8)
    cache = flat.as_strided((4, 4, 1, 584), (2345, 584, 584, 1), 3)
    slots = torch.tensor([15, 99, 0, 99, 7, 99, -1, 99])[::2]
    rows = _gathered(cache, slots, kv_format=kv_format)
    expected = kv_format.gather(cache, slots)
    assert torch.equal(rows.view(torch.int16), expected.view(torch.int16))

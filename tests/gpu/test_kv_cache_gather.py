"""kv_cache_gather on the device: the bits of the CPU, in one launch, wherever the slots are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlacast
from tests.format_cases import storage_bytes
from tests.gpu.cache_steps import kernels_of, nothing_compiles
from tests.gpu.steps import CUDA, copy_storage
from tests.scenarios import CACHES, CacheCase, cache_id, poisoned_cache


def _random_cache(cache: CacheCase, pages: int) -> Tensor:
    target = poisoned_cache(cache, pages, 64)
    flat = storage_bytes(target)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))
    return target


def _same_bits(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.cpu().view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_bits_of_every_format(cache: CacheCase, dtype: torch.dtype) -> None:
    """Random bytes are every code and every scale, NaN and subnormals included."""
    kv_format = mlacast.KvFormat.from_name(cache.name)
    target = _random_cache(cache, 20)
    slots = torch.randint(-30, 20 * 64 + 30, (2001,)).to(dtype)
    expected = mlacast.kv_cache_gather(target, slots, kv_format, backend="reference")
    actual = mlacast.kv_cache_gather(
        copy_storage(target), slots.to(CUDA), kv_format, backend="triton"
    )
    assert _same_bits(actual, expected)


@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_slots_past_two_gigabytes(cache: CacheCase) -> None:
    kv_format = mlacast.KvFormat.from_name(cache.name)
    width = None if kv_format.d_qk is not None else cache.d_qk
    page_bytes = kv_format.page_bytes(64, width)
    pages = 5 * 2**30 // page_bytes
    free, _ = torch.cuda.mem_get_info()
    if free < 6 * 2**30:
        pytest.skip(f"needs 6 GiB of free device memory, has {free / 2**30:.1f}")
    compact = _random_cache(cache, 4)
    big = kv_format.allocate(pages, 64, d_qk=width, device=CUDA)
    places = torch.tensor([0, 2**31 // page_bytes, 2**31 // page_bytes + 1, pages - 1])
    storage_bytes(big).view(pages, page_bytes)[places.to(CUDA)] = (
        storage_bytes(compact).view(4, page_bytes).to(CUDA)
    )
    slots = torch.randint(0, 4 * 64, (500,))
    moved = places[slots // 64] * 64 + slots % 64
    expected = mlacast.kv_cache_gather(compact, slots, kv_format, backend="reference")
    actual = mlacast.kv_cache_gather(big, moved.to(CUDA), kv_format, backend="triton")
    assert _same_bits(actual, expected)


def test_one_launch_that_graphs_capture() -> None:
    cache = copy_storage(_random_cache(CacheCase("V32", 576), 130))
    slots = torch.arange(8192, device=CUDA)

    def call() -> Tensor:
        return mlacast.kv_cache_gather(cache, slots, mlacast.KvFormat.V32, backend="triton")

    names = kernels_of(call)
    assert len(names) == 1 and "kv_cache_gather" in names[0], names
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = call()
    slots.copy_(torch.randint(0, 130 * 64, (8192,), device=CUDA))
    graph.replay()
    assert torch.equal(rows.view(torch.int16), call().view(torch.int16))


def test_nothing_compiles_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = copy_storage(_random_cache(CacheCase("V41_FP4", 512), 8))
    slots = torch.arange(512, device=CUDA)

    def call(first: int, last: int, pages: int = 8) -> None:
        mlacast.kv_cache_gather(
            cache[:pages], slots[first:last], mlacast.KvFormat.V41_FP4, backend="triton"
        )

    call(0, 16)
    with nothing_compiles(monkeypatch):
        for first, last in ((0, 1), (0, 17), (1, 33), (3, 500)):
            call(first, last)
        for pages in (1, 2, 7):
            call(0, 16, pages)

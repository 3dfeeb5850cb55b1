"""kv_cache_append on the device: the bytes of the CPU, in one launch, wherever the slots are."""

from __future__ import annotations

import pytest
import torch

import mlacast
from tests.format_cases import storage_bytes
from tests.gpu.cache_steps import (
    assert_append_equals_cpu,
    kernels_of,
    nothing_compiles,
    replayed,
)
from tests.gpu.steps import CUDA, copy_storage
from tests.kernels.cache_launches import fused_options, hostile_latents
from tests.scenarios import CACHES, CacheCase, cache_id, poisoned_cache

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [33, 1500])
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_bytes_of_every_format(cache: CacheCase, rows: int, dtype: torch.dtype) -> None:
    """Both sizes of a program; slots scattered, repeated, negative and past the end."""
    latent = hostile_latents(rows, cache.d_qk, dtype)
    slots = torch.randint(-20, 30 * 64 + 20, (rows,))
    options = fused_options("plain", rows)
    assert_append_equals_cpu(cache, latent, slots, options, 30, 64)


@pytest.mark.parametrize("kind", ["norm", "weight", "interleaved", "half", "all"])
@pytest.mark.parametrize("rows", [33, 1500])
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_bytes_of_norm_and_rotation(cache: CacheCase, rows: int, kind: str) -> None:
    latent = hostile_latents(rows, cache.d_qk, BF16)
    slots = torch.randperm(30 * 64)[:rows].to(torch.int32)
    assert_append_equals_cpu(cache, latent, slots, fused_options(kind, rows), 30, 64)


@pytest.mark.parametrize("kind", ["interleaved", "half"])
@pytest.mark.parametrize("rows", [33, 1500])
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_bytes_of_rotated_float16(cache: CacheCase, rows: int, kind: str) -> None:
    """Without a norm, whose result is bfloat16, the kernel turns the type of the rows."""
    latent = hostile_latents(rows, cache.d_qk, torch.float16)
    slots = torch.randperm(30 * 64)[:rows]
    assert_append_equals_cpu(cache, latent, slots, fused_options(kind, rows), 30, 64)


def test_slots_that_are_far_apart() -> None:
    """The rest of a tile of slots reaches 2**31 elements from its first."""
    rows, distance = 2100, 2**20
    free, _ = torch.cuda.mem_get_info()
    if free < 9 * 2**30:
        pytest.skip(f"needs 9 GiB of free device memory, has {free / 2**30:.1f}")
    given = torch.arange(rows, dtype=torch.int32)
    given[2090] = 2050
    slots = torch.empty(rows * distance, dtype=torch.int32, device=CUDA)[::distance]
    slots.copy_(given)
    latent = torch.randn(rows, 512).bfloat16()
    caches = [poisoned_cache(CacheCase("V41", 512), 40, 64) for _ in range(2)]
    kv_format = mlacast.KvFormat.V41
    mlacast.kv_cache_append(latent, given, caches[0], kv_format, backend="reference")
    on_device = copy_storage(caches[1])
    mlacast.kv_cache_append(latent.to(CUDA), slots, on_device, kv_format, backend="triton")
    assert torch.equal(storage_bytes(on_device).cpu(), storage_bytes(caches[0]))


@pytest.mark.parametrize("distinct", [1, 7, 900, 9000])
def test_the_lowest_row_wins_among_many(distinct: int) -> None:
    latent = torch.randn(9000, 512).bfloat16()
    slots = torch.randint(0, distinct, (9000,))
    options = fused_options("plain", 9000)
    for _ in range(3):
        assert_append_equals_cpu(CacheCase("V4", 512), latent, slots, options, 150, 64)


@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_slots_past_two_gigabytes(cache: CacheCase) -> None:
    """Rows go to pages on both sides of 2**31 bytes and to the last, and nowhere else."""
    kv_format = mlacast.KvFormat.from_name(cache.name)
    width = None if kv_format.d_qk is not None else cache.d_qk
    page_bytes = kv_format.page_bytes(64, width)
    pages = 9 * 2**30 // page_bytes
    free, _ = torch.cuda.mem_get_info()
    if free < 10 * 2**30:
        pytest.skip(f"needs 10 GiB of free device memory, has {free / 2**30:.1f}")
    big = kv_format.allocate(pages, 64, d_qk=width, device=CUDA)
    compact = poisoned_cache(cache, 5, 64)
    storage_bytes(compact).zero_()
    places = torch.tensor([0, 2**31 // page_bytes, 2**31 // page_bytes + 1, pages // 2, pages - 1])
    slots = torch.randperm(5 * 64)[:200]
    moved = places[slots // 64] * 64 + slots % 64
    latent = torch.randn(200, cache.d_qk).bfloat16()
    mlacast.kv_cache_append(latent, slots, compact, kv_format, backend="reference")
    mlacast.kv_cache_append(latent.to(CUDA), moved.to(CUDA), big, kv_format, backend="triton")
    stored = storage_bytes(big).view(pages, page_bytes)
    assert torch.equal(stored[places.to(CUDA)].cpu(), storage_bytes(compact).view(5, page_bytes))
    stored[places.to(CUDA)] = 0
    # In pieces: a comparison of all would need as much memory again.
    step = pages // 64 + 1
    assert not any(bool(stored[start : start + step].any()) for start in range(0, pages, step))


def test_slots_whose_low_half_is_valid_are_skipped() -> None:
    cache = torch.zeros(64, 528, dtype=torch.uint8, device=CUDA)
    slots = torch.tensor([2**31, 2**32 + 1, 2**40, -(2**40), 5], device=CUDA)
    latent = torch.randn(5, 512, dtype=BF16, device=CUDA)
    small = cache.view(1, 64, 1, 528)
    mlacast.kv_cache_append(latent, slots, small, mlacast.KvFormat.V41_INLINE, backend="triton")
    assert cache.any(1).nonzero().flatten().tolist() == [5]


def test_one_launch_that_graphs_capture() -> None:
    cache = copy_storage(poisoned_cache(CacheCase("V4", 512), 200, 64))
    latent = torch.randn(8192, 512, dtype=BF16, device=CUDA)
    slots = torch.arange(8192, device=CUDA)
    rope = mlacast.Rope(torch.randn(9, 64, device=CUDA), slots % 9)

    def call() -> None:
        mlacast.kv_cache_append(
            latent, slots, cache, mlacast.KvFormat.V4, norm_eps=1e-6, rope=rope, backend="triton"
        )

    names = kernels_of(call)
    assert len(names) == 1 and "kv_cache_append" in names[0], names
    graph = replayed(call)
    eager = storage_bytes(cache).clone()
    storage_bytes(cache).fill_(0x5A)
    graph.replay()
    assert torch.equal(storage_bytes(cache), eager)
    latent.mul_(2.0)
    slots.copy_(torch.arange(8192, device=CUDA).flip(0))
    graph.replay()
    replay = storage_bytes(cache).clone()
    storage_bytes(cache).fill_(0x5A)
    call()
    assert torch.equal(storage_bytes(cache), replay)


def test_nothing_compiles_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, pages and where the slots start may change; a long and a short call have been seen."""
    rows = torch.randn(3000, 512, dtype=BF16, device=CUDA)
    cache = copy_storage(poisoned_cache(CacheCase("V41", 512), 64, 64))

    def call(count: int, first: int = 0, pages: int = 64) -> None:
        slots = torch.arange(3100, device=CUDA)[first : first + count]
        mlacast.kv_cache_append(
            rows[:count], slots, cache[:pages], mlacast.KvFormat.V41, backend="triton"
        )

    call(16)
    call(2000)
    with nothing_compiles(monkeypatch):
        for count in (1, 2, 15, 17, 1024, 1025, 2999):
            call(count)
        for first in (1, 2, 3):
            call(64, first)
        for pages in (1, 2, 63):
            call(64, 0, pages)

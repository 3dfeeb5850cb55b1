"""kv_cache_append and kv_cache_gather on bytes that were put together independently."""

from __future__ import annotations

import importlib

import pytest
import torch

import mlacast
from tests import cache_writers
from tests.cache_writers import PACKED_LAYOUTS, RecordLayout
from tests.format_cases import storage_bytes
from tests.scenarios import CACHES, CacheCase, cache_id


def _layout_id(layout: RecordLayout) -> str:
    return layout.name.lower()


@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_gather_decodes_and_zeroes_slots_outside(cache: CacheCase, backend: str) -> None:
    filled = cache.fill(num_pages=3, page_size=4, slots=[0, 3, 4, 11])
    slots = torch.tensor([11, -1, 0, 12, 3, 3, 2**31 - 1, -(2**31), 4], dtype=torch.int32)
    rows = mlacast.kv_cache_gather(
        filled.cache, slots, mlacast.KvFormat.from_name(cache.name), backend=backend
    )
    assert (rows.dtype, rows.shape) == (torch.bfloat16, (9, cache.d_qk))
    for row, slot in zip(rows, slots.tolist(), strict=True):
        expected = (
            filled.rows[slot] if 0 <= slot < 12 else torch.zeros(cache.d_qk, dtype=torch.float64)
        )
        assert torch.equal(row.double(), expected)


@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_append_writes_only_the_bytes_of_its_slots(cache: CacheCase, backend: str) -> None:
    kv_format = mlacast.KvFormat.from_name(cache.name)
    width = None if kv_format.d_qk is not None else cache.d_qk
    fresh = kv_format.allocate(3, 5, d_qk=width)
    latent = torch.randn(4, cache.d_qk).bfloat16()
    slots = torch.tensor([7, -1, 15, 0], dtype=torch.int32)
    first, second = fresh, kv_format.allocate(3, 5, d_qk=width)
    storage_bytes(first).fill_(0x5A)
    storage_bytes(second).fill_(0xA5)
    for target in (first, second):
        mlacast.kv_cache_append(latent, slots, target, kv_format, backend=backend)
    # A byte that was written is equal in both; one that was not still differs.
    written = storage_bytes(first) == storage_bytes(second)
    record = kv_format.bytes_per_token(width)
    assert 0.9 * 2 * record < int(written.sum()) <= 2 * record
    untouched = ~written
    assert bool((storage_bytes(first)[untouched] == 0x5A).all())
    rows = mlacast.kv_cache_gather(first, slots, kv_format, backend=backend)
    assert not rows[1].any() and not rows[2].any()
    # Worst step of the formats here: e2m1 with an e4m3 scale, one sixth plus 1/16 of the block's
    # amax (|x| < 6).
    assert float((rows[[0, 3]].double() - latent[[0, 3]].double()).abs().max()) < 6 * (
        1 / 6 + 1 / 16
    )


@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_the_lowest_row_wins_on_duplicate_slots(cache: CacheCase, backend: str) -> None:
    kv_format = mlacast.KvFormat.from_name(cache.name)
    width = None if kv_format.d_qk is not None else cache.d_qk
    latent = torch.randn(3, cache.d_qk).bfloat16()
    both, alone = (kv_format.allocate(2, 2, d_qk=width) for _ in range(2))
    mlacast.kv_cache_append(latent, torch.tensor([1, 1, 1]), both, kv_format, backend=backend)
    mlacast.kv_cache_append(latent[:1], torch.tensor([1]), alone, kv_format, backend=backend)
    assert torch.equal(storage_bytes(both), storage_bytes(alone))


@pytest.mark.parametrize("layout", PACKED_LAYOUTS, ids=_layout_id)
def test_append_of_decoded_rows_reproduces_the_rows(layout: RecordLayout, backend: str) -> None:
    """What a record decodes to is representable in its format, so writing it back and reading again
    changes nothing.

    Holds for rows written by the library: the scale it picks makes every code representable a
    second time.
    """
    kv_format = mlacast.KvFormat.from_name(layout.name)
    latent = torch.randn(6, layout.d_qk).bfloat16()
    slots = torch.arange(6)
    first, second = kv_format.allocate(2, 3), kv_format.allocate(2, 3)
    mlacast.kv_cache_append(latent, slots, first, kv_format, backend=backend)
    decoded = mlacast.kv_cache_gather(first, slots, kv_format, backend=backend)
    mlacast.kv_cache_append(decoded, slots, second, kv_format, backend=backend)
    again = mlacast.kv_cache_gather(second, slots, kv_format, backend=backend)
    assert torch.equal(decoded, again)


def test_v4_append_bytes_by_hand(backend: str) -> None:
    """amax 448 in the first block of 64 and 3.5 in the second: exponent bytes 127 and 120, the rope
    part bit for bit.
    """
    latent = torch.zeros(1, 512, dtype=torch.bfloat16)
    latent[0, 0], latent[0, 64], latent[0, 65] = 448.0, 3.5, -1.75
    latent[0, 448:] = torch.randn(64)
    cache = mlacast.KvFormat.V4.allocate(1, 3)
    mlacast.kv_cache_append(latent, torch.tensor([1]), cache, mlacast.KvFormat.V4, backend=backend)
    flat = storage_bytes(cache)
    data, scales = flat[576 : 2 * 576], flat[3 * 576 + 8 : 3 * 576 + 16]
    # 3.5 / 2**-7 = 448 and -1.75 / 2**-7 = -224: codes 0x7E and 0xF6.
    assert (int(data[0]), int(data[64]), int(data[65])) == (0x7E, 0x7E, 0xF6)
    assert torch.equal(data[448:], cache_writers.bf16_bytes(latent[:, 448:])[0])
    # Blocks of zeros take the smallest scale, 2**-13.
    assert scales[:7].tolist() == [127, 120] + [114] * 5


def test_no_tokens_change_nothing(backend: str) -> None:
    cache = mlacast.KvFormat.V4.allocate(1, 3)
    storage_bytes(cache).fill_(0x5A)
    empty = torch.empty(0, 512, dtype=torch.bfloat16)
    none = torch.empty(0, dtype=torch.int64)
    mlacast.kv_cache_append(empty, none, cache, mlacast.KvFormat.V4, backend=backend)
    assert bool((storage_bytes(cache) == 0x5A).all())
    rows = mlacast.kv_cache_gather(cache, none, mlacast.KvFormat.V4, backend=backend)
    assert (rows.shape, rows.dtype) == ((0, 512), torch.bfloat16)


@pytest.mark.parametrize(("name", "width"), [("V4", 512), ("BF16", 576), ("FP8", 512)])
def test_no_slots_reach_no_kernel(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers have a grid of at least one program."""
    kv_format = mlacast.KvFormat.from_name(name)
    cache = kv_format.allocate(1, 3, d_qk=None if kv_format.d_qk else width)
    module = importlib.import_module("mlacast.ops.kv_cache_gather")
    monkeypatch.setattr(module, "load", lambda target: pytest.fail(target))
    rows = mlacast.kv_cache_gather(cache, torch.empty(0, dtype=torch.int64), kv_format)
    assert (rows.shape, rows.dtype) == ((0, width), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_plain_rows_of_other_dtypes_have_one_nan(dtype: torch.dtype, backend: str) -> None:
    """Whatever the sign of the NaN and the strides of the rows, as in every other format."""
    cache = mlacast.KvFormat.BF16.allocate(1, 2, d_qk=512)
    latent = torch.full((4, 1024), float("nan"), dtype=dtype)
    latent[2] = -latent[2]
    latent = latent[::2, :512]
    slots = torch.arange(2)
    mlacast.kv_cache_append(latent, slots, cache, mlacast.KvFormat.BF16, backend=backend)
    assert bool((cache.view(torch.int16) == 0x7FC0).all())

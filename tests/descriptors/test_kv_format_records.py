"""KvFormat append and gather against the independent writer and reader, for every page size."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from mlacast.descriptors.kv_format import KvFormat
from tests.cache_writers import V4, V32, V41, RecordLayout, page_bytes
from tests.hand_codes import NAN
from tests.hand_records import (
    BYTE_LAYOUTS,
    FP8_576,
    HandRecord,
    equals_bits,
    layout_id,
    paint,
    read_record,
    rows_as_bits,
    write_record,
)

PAGE_SIZES = (1, 2, 3, 5, 63, 64, 65, 256)
TOKENS = 10
CANARY = 0x5A
NASTY_SLOTS = [-1, -2, -(2**31), 2**31 - 1, 1000]


def kv_format(layout: RecordLayout) -> KvFormat:
    """The descriptor of a layout."""
    return KvFormat.from_name(layout.name)


@cache
def latents(layout: RecordLayout) -> torch.Tensor:
    """bfloat16 [10, d] whose magnitude changes along the row."""
    generator = torch.Generator().manual_seed(layout.data_bytes)
    latent = torch.randn(TOKENS, layout.d_qk, generator=generator)
    spread = torch.exp2(
        torch.randint(-9, 9, (TOKENS, layout.d_qk // 16), generator=generator).float()
    )
    return (latent * spread.repeat_interleave(16, dim=1)).to(torch.bfloat16)


@cache
def records(layout: RecordLayout) -> tuple[HandRecord, ...]:
    """The ten tokens of latents(), encoded by hand."""
    return tuple(write_record(bits, layout) for bits in rows_as_bits(latents(layout)))


@cache
def decoded(layout: RecordLayout) -> tuple[tuple[int, ...], ...]:
    """The ten records, decoded by hand to bfloat16 bits."""
    return tuple(tuple(read_record(record, layout)) for record in records(layout))


@dataclass(frozen=True)
class Pool:
    """A cache inside a larger buffer: page size, spare bytes between pages, first byte."""

    page_size: int
    num_pages: int
    spare: int = 0
    start: int = 0

    def stride(self, layout: RecordLayout) -> int:
        """Bytes from page to page."""
        return page_bytes(layout, self.page_size) + self.spare

    def buffer(self, layout: RecordLayout, fill: int) -> bytearray:
        """All bytes around and inside the cache."""
        return bytearray([fill]) * (2 * self.start + self.num_pages * self.stride(layout))

    def view(self, layout: RecordLayout, buffer: bytearray) -> torch.Tensor:
        """The [num_pages, page_size, 1, bytes] tensor on that buffer, float8 for per-tensor FP8."""
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        width = layout.data_bytes + layout.scale_bytes
        shape = (self.num_pages, self.page_size, 1, width)
        cache_view = flat.as_strided(shape, (self.stride(layout), width, width, 1), self.start)
        return cache_view.view(torch.float8_e4m3fn) if layout.name == "FP8" else cache_view

    def slots(self, seed: int = 0) -> list[int]:
        """Ten different slots in any order, the first and the last one among them."""
        total = self.num_pages * self.page_size
        middle = random.Random(seed).sample(range(1, total - 1), TOKENS - 2)
        return [*middle[:4], total - 1, *middle[4:], 0]


def pool_of(page_size: int, *, spare: int = 0, start: int = 0) -> Pool:
    """At least twelve slots in at least three pages."""
    return Pool(page_size, max(3, -(-12 // page_size)), spare, start)


def ignore_pad(layout: RecordLayout, pool: Pool, raw: bytes | bytearray) -> bytes:
    """Blank the pad byte of every V4 scale row, whose content no one defines."""
    masked = bytearray(raw)
    if layout == V4:
        for page in range(pool.num_pages):
            for token in range(pool.page_size):
                row = pool.start + page * pool.stride(layout) + pool.page_size * 576 + token * 8
                masked[row + 7] = 0
    return bytes(masked)


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_gather_reads_an_independently_written_cache(layout: RecordLayout, page_size: int) -> None:
    pool = pool_of(page_size)
    # 0xFF is NaN in every plane, and the V4 pad byte keeps it in half of the records.
    buffer = pool.buffer(layout, 0xFF)
    slots = pool.slots(1)
    painted = dict(zip(slots, records(layout), strict=True))
    if layout == V4:
        for slot in slots[::2]:
            painted[slot] = replace(painted[slot], scale=painted[slot].scale[:7] + b"\xff")
    paint(buffer, layout, page_size, painted)
    before = bytes(buffer)
    rows = kv_format(layout).gather(
        pool.view(layout, buffer), torch.tensor(slots, dtype=torch.int32)
    )
    assert rows.shape == (TOKENS, layout.d_qk)
    assert equals_bits(rows, decoded(layout))
    assert not bool(rows.isnan().any())
    assert bytes(buffer) == before


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_append_writes_exactly_the_records(layout: RecordLayout, page_size: int) -> None:
    pool = pool_of(page_size, spare=1152, start=576)
    buffer, expected = pool.buffer(layout, CANARY), pool.buffer(layout, CANARY)
    slots = pool.slots(2)
    paint(
        expected,
        layout,
        page_size,
        dict(zip(slots, records(layout), strict=True)),
        start=pool.start,
        page_stride=pool.stride(layout),
    )
    kv_format(layout).append(latents(layout), torch.tensor(slots), pool.view(layout, buffer))
    assert ignore_pad(layout, pool, buffer) == ignore_pad(layout, pool, expected)


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_append_then_gather_in_an_allocated_cache(layout: RecordLayout, page_size: int) -> None:
    pool = pool_of(page_size)
    fmt = kv_format(layout)
    cache_tensor = fmt.allocate(pool.num_pages, page_size, d_qk=layout.d_qk)
    slots = torch.tensor(pool.slots(3), dtype=torch.int64)
    fmt.append(latents(layout), slots, cache_tensor)
    assert equals_bits(fmt.gather(cache_tensor, slots), decoded(layout))
    # In another order, with repeats.
    order = [3, 3, 0, 9]
    again = fmt.gather(cache_tensor, slots[order])
    assert equals_bits(again, [decoded(layout)[row] for row in order])


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots_outside_the_cache_write_nothing(layout: RecordLayout, dtype: torch.dtype) -> None:
    pool = Pool(page_size=4, num_pages=3, spare=0, start=576)
    buffer = pool.buffer(layout, CANARY)
    nasty = [*NASTY_SLOTS, 12, 13]
    if dtype == torch.int64:
        # Low 32 bits that look like slot 3.
        nasty = [*nasty[:5], 2**32 + 3, -(2**62)]
    slots = [nasty[0], 7, *nasty[1:], 0]
    latent = latents(layout)[: len(slots)]
    kv_format(layout).append(latent, torch.tensor(slots, dtype=dtype), pool.view(layout, buffer))
    expected = pool.buffer(layout, CANARY)
    kept = {7: records(layout)[1], 0: records(layout)[len(slots) - 1]}
    paint(expected, layout, 4, kept, start=576)
    assert ignore_pad(layout, pool, buffer) == ignore_pad(layout, pool, expected)


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots_outside_the_cache_gather_zeros(
    layout: RecordLayout, dtype: torch.dtype, poisoned_empty: None
) -> None:
    pool = Pool(page_size=4, num_pages=2, start=576)
    # The cache lies in a larger buffer of NaN.
    buffer = pool.buffer(layout, 0xFF)
    paint(buffer, layout, 4, {0: records(layout)[0], 7: records(layout)[1]}, start=576)
    slots = [0, 8, 7, *NASTY_SLOTS, 9]
    if dtype == torch.int64:
        slots += [2**32 + 7, -(2**62), 2**62]
    rows = kv_format(layout).gather(pool.view(layout, buffer), torch.tensor(slots, dtype=dtype))
    zero = [0] * layout.d_qk
    by_slot = {0: decoded(layout)[0], 7: decoded(layout)[1]}
    assert equals_bits(rows, [by_slot.get(slot, zero) for slot in slots])


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
def test_the_lowest_row_wins_on_duplicate_slots(layout: RecordLayout) -> None:
    pool = Pool(page_size=4, num_pages=3)
    slots = [5, -1, 5, 2, 11, 2, -1, 5, 11, 0]
    buffer, expected = pool.buffer(layout, CANARY), pool.buffer(layout, CANARY)
    kv_format(layout).append(latents(layout), torch.tensor(slots), pool.view(layout, buffer))
    paint(
        expected,
        layout,
        4,
        {slot: records(layout)[row] for slot, row in [(5, 0), (2, 3), (11, 4), (0, 9)]},
    )
    assert ignore_pad(layout, pool, buffer) == ignore_pad(layout, pool, expected)


def test_duplicates_in_a_long_list() -> None:
    rng = random.Random(7)
    slots = [rng.randrange(-3, 60) for _ in range(600)]
    latent = torch.arange(600, dtype=torch.float32)[:, None].expand(600, 512).to(torch.bfloat16)
    first: dict[int, int] = {}
    for row, slot in enumerate(slots):
        first.setdefault(slot, row)
    cache_tensor = KvFormat.BF16.allocate(12, 5, d_qk=512)
    cache_tensor.fill_(-1.0)
    KvFormat.BF16.append(latent, torch.tensor(slots, dtype=torch.int32), cache_tensor)
    for slot in range(60):
        wanted = latent[first[slot], 0].item() if slot in first else -1.0
        assert cache_tensor.reshape(60, 512)[slot, 0].item() == wanted


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
def test_the_same_tokens_always_give_the_same_bytes(layout: RecordLayout) -> None:
    pool = Pool(page_size=5, num_pages=4)
    slots = torch.tensor(pool.slots(4))
    seen = set()
    for _ in range(20):
        buffer = pool.buffer(layout, 0xFF)
        kv_format(layout).append(latents(layout), slots, pool.view(layout, buffer))
        seen.add(bytes(buffer))
    assert len(seen) == 1


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
def test_no_rows_and_no_pages(layout: RecordLayout) -> None:
    fmt = kv_format(layout)
    pool = Pool(page_size=4, num_pages=2)
    buffer = pool.buffer(layout, CANARY)
    none = torch.empty(0, dtype=torch.int32)
    fmt.append(latents(layout)[:0], none, pool.view(layout, buffer))
    assert bytes(buffer) == bytes(pool.buffer(layout, CANARY))
    assert fmt.gather(pool.view(layout, buffer), none).shape == (0, layout.d_qk)
    empty = fmt.allocate(0, 4, d_qk=layout.d_qk)
    fmt.append(latents(layout)[:3], torch.tensor([0, -1, 5]), empty)
    rows = fmt.gather(empty, torch.tensor([-1, 0], dtype=torch.int32))
    assert equals_bits(rows, [[0] * layout.d_qk] * 2)


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
def test_byte_views_and_three_dimensions_are_the_same_cache(layout: RecordLayout) -> None:
    fmt = kv_format(layout)
    pool = Pool(page_size=3, num_pages=5, spare=1152, start=576)
    slots = torch.tensor(pool.slots(5))
    reference = pool.buffer(layout, CANARY)
    fmt.append(latents(layout), slots, pool.view(layout, reference))
    rows = fmt.gather(pool.view(layout, reference), slots)
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        for flatten_head in (False, True):
            buffer = pool.buffer(layout, CANARY)
            view = pool.view(layout, buffer).view(dtype)
            view = view[:, :, 0] if flatten_head else view
            fmt.append(latents(layout), slots, view)
            assert buffer == reference
            assert equals_bits(fmt.gather(view, slots), rows_as_bits(rows))


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
def test_strided_latents_and_slots_are_read_and_left_alone(layout: RecordLayout) -> None:
    pool = Pool(page_size=4, num_pages=3)
    fmt = kv_format(layout)
    slots = pool.slots(6)
    wide_slots = torch.full((TOKENS, 3), -1, dtype=torch.int32)
    wide_slots[:, 1] = torch.tensor(slots)
    parent = torch.full((TOKENS * 2, layout.d_qk + 16), NAN, dtype=torch.bfloat16)
    view = parent[::2, 8 : 8 + layout.d_qk]
    view.copy_(latents(layout))
    before = parent.clone()
    buffer, expected = pool.buffer(layout, CANARY), pool.buffer(layout, CANARY)
    fmt.append(view, wide_slots[:, 1], pool.view(layout, buffer))
    fmt.append(latents(layout), torch.tensor(slots), pool.view(layout, expected))
    assert buffer == expected
    assert torch.equal(parent.view(torch.int16), before.view(torch.int16))
    rows = fmt.gather(pool.view(layout, buffer), wide_slots[:, 1])
    assert equals_bits(rows, decoded(layout))


@pytest.mark.parametrize("layout", [V32, V41, FP8_576], ids=layout_id)
def test_results_do_not_depend_on_the_page_size(layout: RecordLayout) -> None:
    rows = []
    for page_size in (*PAGE_SIZES, 10):
        pool = pool_of(page_size)
        buffer = pool.buffer(layout, 0xFF)
        slots = torch.tensor(pool.slots(8))
        kv_format(layout).append(latents(layout), slots, pool.view(layout, buffer))
        rows.append(kv_format(layout).gather(pool.view(layout, buffer), slots))
    assert all(torch.equal(rows[0].view(torch.int16), other.view(torch.int16)) for other in rows)


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_bf16_cache_is_copied_bit_for_bit(d_qk: int, page_size: int, poisoned_empty: None) -> None:
    pool = pool_of(page_size)
    patterns = torch.randint(-(2**15), 2**15, (TOKENS, d_qk), dtype=torch.int16)
    latent = patterns.view(torch.bfloat16)
    parent = torch.full((pool.num_pages, page_size * d_qk + 32), 0x5A5A, dtype=torch.int16)
    shape = (pool.num_pages, page_size, 1, d_qk)
    cache_tensor = parent.view(torch.bfloat16).as_strided(shape, (parent.shape[1], d_qk, d_qk, 1))
    slots = pool.slots(9)
    KvFormat.BF16.append(latent, torch.tensor(slots), cache_tensor)
    expected = torch.full_like(parent, 0x5A5A)
    for row, slot in enumerate(slots):
        page, token = divmod(slot, page_size)
        expected[page, token * d_qk : (token + 1) * d_qk] = patterns[row]
    assert torch.equal(parent, expected)
    for view in (cache_tensor, cache_tensor[:, :, 0]):
        rows = KvFormat.BF16.gather(view, torch.tensor([*slots, -1, 10**6], dtype=torch.int32))
        assert rows.dtype == torch.bfloat16
        assert torch.equal(rows[:TOKENS].view(torch.int16), patterns)
        assert bool((rows[TOKENS:].view(torch.int16) == 0).all())

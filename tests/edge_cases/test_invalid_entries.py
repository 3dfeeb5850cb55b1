"""Entries that do not count: invalid tiles, entries past the length, indices outside the cache."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mlacast
from tests import cache_writers, oracles
from tests.cache_writers import V4, V32, RecordLayout
from tests.scenarios import CACHES, CacheCase, cache_id, indices_of, lengths_of, one_hot_rows

SM_SCALE = 0.02
TOPK, LIVE = 64, 32


def _live_windows() -> dict[str, list[int]]:
    """Positions of the 32 live columns in a list of 64, or of 48 where a tile of 16 is invalid."""
    windows = {
        f"starts_at_{start}": list(range(start, start + LIVE))
        for start in (0, 1, 15, 16, 17, 31, 32)
    }
    windows["hole_in_the_middle"] = list(range(24)) + list(range(40, 64))
    windows["hole_at_the_end"] = list(range(48))
    return windows


@pytest.mark.parametrize("num_splits", [1, 2, 4])
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_position_of_invalid_tiles_does_not_matter(
    cache: CacheCase, num_splits: int, backend: str
) -> None:
    """BC-01, vllm-project/vllm#48364: a leading tile without a valid index must not poison the row.

    Output within two bf16 steps and LSE within 1e-5 relative of the list with its invalid entries
    deleted.
    """
    filled = cache.fill(num_pages=7, page_size=8, slots=range(48))
    q = oracles.exact_queries(1, 2, cache.d_qk)

    def run(indices: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = mlacast.sparse_mla_decode(
            q,
            filled.cache,
            indices,
            kv_format=mlacast.KvFormat.from_name(cache.name),
            sm_scale=SM_SCALE,
            num_splits=num_splits,
            backend=backend,
        )
        assert isinstance(out, Tensor)
        return out, lse

    for name, columns in _live_windows().items():
        scattered = torch.full((1, TOPK), -1, dtype=torch.int32)
        scattered[0, torch.tensor(columns)] = torch.arange(len(columns), dtype=torch.int32)
        # Half of the holes are out-of-range slots rather than -1.
        holes = scattered[0] < 0
        scattered[0, holes & (torch.arange(TOPK) % 2 == 0)] = 7 * 8
        compact = torch.full((1, TOPK), -1, dtype=torch.int32)
        compact[0, : len(columns)] = torch.arange(len(columns), dtype=torch.int32)
        out, lse = run(scattered)
        expected_out, expected_lse = run(compact)
        # Where weighted values cancel, the bound is that of the float32 sums: 64 terms of at most
        # |v|.
        floor = 128 * 2.0**-24 * float(filled.rows[:48, :512].abs().max())
        oracles.assert_within_bf16_ulps(out, expected_out, 2, floor)
        assert torch.allclose(lse, expected_lse, rtol=1e-5, atol=1e-6), name
        oracle = oracles.attend(q, oracles.select_rows(filled.rows, scattered), sm_scale=SM_SCALE)
        oracles.assert_matches(out, lse, oracle)


@pytest.mark.parametrize("pad", [1, 16, 31])
def test_prefill_rows_with_leading_invalid_entries(pad: int, backend: str) -> None:
    """BC-01, vllm-project/vllm#48364, for the prefill op."""
    kv = torch.randn(32, 512).bfloat16()
    q = oracles.exact_queries(1, 2, 512)
    live = torch.arange(32, dtype=torch.int32).view(1, 32)
    shifted = torch.cat((torch.full((1, pad), -1, dtype=torch.int32), live), 1)
    out, max_logits, lse = mlacast.sparse_mla_prefill(
        q, kv, shifted, sm_scale=SM_SCALE, backend=backend
    )
    oracle = oracles.attend(q, oracles.select_rows(kv, shifted), sm_scale=SM_SCALE)
    oracles.assert_matches(out, lse, oracle, actual_max_logits=max_logits)


def _tails(row_count: int) -> dict[str, int]:
    return {"a_real_slot": 1, "int_max": 2**31 - 1, "slot_zero": 0, "one_past_the_end": row_count}


def _rows_with_loud_tail() -> Tensor:
    """64 rows; rows 0 and 1, which only tails select, have values around 1000."""
    kv = torch.randn(64, 512).bfloat16()
    kv[:2] = 1000.0
    return kv


@pytest.mark.parametrize("rows", [3, 64, 65, 128])
def test_prefill_ignores_whatever_is_past_topk_length(rows: int, backend: str) -> None:
    """BC-03, flashinfer-ai/flashinfer#5095: lanes past the length hold leftovers that look valid.

    64, 65 and 128 rows cross the sizes at which kernels are usually chosen.
    """
    kv = _rows_with_loud_tail()
    q = oracles.exact_queries(rows, 2, 512)
    lengths = torch.tensor(([5, 0, 64] * rows)[:rows], dtype=torch.int32)
    base = torch.randint(2, 64, (rows, 64), dtype=torch.int32)
    base[:, 1], base[:, 3] = -1, -1
    past = torch.arange(64).unsqueeze(0) >= lengths.unsqueeze(1)

    def run(tail: int) -> tuple[object, ...]:
        indices = torch.where(past, torch.full_like(base, tail), base)
        return mlacast.sparse_mla_prefill(
            q, kv, indices, sm_scale=SM_SCALE, topk_length=lengths, backend=backend
        )

    expected = run(-1)
    for name, tail in _tails(64).items():
        for left, right in zip(run(tail), expected, strict=True):
            assert oracles.same_bits(left, right), name
    oracle = oracles.attend(
        q[:3], oracles.select_rows(kv, base[:3], lengths[:3]), sm_scale=SM_SCALE
    )
    out, lse = oracles.plain(expected[0]), oracles.plain(expected[2])
    oracles.assert_matches(out[:3], lse[:3], oracle)


@pytest.mark.parametrize(
    ("num_splits", "rows"), [(1, 3), (2, 3), (4, 3), (1, 64), (2, 65), (1, 128)]
)
def test_decode_ignores_whatever_is_past_either_length(
    num_splits: int, rows: int, backend: str
) -> None:
    """BC-03, flashinfer-ai/flashinfer#5095, for the primary and the extra list at once."""
    cache = _rows_with_loud_tail().view(16, 4, 1, 512)
    q = oracles.exact_queries(rows, 2, 512)
    lengths = lengths_of(*([5, 0, 64] * rows)[:rows])
    extra_lengths = lengths_of(*([0, 7, 33] * rows)[:rows])
    base = torch.randint(2, 64, (rows, 64), dtype=torch.int32)
    base[:, 1], base[:, 3] = -1, -1
    column = torch.arange(64).unsqueeze(0)

    def run(tail: int, extra_tail: int) -> tuple[Tensor, ...]:
        out, lse = mlacast.sparse_mla_decode(
            q,
            cache,
            torch.where(column >= lengths.unsqueeze(1), torch.full_like(base, tail), base),
            kv_format=mlacast.KvFormat.BF16,
            sm_scale=SM_SCALE,
            topk_length=lengths,
            extra_k_cache=cache,
            extra_indices=torch.where(
                column >= extra_lengths.unsqueeze(1), torch.full_like(base, extra_tail), base
            ),
            extra_topk_length=extra_lengths,
            extra_kv_format=mlacast.KvFormat.BF16,
            num_splits=num_splits,
            backend=backend,
        )
        assert isinstance(out, Tensor)
        return out, lse

    expected = run(-1, -1)
    for tail in _tails(64).values():
        for variant in (run(tail, -1), run(-1, tail)):
            for left, right in zip(variant, expected, strict=True):
                assert oracles.same_bits(left, right)


def test_holes_inside_the_length_add_nothing_to_the_denominator(backend: str) -> None:
    """BC-03, vllm-project/vllm#36616: a -1 inside the counted part is not a key with logit zero."""
    kv = one_hot_rows(2, 512, 0, 1)
    q = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    out, _, lse = mlacast.sparse_mla_prefill(
        q,
        kv,
        indices_of([[0, -1, 1, -1]]),
        sm_scale=1.0,
        topk_length=lengths_of(4),
        backend=backend,
    )
    assert oracles.plain(out)[0, 0, :2].tolist() == [0.5, 0.5]
    # Both logits are zero, so only the logarithm is rounded: an ulp of float32, 6e-8.
    assert float(lse) == pytest.approx(math.log(2.0), abs=1e-6)


NASTY_ROW = [0, 7, 8, 1000, 2147483647, -1, -2, -2147483648, 3]
CLEAN_ROW = [0, 7, 3]


@pytest.mark.parametrize("width", [512, 576])
def test_indices_outside_the_rows_read_nothing(width: int, backend: str) -> None:
    """BC-22, vllm-project/vllm#55744: eight rows in the middle of a larger buffer of NaN."""
    buffer = torch.full((40, width), math.nan, dtype=torch.bfloat16)
    kv = buffer[16:24]
    kv.copy_(torch.randn(8, width))
    q = oracles.exact_queries(1, 2, width)
    nasty, clean = (
        mlacast.sparse_mla_prefill(q, kv, indices_of([row]), sm_scale=SM_SCALE, backend=backend)
        for row in (NASTY_ROW, CLEAN_ROW)
    )
    for left, right in zip(nasty, clean, strict=True):
        assert oracles.same_bits(left, right)
    oracle = oracles.attend(q, oracles.select_rows(kv, indices_of([CLEAN_ROW])), sm_scale=SM_SCALE)
    oracles.assert_matches(nasty[0], nasty[2], oracle)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("layout", [V32, V4], ids=lambda layout: layout.name.lower())
def test_slots_outside_the_cache_read_nothing(
    layout: RecordLayout, num_splits: int, backend: str
) -> None:
    """BC-22, vllm-project/vllm#55744: a cache of eight slots in the middle of a buffer of NaN
    bytes.
    """
    records = cache_writers.draw_records(layout, 8)
    stride = cache_writers.page_bytes(layout, 4)
    flat = torch.full((6 * stride,), 0xFF, dtype=torch.uint8)
    cache_writers.put_records(flat, layout, 4, stride, 2 * stride, range(8), records)
    cache = cache_writers.cache_view(flat, layout, 2, 4, stride, 2 * stride)
    q = oracles.exact_queries(1, 2, layout.d_qk)

    def run(row: list[int], length: int | None = None) -> tuple[Tensor, ...]:
        out, lse = mlacast.sparse_mla_decode(
            q,
            cache,
            indices_of([row]),
            kv_format=mlacast.KvFormat.from_name(layout.name),
            sm_scale=SM_SCALE,
            topk_length=None if length is None else lengths_of(length),
            num_splits=num_splits,
            backend=backend,
        )
        assert isinstance(out, Tensor)
        return out, lse

    out, lse = run(NASTY_ROW)
    oracle = oracles.attend(
        q, oracles.select_rows(records.rows, indices_of([CLEAN_ROW])), sm_scale=SM_SCALE
    )
    oracles.assert_matches(out, lse, oracle)
    if num_splits == 1:
        for left, right in zip((out, lse), run(CLEAN_ROW), strict=True):
            assert oracles.same_bits(left, right)


def test_int64_indices_give_the_same_result_or_a_dtype_error(backend: str) -> None:
    """BC-22, vllm-project/vllm#55744."""
    kv, q = torch.randn(8, 512).bfloat16(), oracles.exact_queries(1, 2, 512)
    narrow = indices_of([NASTY_ROW])
    wide = torch.tensor([[*NASTY_ROW[:-1], 2**40]])
    wide[0, 2] = 3
    expected = mlacast.sparse_mla_prefill(q, kv, narrow, sm_scale=SM_SCALE, backend=backend)
    try:
        result = mlacast.sparse_mla_prefill(q, kv, wide, sm_scale=SM_SCALE, backend=backend)
    except ValueError as error:
        assert "indices" in str(error) and "int64" in str(error)
        return
    # The same three rows in another order: equal up to float32 rounding.
    oracle = oracles.attend(q, oracles.select_rows(kv, wide), sm_scale=SM_SCALE)
    oracles.assert_matches(result[0], result[2], oracle)
    assert torch.allclose(result[2], expected[2], rtol=1e-5)


def test_gather_outside_the_cache_reads_nothing(backend: str) -> None:
    """BC-22: rows for slots outside are zero even though the memory there is NaN."""
    buffer = torch.full((24, 1, 512), math.nan, dtype=torch.bfloat16)
    cache = buffer[8:16].view(2, 4, 1, 512)
    cache.zero_().add_(1.0)
    slots = torch.tensor(NASTY_ROW)
    rows = mlacast.kv_cache_gather(cache, slots, mlacast.KvFormat.BF16, backend=backend)
    inside = ((slots >= 0) & (slots < 8)).float().unsqueeze(1)
    assert torch.equal(rows.float(), inside.expand(-1, 512))


def test_append_outside_the_cache_writes_nothing(backend: str) -> None:
    """BC-22: the bytes before and after the cache keep their values."""
    buffer = torch.full((24, 1, 512), 5.0, dtype=torch.bfloat16)
    cache = buffer[8:16].view(2, 4, 1, 512)
    latent = torch.randn(len(NASTY_ROW), 512).bfloat16()
    mlacast.kv_cache_append(
        latent, torch.tensor(NASTY_ROW), cache, mlacast.KvFormat.BF16, backend=backend
    )
    expected = torch.full_like(buffer, 5.0)
    for row, slot in enumerate(NASTY_ROW):
        if 0 <= slot < 8:
            expected[8 + slot, 0] = latent[row]
    assert torch.equal(buffer, expected)

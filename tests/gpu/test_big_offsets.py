"""Addresses past 2**31 bytes and past 2**31 elements, against compact copies, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests.gpu import steps
from tests.gpu.steps import CUDA, all_same, copy_storage
from tests.scenarios import CacheCase, draw_indices

pytestmark = pytest.mark.usefixtures("each_backend")

SM_SCALE = 0.05
# Elements; as bf16 9 GB. Wrapped 32-bit offsets from the middle stay inside, so an overflow gives
# wrong numbers and not a dead context.
BIG = 4_500_000_000
MIDDLE = 2_200_000_000


@pytest.fixture
def memory() -> Tensor:
    """Uninitialised bf16 elements."""
    free, _ = torch.cuda.mem_get_info()
    if free < 12e9:
        pytest.skip(f"needs 12 GB of free device memory, has {free / 1e9:.1f}")
    return torch.empty(BIG, dtype=torch.bfloat16, device=CUDA)


def _call(q: Tensor, kv: Tensor, indices: Tensor, **options: Any) -> tuple[Any, ...]:
    return mlacast.sparse_mla_prefill(
        q, kv, indices, sm_scale=SM_SCALE, backend=steps.BACKEND, **options
    )


def _prefill_inputs(heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(3, heads, 512, dtype=torch.bfloat16, device=CUDA)
    kv = torch.randn(64, 512, dtype=torch.bfloat16, device=CUDA)
    return q, kv, draw_indices(3, 40, 64).to(CUDA)


@pytest.mark.parametrize("name", ["V4", "V32", "V41", "V41_FP4", "FP8", "BF16"])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_slots_past_two_gigabytes(name: str, num_splits: int, memory: Tensor) -> None:
    """BC-23: pages of a small cache at the start, on both sides of 2**31 and at the end."""
    width = 576 if name in ("V32", "FP8", "BF16") else 512
    small = CacheCase(name, width).fill(num_pages=4, page_size=64, slots=range(256))
    compact = copy_storage(small.cache)
    step = compact.stride(0)
    flat = memory.view(compact.dtype)
    pages = flat.numel() // step
    big = flat.as_strided((pages, *compact.shape[1:]), compact.stride())
    places = [0, 2**31 // step, 2**31 // step + 1, pages - 1]
    for page, place in enumerate(places):
        flat[place * step : (place + 1) * step] = compact.as_strided((step,), (1,), page * step)
    indices = torch.randint(0, 256, (3, 50), dtype=torch.int32)
    moved = (torch.tensor(places)[indices.long() // 64] * 64 + indices % 64).to(torch.int32)
    q = torch.randn(3, 8, width, dtype=torch.bfloat16, device=CUDA)
    results = [
        mlacast.sparse_mla_decode(
            q,
            cache,
            slots.to(CUDA),
            kv_format=mlacast.KvFormat.from_name(name),
            sm_scale=SM_SCALE,
            num_splits=num_splits,
            backend=steps.BACKEND,
        )
        for cache, slots in ((compact, indices), (big, moved))
    ]
    assert all_same(results[0], results[1])


@pytest.mark.parametrize("name", ["V4", "V32", "V41_FP4", "FP8", "BF16"])
def test_pages_eight_gigabytes_apart(name: str, memory: Tensor) -> None:
    """A page stride past 2**31 words of four bytes: a product in 32 bits would leave the memory."""
    width = 576 if name in ("V32", "FP8", "BF16") else 512
    small = CacheCase(name, width).fill(num_pages=2, page_size=64, slots=range(128))
    compact = copy_storage(small.cache)
    flat = memory.view(compact.dtype)
    stride = (2**33 + 2**20) // compact.element_size()
    far = flat.as_strided(compact.shape, (stride, *compact.stride()[1:]))
    for page in range(2):
        step = compact.stride(0)
        flat[page * stride :][:step] = compact.as_strided((step,), (1,), page * step)
    indices = torch.randint(0, 128, (3, 50), dtype=torch.int32, device=CUDA)
    q = torch.randn(3, 8, width, dtype=torch.bfloat16, device=CUDA)
    results = [
        mlacast.sparse_mla_decode(
            q,
            cache,
            indices,
            kv_format=mlacast.KvFormat.from_name(name),
            sm_scale=SM_SCALE,
            backend=steps.BACKEND,
        )
        for cache in (compact, far)
    ]
    assert all_same(results[0], results[1])


def test_prefill_rows_past_two_to_the_31_elements(memory: Tensor) -> None:
    q, kv, indices = _prefill_inputs(8)
    rows = BIG // 512
    big = memory[: rows * 512].view(rows, 512)
    big[rows - 64 :] = kv
    moved = torch.where((indices >= 0) & (indices < 64), indices + (rows - 64), -1)
    assert all_same(_call(q, kv, indices), _call(q, big, moved.to(torch.int32)))


def test_token_index_times_query_stride(memory: Tensor) -> None:
    q, kv, indices = _prefill_inputs(8)
    far = memory.as_strided((3, 8, 512), (2_000_000_000, 512, 1))
    far.copy_(q)
    assert all_same(_call(q, kv, indices), _call(far, kv, indices))


def test_head_index_times_query_stride(memory: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries laid out head by head: 127 heads of 17 million elements.

    The portable kernel serves them, whichever backend is asked.
    """
    q, kv, indices = _prefill_inputs(128)
    far = memory.as_strided((3, 128, 512), (512, 17_000_000, 1), MIDDLE)
    far.copy_(q)
    with monkeypatch.context() as patch:
        patch.setattr(steps, "BACKEND", "triton")
        expected = _call(q, kv, indices)
    assert all_same(expected, _call(far, kv, indices))


def test_token_index_times_output_stride(memory: Tensor) -> None:
    q, kv, indices = _prefill_inputs(8)
    far = memory.as_strided((3, 8, 512), (2_000_000_000, 512, 1))
    expected = _call(q, kv, indices)
    actual = _call(q, kv, indices, out=far)
    assert torch.equal(actual[0].contiguous(), expected[0])

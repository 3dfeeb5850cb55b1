"""Caches past 2**31 bytes: equal to a compact copy, bytes at the hand-computed address.

The buffers are never filled: only the touched pages cost memory.
"""

from __future__ import annotations

import pytest
import torch

from mlacast.descriptors.kv_format import KvFormat
from tests.cache_writers import NVFP4_384, V4, V32, V41_FP4, RecordLayout
from tests.hand_records import layout_id

PAGE_STRIDE = 1_039_680
PAGES = (0, 2065, 2066, 2067)


def latents(d_qk: int) -> torch.Tensor:
    """bfloat16 [8, d]."""
    return torch.randn(8, d_qk).to(torch.bfloat16)


@pytest.mark.parametrize("layout", [V4, V41_FP4, NVFP4_384], ids=layout_id)
def test_page_stride_of_a_packed_multi_layer_pool(layout: RecordLayout) -> None:
    fmt = KvFormat.from_name(layout.name)
    width = layout.data_bytes + layout.scale_bytes
    # Page 2066 starts at 2**31 + 495,232.
    flat = torch.empty(2068 * PAGE_STRIDE, dtype=torch.uint8)
    large = flat.as_strided((2068, 64, 1, width), (PAGE_STRIDE, width, width, 1))
    compact = fmt.allocate(4, 64)
    tokens = [0, 63]
    large_slots = torch.tensor([page * 64 + token for page in PAGES for token in tokens])
    compact_slots = torch.tensor([page * 64 + token for page in range(4) for token in tokens])
    latent = latents(layout.d_qk)
    fmt.append(latent, large_slots.int(), large)
    fmt.append(latent, compact_slots, compact)
    rows = fmt.gather(large, large_slots.int())
    assert torch.equal(rows, fmt.gather(compact, compact_slots))
    assert bool((rows.float() != 0).any(dim=1).all())
    for row, page in enumerate(PAGES):
        compact_page = compact[row].as_strided((64 * width,), (1,))
        for token in tokens:
            data = slice(token * layout.data_bytes, (token + 1) * layout.data_bytes)
            scale_at = 64 * layout.data_bytes + token * layout.scale_bytes
            scale = slice(scale_at, scale_at + layout.scale_bytes)
            large_page = flat[page * PAGE_STRIDE : page * PAGE_STRIDE + 64 * width]
            assert torch.equal(large_page[data], compact_page[data])
            assert torch.equal(large_page[scale], compact_page[scale])


def test_contiguous_656_byte_cache() -> None:
    # Slot 3,273,604 starts at 2**31 + 576.
    flat = torch.empty(51_200 * 64 * 656, dtype=torch.uint8)
    large = flat.view(51_200, 64, 1, 656)
    slots = torch.tensor([0, 3_273_602, 3_273_603, 3_273_604, 3_276_799], dtype=torch.int32)
    latent = latents(V32.d_qk)[:5]
    KvFormat.V32.append(latent, slots, large)
    compact = KvFormat.V32.allocate(1, 5)
    KvFormat.V32.append(latent, torch.arange(5), compact)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(flat[slot * 656 : (slot + 1) * 656], compact[0, row, 0])
    rows = KvFormat.V32.gather(large, slots)
    assert torch.equal(rows, KvFormat.V32.gather(compact, torch.arange(5)))


def test_contiguous_bf16_cache() -> None:
    # 64 * 576 * 2 bytes a page: page 29,128 starts past 2**31.
    large = torch.empty(29_140, 64, 1, 576, dtype=torch.bfloat16)
    slots = torch.tensor([5, 29_128 * 64, 29_139 * 64 + 63], dtype=torch.int32)
    latent = latents(576)[:3]
    KvFormat.BF16.append(latent, slots, large)
    assert torch.equal(large[29_139, 63, 0], latent[2])
    assert torch.equal(large[29_128, 0, 0], latent[1])
    assert torch.equal(KvFormat.BF16.gather(large, slots), latent)

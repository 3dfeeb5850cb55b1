"""Where records stand in a cache, also past 2**31 bytes, without such a cache.

BC-23, vllm-project/vllm-xpu-kernels#445: a product of 32 bits wrapped. The big buffers themselves
are tested on the device (``tests/gpu/test_big_offsets.py``).
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.probes import record_places_of

# A packed allocation of many layers, and a plain cache of 656-byte records.
PACKED = (64, 1_039_680)
PLAIN = (64, 64 * 656)
COUNT = 8


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("page", "inline", "data", "scale"),
    [(PACKED, False, 576, 8), (PACKED, True, 256, 32), (PLAIN, True, 656, 0)],
)
def test_places_past_two_gigabytes(
    page: tuple[int, int], inline: bool, data: int, scale: int, dtype: torch.dtype
) -> None:
    page_size, stride = page
    far = 2**31 // stride
    pages = [0, 1, far - 1, far, far + 1, far + 2, 2 * far + 3]
    slots = [number * page_size + offset for number, offset in zip(pages, range(7), strict=True)]
    slots.append(3_273_604)
    out = record_places_of(torch.tensor(slots, dtype=dtype), page_size, stride, inline, data, scale)
    for slot, at, scales_at in zip(slots, *out.tolist(), strict=True):
        start, offset = slot // page_size * stride, slot % page_size
        if inline:
            assert at == start + offset * (data + scale) and scales_at == at + data
        else:
            assert at == start + offset * data
            assert scales_at == start + page_size * data + offset * scale
    assert max(out[0].tolist()) > 2**32


@pytest.mark.parametrize("inline", [False, True])
def test_places_of_pages_that_are_gigabytes_apart(inline: bool) -> None:
    page_size, stride, data, scale = 64, (9 << 30) + 576, 512, 16
    slots = [63, 64, 130, 200, 319, 320, 400, 511]
    out = record_places_of(torch.tensor(slots), page_size, stride, inline, data, scale)
    for slot, at, scales_at in zip(slots, *out.tolist(), strict=True):
        start, offset = slot // page_size * stride, slot % page_size
        assert at == start + offset * (data + scale if inline else data)
        assert scales_at == (at + data if inline else start + page_size * data + offset * scale)


def test_what_does_not_count_stands_at_slot_zero() -> None:
    out = record_places_of(torch.full((COUNT,), -1), 64, 1_039_680, True, 512, 16)
    assert out[0].tolist() == [0] * COUNT and out[1].tolist() == [512] * COUNT

"""chunk32 (output groups) and chunk16 (queries): loops, golden positions, inverses, scales."""

from __future__ import annotations

import pytest
import torch

from mlacast.layouts.element_order import (
    from_chunk16,
    from_chunk32,
    from_chunk32_sf,
    to_chunk16,
    to_chunk32,
    to_chunk32_sf,
)

HEADS = (1, 2, 3, 8)


def counted(*shape: int) -> torch.Tensor:
    """int32 of distinct values."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


def hand_chunk32(x: torch.Tensor, heads: int, per_head: int, chunk: int) -> torch.Tensor:
    """Chunk c of head h goes to position c * heads + h inside its group."""
    out = torch.empty_like(x)
    for head in range(heads):
        for index in range(per_head // chunk):
            source = head * per_head + index * chunk
            target = (index * heads + head) * chunk
            out[..., target : target + chunk] = x[..., source : source + chunk]
    return out


@pytest.mark.parametrize("heads", HEADS)
def test_chunk32_equals_the_loops(heads: int) -> None:
    x = counted(3, 2, heads * 512)
    moved = to_chunk32(x)
    assert torch.equal(moved, hand_chunk32(x, heads, 512, 32))
    assert torch.equal(from_chunk32(moved), x)
    assert torch.equal(to_chunk32(from_chunk32(x)), x)


@pytest.mark.parametrize("heads", HEADS)
def test_chunk32_scales_move_like_their_chunks(heads: int) -> None:
    scales = counted(3, 2, heads * 16)
    moved = to_chunk32_sf(scales)
    assert torch.equal(moved, hand_chunk32(scales, heads, 16, 1))
    assert torch.equal(from_chunk32_sf(moved), scales)
    data = to_chunk32(scales.repeat_interleave(32, dim=-1))
    assert torch.equal(data[..., ::32], moved)


def test_golden_positions_of_chunk32() -> None:
    # 8 heads: chunk 0 of head 1 stands at element 32, chunk 1 of head 0 at element 256.
    x = counted(1, 1, 8 * 512)
    moved = to_chunk32(x)[0, 0]
    assert moved[32] == 512
    assert moved[256] == 32
    assert moved[(15 * 8 + 7) * 32 + 31] == 8 * 512 - 1
    assert moved[(3 * 8 + 5) * 32 + 6] == 5 * 512 + 3 * 32 + 6


def test_one_head_a_group_is_the_natural_order() -> None:
    x = counted(2, 3, 512)
    assert torch.equal(to_chunk32(x), x)
    assert torch.equal(to_chunk32_sf(counted(2, 3, 16)), counted(2, 3, 16))


@pytest.mark.parametrize("heads", [1, 2, 8, 64])
def test_chunk16_equals_the_loops(heads: int) -> None:
    q = counted(2, heads, 512)
    moved = to_chunk16(q)
    assert moved.shape == q.shape
    flat = moved.reshape(2, heads * 512)
    for head in range(heads):
        for dim in (0, 1, 15, 16, 17, 255, 448, 511):
            position = dim // 16 * (heads * 16) + head * 16 + dim % 16
            assert torch.equal(flat[:, position], q[:, head, dim])
    assert torch.equal(from_chunk16(moved), q)
    assert torch.equal(to_chunk16(from_chunk16(q)), q)


def test_golden_positions_of_chunk16() -> None:
    flat = to_chunk16(counted(1, 64, 512)).flatten()
    assert flat[16] == 512  # head 1, dim 0
    assert flat[1024] == 16  # head 0, dim 16
    assert flat[31 * 1024 + 63 * 16 + 15] == 64 * 512 - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_dtypes_pass_through(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 127, (2, 2, 1024), dtype=torch.uint8)
    x = raw.view(dtype) if dtype == torch.float8_e4m3fn else raw.to(dtype)
    moved = to_chunk32(x)
    assert moved.dtype == dtype
    assert torch.equal(from_chunk32(moved).float(), x.float())
    q = x.reshape(4, 2, 512)
    assert to_chunk16(q).dtype == dtype
    assert torch.equal(from_chunk16(to_chunk16(q)).float(), q.float())


def test_strided_input_and_no_tokens() -> None:
    x = counted(4, 2, 1024).transpose(0, 1)
    assert torch.equal(to_chunk32(x), hand_chunk32(x.contiguous(), 2, 512, 32))
    assert to_chunk32(x[:0]).shape == (0, 4, 1024)
    q = counted(2, 8, 512).transpose(0, 1)
    assert torch.equal(to_chunk16(q), to_chunk16(q.contiguous()))
    assert to_chunk16(q[:0]).shape == (0, 2, 512)

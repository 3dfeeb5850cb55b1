"""Records inside pages: inline and footer placement, any page size and page stride, canaries."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlacast.layouts.paging import PageLayout, read_records, write_records

PAGE_SIZES = (1, 2, 3, 5, 63, 64, 65, 256)


@dataclass(frozen=True)
class Plane:
    """Sizes of a record and where its scales go."""

    data_bytes: int
    scale_bytes: int
    placement: str

    def __str__(self) -> str:
        return f"{self.data_bytes}+{self.scale_bytes}-{self.placement}"

    @property
    def token_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    def data_at(self, token: int) -> int:
        """First data byte of a token, from the start of its page."""
        return token * (self.token_bytes if self.placement == "inline" else self.data_bytes)

    def scale_at(self, token: int, page_size: int) -> int:
        """First scale byte of a token, from the start of its page."""
        if self.placement == "inline":
            return token * self.token_bytes + self.data_bytes
        return page_size * self.data_bytes + token * self.scale_bytes


V4 = Plane(576, 8, "footer")
PLANES = (
    Plane(656, 0, "inline"),
    V4,
    Plane(512, 16, "footer"),
    Plane(256, 32, "footer"),
    Plane(512, 16, "inline"),
    Plane(256, 32, "inline"),
    Plane(352, 32, "footer"),
)


def cache_of(
    flat: torch.Tensor, plane: Plane, num_pages: int, page_size: int, stride: int, start: int = 0
) -> torch.Tensor:
    """The nominal [num_pages, page_size, 1, token_bytes] view of a byte buffer."""
    shape = (num_pages, page_size, 1, plane.token_bytes)
    return flat.as_strided(shape, (stride, plane.token_bytes, plane.token_bytes, 1), start)


def distinct(n: int, width: int, seed: int) -> torch.Tensor:
    """uint8 [n, width] of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, width), dtype=torch.uint8, generator=generator)


def test_golden_offsets_of_a_footer() -> None:
    layout = PageLayout(576, 8, "footer", 64)
    assert [layout.data_offset(token) for token in (0, 1, 63)] == [0, 576, 36288]
    assert [layout.scale_offset(token) for token in (0, 1, 63)] == [36864, 36872, 37368]


def test_golden_offsets_of_inline_scales() -> None:
    layout = PageLayout(512, 16, "inline", 64)
    assert [layout.data_offset(token) for token in (0, 1, 63)] == [0, 528, 33264]
    assert [layout.scale_offset(token) for token in (0, 1, 63)] == [512, 1040, 33776]


@pytest.mark.parametrize("plane", PLANES, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_offsets_tile_the_page(plane: Plane, page_size: int) -> None:
    layout = PageLayout(plane.data_bytes, plane.scale_bytes, plane.placement, page_size)
    used: list[int] = []
    for token in range(page_size):
        assert layout.data_offset(token) == plane.data_at(token)
        assert layout.scale_offset(token) == plane.scale_at(token, page_size)
        used += range(layout.data_offset(token), layout.data_offset(token) + plane.data_bytes)
        used += range(layout.scale_offset(token), layout.scale_offset(token) + plane.scale_bytes)
    assert sorted(used) == list(range(page_size * plane.token_bytes))


@pytest.mark.parametrize("plane", PLANES, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_write_then_read_touches_only_addressed_bytes(plane: Plane, page_size: int) -> None:
    num_pages, start = 4, 48
    stride = page_size * plane.token_bytes + 80
    flat = torch.full((start + num_pages * stride + 48,), 0x5A, dtype=torch.uint8)
    cache = cache_of(flat, plane, num_pages, page_size, stride, start)
    slots = sorted({0, page_size - 1, page_size, 2 * page_size + page_size // 2, 4 * page_size - 1})
    slots = slots[::-1]
    data = distinct(len(slots), plane.data_bytes, 1)
    scale = distinct(len(slots), plane.scale_bytes, 2)
    write_records(cache, torch.tensor(slots), data, scale, plane.placement)

    expected = torch.full_like(flat, 0x5A)
    for row, slot in enumerate(slots):
        page, token = divmod(slot, page_size)
        data_at = start + page * stride + plane.data_at(token)
        scale_at = start + page * stride + plane.scale_at(token, page_size)
        expected[data_at : data_at + plane.data_bytes] = data[row]
        expected[scale_at : scale_at + plane.scale_bytes] = scale[row]
    assert torch.equal(flat, expected)

    shuffled = torch.tensor(slots[1:] + slots[:1], dtype=torch.int32)
    read_data, read_scale = read_records(
        cache, shuffled, plane.data_bytes, plane.scale_bytes, plane.placement
    )
    assert torch.equal(read_data, data.roll(-1, 0))
    assert torch.equal(read_scale, scale.roll(-1, 0))
    assert torch.equal(flat, expected)


def test_read_may_repeat_slots_and_takes_none() -> None:
    flat = distinct(1, 3 * 5 * 584, 3)[0]
    cache = cache_of(flat, V4, 3, 5, 5 * 584)
    data, scale = read_records(cache, torch.tensor([7, 7, 2]), 576, 8, "footer")
    assert torch.equal(data[0], data[1])
    assert torch.equal(data[2], flat[2 * 576 : 3 * 576])
    assert torch.equal(scale[2], flat[5 * 576 + 16 : 5 * 576 + 24])
    none = torch.empty(0, dtype=torch.int64)
    data, scale = read_records(cache, none, 576, 8, "footer")
    assert data.shape == (0, 576)
    assert scale.shape == (0, 8)
    before = flat.clone()
    write_records(cache, none, data, scale, "footer")
    assert torch.equal(flat, before)


def test_three_dimensional_cache_and_other_byte_types() -> None:
    flat = distinct(1, 3 * 5 * 584, 4)[0]
    cache = cache_of(flat, V4, 3, 5, 5 * 584)
    slots = torch.tensor([14, 0, 6])
    data, scale = read_records(cache, slots, 576, 8, "footer")
    for view in (cache[:, :, 0], cache.view(torch.int8), cache.view(torch.float8_e4m3fn)):
        other_data, other_scale = read_records(view, slots, 576, 8, "footer")
        assert other_data.dtype == other_scale.dtype == torch.uint8
        assert torch.equal(other_data, data)
        assert torch.equal(other_scale, scale)
        before = flat.clone()
        write_records(view, slots, data.roll(1, 0), scale.roll(1, 0), "footer")
        assert not torch.equal(flat, before)
        write_records(view, slots, data, scale, "footer")
        assert torch.equal(flat, before)


def test_strides_of_single_pages_and_tokens_mean_nothing() -> None:
    flat = distinct(1, 3 * 584, 5)[0]
    one_page = flat.as_strided((1, 3, 1, 584), (7, 584, 10**9, 1))
    data, scale = read_records(one_page, torch.tensor([2]), 576, 8, "footer")
    assert torch.equal(data[0], flat[2 * 576 : 3 * 576])
    assert torch.equal(scale[0], flat[3 * 576 + 16 : 3 * 576 + 24])
    one_token = flat.as_strided((3, 1, 1, 584), (584, 5, 0, 1))
    data, scale = read_records(one_token, torch.tensor([2]), 576, 8, "footer")
    assert torch.equal(data[0], flat[2 * 584 : 2 * 584 + 576])
    assert torch.equal(scale[0], flat[2 * 584 + 576 : 3 * 584])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_round_trip_of_any_placement(draw: st.DataObject) -> None:
    placement = draw.draw(st.sampled_from(["inline", "footer"]))
    plane = Plane(draw.draw(st.integers(1, 20)), draw.draw(st.integers(0, 9)), placement)
    num_pages, page_size = draw.draw(st.integers(1, 5)), draw.draw(st.integers(1, 7))
    stride = page_size * plane.token_bytes + draw.draw(st.integers(0, 11))
    flat = torch.full((num_pages * stride,), 0x5A, dtype=torch.uint8)
    cache = cache_of(flat, plane, num_pages, page_size, stride)
    slots = draw.draw(st.permutations(range(num_pages * page_size)))
    slots = slots[: draw.draw(st.integers(0, len(slots)))]
    data = distinct(len(slots), plane.data_bytes, 6)
    scale = distinct(len(slots), plane.scale_bytes, 7)
    chosen = torch.tensor(slots, dtype=torch.int64)
    write_records(cache, chosen, data, scale, placement)
    back = read_records(cache, chosen, plane.data_bytes, plane.scale_bytes, placement)
    assert torch.equal(back[0], data)
    assert torch.equal(back[1], scale)
    page_padding = flat.reshape(num_pages, stride)[:, page_size * plane.token_bytes :]
    assert bool((page_padding == 0x5A).all())


@pytest.mark.parametrize("plane", [V4, Plane(256, 32, "footer"), Plane(512, 16, "inline")], ids=str)
def test_page_offsets_past_two_gibibytes(plane: Plane) -> None:
    """Page 2066 starts at 2**31 + 495,232. Only the touched pages cost memory."""
    stride, page_size = 1_039_680, 64
    flat = torch.empty(2068 * stride, dtype=torch.uint8)
    cache = cache_of(flat, plane, 2068, page_size, stride)
    slots = [page * page_size + 63 for page in (0, 2065, 2066, 2067)]
    data, scale = distinct(4, plane.data_bytes, 8), distinct(4, plane.scale_bytes, 9)
    write_records(cache, torch.tensor(slots, dtype=torch.int32), data, scale, plane.placement)
    for row, page in enumerate((0, 2065, 2066, 2067)):
        data_at = page * stride + plane.data_at(63)
        scale_at = page * stride + plane.scale_at(63, page_size)
        assert torch.equal(flat[data_at : data_at + plane.data_bytes], data[row])
        assert torch.equal(flat[scale_at : scale_at + plane.scale_bytes], scale[row])
    back = read_records(
        cache,
        torch.tensor(slots, dtype=torch.int32),
        plane.data_bytes,
        plane.scale_bytes,
        plane.placement,
    )
    assert torch.equal(back[0], data)
    assert torch.equal(back[1], scale)

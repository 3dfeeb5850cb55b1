"""KvFormat as data: names, sizes, byte maps, page bytes, allocation."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mlacast.descriptors.kv_format import KvFormat
from tests.cache_writers import RecordLayout
from tests.hand_records import BYTE_LAYOUTS, layout_id

PACKED = tuple(layout for layout in BYTE_LAYOUTS if layout.name != "FP8")
NAMES = (
    "BF16",
    "FP8",
    "V32",
    "V4",
    "V41",
    "V41_FP4",
    "V41_INLINE",
    "V41_FP4_INLINE",
    "NVFP4_384",
)


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    kv_format = getattr(KvFormat, name)
    assert isinstance(kv_format, KvFormat)
    assert kv_format.name == name
    assert repr(kv_format) == f"KvFormat.{name}"
    assert KvFormat.from_name(name) is kv_format or KvFormat.from_name(name) == kv_format


def test_formats_are_distinct_hashable_and_frozen() -> None:
    formats = [getattr(KvFormat, name) for name in NAMES]
    assert len(set(formats)) == len(NAMES)
    assert len({hash(kv_format) for kv_format in formats}) == len(NAMES)
    assert KvFormat.V41 != KvFormat.V41_INLINE
    with pytest.raises(dataclasses.FrozenInstanceError):
        KvFormat.V4.name = "V5"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["", "v4", "V42", "656"])
def test_unknown_names_are_refused_with_the_list(name: str) -> None:
    with pytest.raises(ValueError, match="V41_FP4_INLINE"):
        KvFormat.from_name(name)


@pytest.mark.parametrize("layout", PACKED, ids=layout_id)
def test_sizes(layout: RecordLayout) -> None:
    kv_format = KvFormat.from_name(layout.name)
    assert kv_format.d_qk == layout.d_qk
    assert kv_format.data_bytes == layout.data_bytes
    assert kv_format.scale_bytes == layout.scale_bytes
    assert kv_format.page_align == layout.page_align
    if layout.scale_bytes:
        assert kv_format.placement == ("footer" if layout.footer else "inline")
    assert kv_format.bytes_per_token() == layout.data_bytes + layout.scale_bytes


def test_bytes_per_token_of_the_table() -> None:
    expected = {
        "V32": 656,
        "V4": 584,
        "V41": 528,
        "V41_INLINE": 528,
        "V41_FP4": 288,
        "V41_FP4_INLINE": 288,
        "NVFP4_384": 384,
    }
    for name, size in expected.items():
        assert KvFormat.from_name(name).bytes_per_token() == size
    assert KvFormat.FP8.bytes_per_token(576) == 576
    assert KvFormat.FP8.bytes_per_token(512) == 512
    assert KvFormat.BF16.bytes_per_token(576) == 1152
    assert KvFormat.BF16.bytes_per_token(512) == 1024


def test_width_of_bf16_and_fp8_comes_from_the_caller() -> None:
    for kv_format in (KvFormat.BF16, KvFormat.FP8):
        assert kv_format.d_qk is None
        with pytest.raises(ValueError, match="d_qk"):
            kv_format.bytes_per_token()
        with pytest.raises(ValueError, match="d_qk"):
            kv_format.allocate(1, 2)


# (format, page size) -> bytes of a page. V4 rounds up to 576, V4.1 with a footer to 512.
PAGE_BYTES = {
    ("V32", 64): 41984,
    ("V32", 1): 656,
    ("V4", 64): 37440,
    ("V4", 1): 1152,
    ("V4", 72): 42048,
    ("V4", 256): 149760,
    ("V41", 64): 33792,
    ("V41", 1): 1024,
    ("V41", 32): 16896,
    ("V41", 65): 34816,
    ("V41_FP4", 64): 18432,
    ("V41_FP4", 1): 512,
    ("V41_FP4", 3): 1024,
    ("V41_INLINE", 1): 528,
    ("V41_INLINE", 65): 34320,
    ("V41_FP4_INLINE", 3): 864,
    ("NVFP4_384", 3): 1152,
    ("NVFP4_384", 64): 24576,
}


@pytest.mark.parametrize(("name", "page_size"), PAGE_BYTES)
def test_page_bytes_and_allocation(name: str, page_size: int, poisoned_empty: None) -> None:
    kv_format = KvFormat.from_name(name)
    page_bytes = PAGE_BYTES[name, page_size]
    assert kv_format.page_bytes(page_size) == page_bytes
    cache = kv_format.allocate(3, page_size)
    width = kv_format.bytes_per_token()
    assert cache.dtype == torch.uint8
    assert cache.shape == (3, page_size, 1, width)
    assert cache.stride(0) == page_bytes
    assert cache.stride(1) == width
    assert cache.stride(3) == 1
    assert cache.untyped_storage().nbytes() >= 3 * page_bytes
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    assert bool((raw == 0).all())


@pytest.mark.parametrize("d_qk", [512, 576])
def test_allocation_of_bf16_and_fp8(d_qk: int, poisoned_empty: None) -> None:
    for kv_format, dtype in ((KvFormat.BF16, torch.bfloat16), (KvFormat.FP8, torch.float8_e4m3fn)):
        cache = kv_format.allocate(3, 5, d_qk=d_qk)
        assert cache.dtype == dtype
        assert cache.shape == (3, 5, 1, d_qk)
        assert cache.is_contiguous()
        assert bool((cache.float() == 0).all())
        assert kv_format.page_bytes(5, d_qk) == 5 * d_qk * dtype.itemsize


@pytest.mark.parametrize("layout", PACKED, ids=layout_id)
def test_allocation_without_pages_and_the_given_width(layout: RecordLayout) -> None:
    kv_format = KvFormat.from_name(layout.name)
    width = layout.data_bytes + layout.scale_bytes
    assert kv_format.allocate(0, 64).shape == (0, 64, 1, width)
    assert kv_format.allocate(1, 2, d_qk=layout.d_qk).shape == (1, 2, 1, width)
    with pytest.raises(ValueError, match=str(layout.d_qk)):
        kv_format.allocate(1, 2, d_qk=layout.d_qk + 64)


# dtype and extent of every field, data plane then scale plane
BYTE_MAPS = {
    "V32": ([(0, 512), (512, 528), (528, 656)], []),
    "V4": ([(0, 448), (448, 576)], [(0, 7), (7, 8)]),
    "V41": ([(0, 512)], [(0, 16)]),
    "V41_INLINE": ([(0, 512)], [(0, 16)]),
    "V41_FP4": ([(0, 256)], [(0, 32)]),
    "V41_FP4_INLINE": ([(0, 256)], [(0, 32)]),
    "NVFP4_384": ([(0, 224), (224, 352)], [(0, 28), (28, 32)]),
}


@pytest.mark.parametrize("name", BYTE_MAPS)
def test_byte_map(name: str) -> None:
    fields = KvFormat.from_name(name).byte_map
    planes = {
        plane: [(field.start, field.stop) for field in fields if field.plane == plane]
        for plane in ("data", "scale")
    }
    assert (planes["data"], planes["scale"]) == BYTE_MAPS[name]
    assert len(fields) == len(planes["data"]) + len(planes["scale"])
    for field in fields:
        assert field.name
        assert field.dtype
        with pytest.raises(dataclasses.FrozenInstanceError):
            field.start = 1  # type: ignore[misc]

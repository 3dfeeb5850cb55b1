"""What check_cache accepts, and its sentences: argument, format, expected and received bytes."""

from __future__ import annotations

import pytest
import torch

from mlacast.descriptors.kv_format import KvFormat
from tests.cache_writers import RecordLayout
from tests.hand_records import BYTE_LAYOUTS, layout_id

PACKED = tuple(layout for layout in BYTE_LAYOUTS if layout.name != "FP8")


def width_of(layout: RecordLayout) -> int:
    """Bytes of a token."""
    return layout.data_bytes + layout.scale_bytes


def check(kv_format: KvFormat, cache: object) -> tuple[int, int, int]:
    """Run the check under a made-up operation and argument name."""
    return kv_format.check_cache("some_op", "extra_k_cache", cache)


def size_message(name: str, expected: int, received: int) -> str:
    """Pattern of a wrong record size."""
    named = rf"(?=.*KvFormat\.{name}\b)(?=.*\b{expected}\b)"
    return rf"^some_op: extra_k_cache must {named}.*got .*\b{received}\b"


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_byte_types_and_ranks(layout: RecordLayout, dtype: torch.dtype) -> None:
    kv_format = KvFormat.from_name(layout.name)
    cache = torch.zeros(3, 5, 1, width_of(layout), dtype=torch.uint8).view(dtype)
    assert check(kv_format, cache) == (3, 5, layout.d_qk)
    assert check(kv_format, cache[:, :, 0]) == (3, 5, layout.d_qk)


@pytest.mark.parametrize("d_qk", [512, 576])
def test_bf16(d_qk: int) -> None:
    cache = torch.zeros(3, 5, 1, d_qk, dtype=torch.bfloat16)
    assert check(KvFormat.BF16, cache) == (3, 5, d_qk)
    assert check(KvFormat.BF16, cache[:, :, 0]) == (3, 5, d_qk)


@pytest.mark.parametrize("layout", PACKED, ids=layout_id)
def test_own_allocation_and_no_pages(layout: RecordLayout) -> None:
    kv_format = KvFormat.from_name(layout.name)
    assert check(kv_format, kv_format.allocate(3, 64)) == (3, 64, layout.d_qk)
    assert check(kv_format, kv_format.allocate(0, 64)) == (0, 64, layout.d_qk)
    assert check(kv_format, torch.zeros(0, 64, 1, width_of(layout), dtype=torch.uint8))[0] == 0


WRONG_SIZES = [
    pytest.param(layout, received, id=f"{layout.name}-{received}")
    for layout in PACKED
    for received in (512, 576, 528, 656, 584, 288, 384)
    if received != width_of(layout)
]


@pytest.mark.parametrize(("layout", "received"), WRONG_SIZES)
def test_other_record_sizes(layout: RecordLayout, received: int) -> None:
    kv_format = KvFormat.from_name(layout.name)
    for cache in (
        torch.zeros(2, 4, 1, received, dtype=torch.uint8),
        torch.zeros(2, 4, received, dtype=torch.float8_e4m3fn),
    ):
        with pytest.raises(ValueError, match=size_message(layout.name, width_of(layout), received)):
            check(kv_format, cache)


@pytest.mark.parametrize("received", [584, 528, 288, 656])
def test_per_tensor_fp8_is_512_or_576_wide(received: int) -> None:
    with pytest.raises(ValueError, match=size_message("FP8", 576, received)):
        check(KvFormat.FP8, torch.zeros(2, 4, 1, received, dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("value", [None, [1, 2], 7], ids=["None", "list", "int"])
def test_no_tensor(value: object) -> None:
    for kv_format in (KvFormat.V4, KvFormat.BF16, KvFormat.FP8):
        with pytest.raises(
            TypeError, match=r"^some_op: extra_k_cache must be a torch\.Tensor, got"
        ):
            check(kv_format, value)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int16], ids=str
)
def test_byte_formats_refuse_wider_dtypes(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    for kv_format, width in ((KvFormat.V4, 584), (KvFormat.V32, 656), (KvFormat.FP8, 576)):
        cache = torch.zeros(2, 4, 1, width).to(dtype)
        with pytest.raises(ValueError, match=rf"^some_op: extra_k_cache must .*got {name}"):
            check(kv_format, cache)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str
)
def test_bf16_refuses_other_dtypes(dtype: torch.dtype) -> None:
    cache = torch.zeros(2, 4, 1, 512).to(dtype)
    with pytest.raises(ValueError, match=r"^some_op: extra_k_cache must (?=.*bfloat16).*got "):
        check(KvFormat.BF16, cache)


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
@pytest.mark.parametrize("lead", [(), (4,), (2, 4, 1, 1)], ids=["1d", "2d", "5d"])
def test_rank(layout: RecordLayout, lead: tuple[int, ...]) -> None:
    cache = torch.zeros(*lead, width_of(layout), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^some_op: extra_k_cache must have shape .*got \["):
        check(KvFormat.from_name(layout.name), cache)


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
def test_two_kv_heads(layout: RecordLayout) -> None:
    # With one token a page no stride gives the second head away.
    for page_size in (4, 1):
        cache = torch.zeros(2, page_size, 2, width_of(layout), dtype=torch.uint8)
        pattern = rf"^some_op: extra_k_cache must .*got .*\[2, {page_size}, 2, "
        with pytest.raises(ValueError, match=pattern):
            check(KvFormat.from_name(layout.name), cache)


def strided(layout: RecordLayout, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A byte cache with these sizes and strides; the token width is appended to both."""
    span = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size > 1)
    flat = torch.zeros(span + 2 * width_of(layout), dtype=torch.uint8)
    return flat.as_strided((*sizes, width_of(layout)), (*strides, 1))


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
def test_free_page_stride(layout: RecordLayout) -> None:
    width = width_of(layout)
    for spare in (0, 16, 1_000_000):
        cache = strided(layout, (3, 4, 1), (4 * width + spare, width, width))
        assert check(KvFormat.from_name(layout.name), cache) == (3, 4, layout.d_qk)


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
@pytest.mark.parametrize("meaningless", [0, 7, 10**9])
def test_strides_of_size_one_dimensions_mean_nothing(
    layout: RecordLayout, meaningless: int
) -> None:
    width = width_of(layout)
    kv_format = KvFormat.from_name(layout.name)
    one_page = strided(layout, (1, 4, 1), (meaningless, width, meaningless))
    assert check(kv_format, one_page) == (1, 4, layout.d_qk)
    one_token = strided(layout, (3, 1, 1), (width + 8, meaningless, meaningless))
    assert check(kv_format, one_token) == (3, 1, layout.d_qk)


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
def test_overlapping_pages(layout: RecordLayout) -> None:
    width = width_of(layout)
    for stride in (4 * width - 1, width, 0):
        cache = strided(layout, (3, 4, 1), (stride, width, width))
        with pytest.raises(ValueError, match=r"^some_op: extra_k_cache must .*stride"):
            check(KvFormat.from_name(layout.name), cache)


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
def test_tokens_not_packed_inside_a_page(layout: RecordLayout) -> None:
    width = width_of(layout)
    for stride in (width + 8, width - 8, 0):
        cache = strided(layout, (3, 4, 1), (8 * width, stride, width))
        with pytest.raises(ValueError, match=r"^some_op: extra_k_cache must .*stride"):
            check(KvFormat.from_name(layout.name), cache)


@pytest.mark.parametrize("layout", BYTE_LAYOUTS, ids=layout_id)
def test_strided_bytes_of_a_token(layout: RecordLayout) -> None:
    width = width_of(layout)
    flat = torch.zeros(12 * 2 * width, dtype=torch.uint8)
    every_second = flat.view(3, 4, 1, 2 * width)[..., ::2]
    single_tokens = flat.view(12, 1, 1, 2 * width)[..., ::2]
    # The distance of the tokens is right, that of their bytes is not.
    interleaved = flat.as_strided((3, 4, 1, width), (8 * width, width, width, 2))
    for cache in (every_second, single_tokens, interleaved):
        with pytest.raises(ValueError, match=r"^some_op: extra_k_cache must .*stride"):
            check(KvFormat.from_name(layout.name), cache)


def test_bf16_strides() -> None:
    parent = torch.zeros(3, 4, 1, 576, dtype=torch.bfloat16)
    assert check(KvFormat.BF16, torch.zeros(3, 5, 1, 512, dtype=torch.bfloat16)[:, :4])[:2] == (
        3,
        4,
    )
    every_second = torch.zeros(3, 4, 1, 1024, dtype=torch.bfloat16)[..., ::2]
    one_page_thrice = parent[:1].expand(3, -1, -1, -1)
    for bad in (parent[..., :512], every_second, one_page_thrice):
        with pytest.raises(ValueError, match=r"^some_op: extra_k_cache must .*stride"):
            check(KvFormat.BF16, bad)


def test_append_and_gather_refuse_a_wrong_cache_and_write_nothing() -> None:
    cache = torch.full((2, 4, 1, 528), 0x5A, dtype=torch.uint8)
    slots = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"584.*528"):
        KvFormat.V4.append(torch.zeros(2, 512, dtype=torch.bfloat16), slots, cache)
    with pytest.raises(ValueError, match=r"584.*528"):
        KvFormat.V4.gather(cache, slots)
    assert bool((cache == 0x5A).all())

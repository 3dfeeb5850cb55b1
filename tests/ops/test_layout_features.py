"""What strides, numbers and pairs of pools ask of a backend, and who serves them on Hopper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.descriptors.kv_format import ALL_KV_FORMATS
from mlacast.dispatch.features import OUT_FEATURES
from mlacast.dispatch.select import select
from mlacast.ops import dense_mla_prefill
from mlacast.ops.layout import layout_features, plain_pages, plain_rows, pool_features

PLAIN = frozenset({"d_qk:512", "q_order:head", "out:bf16"})


def query(tokens: int = 3, heads: int = 4, gap: int = 0) -> Tensor:
    """Queries whose heads are ``512 + gap`` elements apart."""
    return torch.zeros(tokens, heads, 512 + gap, dtype=torch.bfloat16)[:, :, :512]


def test_an_ordinary_call_asks_for_nothing() -> None:
    cache = mlacast.KvFormat.V4.allocate(2, 64)
    assert layout_features((query(),), 512, 0.1, (cache, None)) == frozenset()


def test_an_empty_cache_that_starts_at_no_word() -> None:
    """It has no address to look at, but Hopper launchers view it as words of four bytes."""
    memory = torch.zeros(64 * 576 + 2, dtype=torch.uint8)
    empty = memory[2:].view(torch.float8_e4m3fn).view(1, 64, 576)[:0]
    assert empty.data_ptr() == 0
    assert layout_features((query(),), 512, 0.1, (empty,)) == {"rows:unaligned"}
    whole = torch.zeros(1, 64, 576, dtype=torch.float8_e4m3fn)[:0]
    assert layout_features((query(),), 512, 0.1, (whole,)) == frozenset()


@pytest.mark.parametrize("gap", [1, 8])
def test_heads_at_no_multiple_of_16_elements(gap: int) -> None:
    assert layout_features((query(gap=gap),), 512, 0.1) == {"rows:unaligned"}
    assert layout_features((query(gap=16),), 512, 0.1) == frozenset()


@pytest.mark.parametrize(
    ("gap", "first", "backend"),
    [(0, 0, "hopper"), (16, 16, "hopper"), (8, 0, "triton"), (16, 8, "triton")],
)
def test_codes_of_queries_at_multiples_of_16_bytes(gap: int, first: int, backend: str) -> None:
    """Hopper copies 16 bytes at a time; the portable kernel takes what starts elsewhere."""
    q = torch.zeros(3, 4, 576 + gap).to(torch.float8_e4m3fn)[:, :, first : first + 576]
    plain = {"d_qk:576", "q_order:head", "out:bf16", "q:fp8", "kv:FP8"}
    features = layout_features((q,), 512, 0.1) | plain
    assert select("sparse_mla_decode", features, "sm90").backend == backend
    if backend != "hopper":
        with pytest.raises(mlacast.UnsupportedError, match="hopper.*rows:unaligned"):
            select("sparse_mla_decode", features, "sm90", "hopper")


@pytest.mark.parametrize("step", [0, 7, 10**9])
def test_strides_of_dimensions_of_size_one_ask_for_nothing(step: int) -> None:
    """BC-31: one token, one head, one page; views of them start where a kernel expects."""
    flat = torch.zeros(8 * 1024, dtype=torch.bfloat16)
    one_token = flat.as_strided((1, 3, 512), (step, 512, 1))
    one_head = flat.as_strided((3, 1, 512), (512, step * 10, 1))
    one_row = flat.as_strided((1, 512), (step, 1))
    pages = flat.as_strided((1, 8, 1, 512), (step, 512, step, 1))
    assert layout_features((one_token, one_head, one_row), 512, 0.1, (pages,)) == frozenset()
    plain = [plain_rows(view) for view in (one_token, one_head, one_row)] + [plain_pages(pages)]
    for view, given in zip(plain, (one_token, one_head, one_row, pages), strict=True):
        assert torch.equal(view, given) and view.data_ptr() == given.data_ptr()
        assert not any(stride % 16 for stride in view.stride()[:1])
    assert not any(stride % 16 for view in plain[:3] for stride in view.stride()[:-1])
    # Strides that mean something stay, and so does the tensor itself.
    apart = flat.as_strided((2, 3, 512), (1543, 512, 1))
    assert plain_rows(apart) is apart
    assert layout_features((apart,), 512, 0.1) == {"rows:unaligned"}
    packed = flat.view(1, 16, 512)
    assert plain_rows(packed) is packed


@pytest.mark.parametrize("kv_format", ALL_KV_FORMATS, ids=repr)
def test_caches_as_they_are_allocated_are_left_alone(kv_format: mlacast.KvFormat) -> None:
    """A view in their place would be a tensor that known calls do not know."""
    for page_size in (1, 3, 16, 64):
        for d_qk in (512, 576) if kv_format.d_qk is None else (kv_format.d_qk,):
            cache = kv_format.allocate(3, page_size, d_qk=d_qk)
            for view in (cache, cache.squeeze(2), cache[1:]):
                assert plain_pages(view) is view
            last = cache[:, :, 0] if page_size > 1 else cache
            assert plain_pages(last) is last


@pytest.mark.parametrize("first", [1, 2, 4])
def test_a_start_at_no_multiple_of_16_bytes(first: int) -> None:
    wide = torch.zeros(3, 4, 544, dtype=torch.bfloat16)
    assert layout_features((wide[:, :, first : first + 512],), 512, 0.1) == {"rows:unaligned"}
    assert layout_features((wide[:, :, 8:520],), 512, 0.1) == frozenset()


def test_codes_at_no_multiple_of_four_bytes() -> None:
    """Words of codes leave together; bfloat16 does not."""
    wide = torch.zeros(3, 2, 530, dtype=torch.uint8)
    for codes in (wide[:, :, 2:514], wide[:, :, :512], wide[:, :1, 5:517]):
        assert layout_features((), 512, 0.1, (), codes) == {"rows:unaligned"}
    for codes in (wide[:1, :1, 4:516], torch.zeros(3, 2, 516, dtype=torch.uint8)[:, :, :512]):
        assert layout_features((), 512, 0.1, (), codes) == frozenset()
    # Rows apart by multiples of 4 that start at none.
    shifted = torch.zeros(3, 2, 516, dtype=torch.uint8)[:, :, 2:514]
    assert layout_features((), 512, 0.1, (), shifted) == {"rows:unaligned"}
    codes = wide.view(torch.float8_e4m3fn)[:, :, 2:514]
    out = mlacast.QuantizedTensor(codes, None, mlacast.Fp8Tensor(1.0))
    kv, indices = torch.zeros(3, 512).bfloat16(), torch.zeros(3, 1, dtype=torch.int32)
    found = mlacast.explain("sparse_mla_prefill", query(), kv, indices, sm_scale=1.0, out=out)
    assert "rows:unaligned" in found.features
    odd = torch.zeros(3, 2, 515, dtype=torch.bfloat16)
    assert layout_features((), 512, 0.1, (), odd[:, :, 1:513]) == frozenset()


def test_heads_that_32_bits_do_not_reach() -> None:
    far = torch.empty(1, dtype=torch.bfloat16).as_strided((1, 1, 1), (512, 2**30, 1))
    meta = torch.empty_strided((1, 3, 512), (512, 2**30, 1), dtype=torch.bfloat16, device="meta")
    assert "heads:far_apart" in layout_features((meta,), 512, 0.1)
    assert "heads:far_apart" not in layout_features((far,), 512, 0.1)


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_heads_of_a_packed_prefill_that_32_bits_do_not_reach(argument: int) -> None:
    """A tensor of one head after the other: the Hopper kernel copies by columns of 32 bits."""
    widths = (192, 192, 128)
    step = 2**29
    tensors = [torch.empty(3, 4, width, dtype=torch.bfloat16, device="meta") for width in widths]
    q, k, v = tensors
    assert dense_mla_prefill.required_features(q, k, v, None, "bf16", 512) == {"out:bf16"}
    tensors[argument] = torch.empty_strided(
        (3, 4, widths[argument]), (512, step, 1), dtype=torch.bfloat16, device="meta"
    )
    q, k, v = tensors
    required = dense_mla_prefill.required_features(q, k, v, None, "bf16", 512)
    assert required == {"out:bf16", "heads:far_apart"}


@pytest.mark.parametrize("scale", [0.0, -0.1, 1e-50])
def test_scales_of_a_packed_prefill_that_do_not_keep_the_order(scale: float) -> None:
    q, k, v = (torch.empty(3, 4, width, dtype=torch.bfloat16) for width in (192, 192, 128))
    required = dense_mla_prefill.required_features(q, k, v, scale, "bf16", 512)
    assert required == {"out:bf16", "sm_scale:not_positive"}
    assert dense_mla_prefill.required_features(q, k, v, 1e-30, "bf16", 512) == {"out:bf16"}


def test_scale_bytes_of_a_packed_prefill_that_are_no_words() -> None:
    q, k, v = (torch.empty(3, 4, width, dtype=torch.bfloat16) for width in (192, 192, 128))
    scales = torch.empty(128 * 32 + 4, dtype=torch.uint8)

    def required(first: int) -> frozenset[str]:
        sf = scales[first : first + 128 * 32].view(128, 32)
        return dense_mla_prefill.required_features(q, k, v, None, "nvfp4", 512, None, sf)

    assert required(0) == required(4) == {"out:nvfp4"}
    assert required(2) == {"out:nvfp4", "rows:unaligned"}


@pytest.mark.parametrize(
    ("kv_format", "page_size"),
    # Bytes of a token: 528, 584, 656 and 1024.
    [("V41", 16268816), ("V4", 14708793), ("V32", 13094413), ("BF16", 8388608)],
)
def test_pages_whose_words_32_bits_do_not_count(kv_format: str, page_size: int) -> None:
    """Hopper decodes count the words of a page; one of 8 GiB has 2**31."""
    found = {}
    for tokens in (page_size - 1, page_size):
        one = mlacast.KvFormat.from_name(kv_format).allocate(
            1, 1, d_qk=512 if kv_format == "BF16" else None
        )
        shape, width = (1, tokens, 1, one.shape[-1]), one.shape[-1]
        strides = (tokens * width, width, width, 1)
        page = torch.empty_strided(shape, strides, dtype=one.dtype, device="meta")
        found[tokens] = "pages:large" in layout_features((), 512, 0.1, (page,))
    assert found == {page_size - 1: False, page_size: True}


@pytest.mark.parametrize(
    ("out_format", "tokens"),
    [
        # 16, 4 and 1 scales a head of 512, of 128 heads; those of packed formats are bytes.
        (mlacast.Mxfp8(), 2**20),
        (mlacast.Fp8Group(32, "float32", "mn_major"), 2**20),
        (mlacast.Fp8Group(128, "float32", "mn_major"), 2**22),
        (mlacast.Fp8Group(128, "ue8m0_packed", "mn_major"), 2**22),
    ],
    ids=repr,
)
def test_scales_of_a_group_that_32_bits_do_not_reach(
    out_format: mlacast.OutFormat, tokens: int
) -> None:
    """One group of 128 heads. What a call would allocate itself counts like what it is given."""
    kv = torch.empty(8, 512, dtype=torch.bfloat16, device="meta")
    for count, is_far in ((tokens - 4, False), (tokens, True)):
        out = mlacast.QuantizedTensor.empty(count, 1, 65536, out_format, "meta")
        features = layout_features((), 65536, 0.1, codes=out.data, scales=out.sf)
        assert ("scales:far_apart" in features) is is_far
        q = torch.empty(count, 128, 512, dtype=torch.bfloat16, device="meta")
        indices = torch.empty(count, 1, dtype=torch.int32, device="meta")
        for given in ({"out": out}, {"out_format": out_format, "num_groups": 1}):
            found = mlacast.explain("sparse_mla_prefill", q, kv, indices, sm_scale=1.0, **given)
            assert ("scales:far_apart" in found.features) is is_far
    parts = mlacast.QuantizedTensor.empty(tokens, 8, 8192, out_format, "meta")
    assert not layout_features((), 8192, 0.1, codes=parts.data, scales=parts.sf)


@pytest.mark.parametrize("layout", ["row_major", "swizzled"])
def test_scales_beside_each_other_are_near(layout: str) -> None:
    out_format = mlacast.Nvfp4(1.0) if layout == "swizzled" else mlacast.Fp8Group(128, "float32")
    out = mlacast.QuantizedTensor.empty(2**23, 1, 65536, out_format, "meta")
    assert layout_features((), 65536, 0.1, codes=out.data, scales=out.sf) == frozenset()


def test_pages_and_tokens_of_caches() -> None:
    page = torch.zeros(2 * 64 * 584 + 8, dtype=torch.uint8)
    unaligned = page.as_strided((2, 64, 1, 584), (64 * 584 + 8, 584, 584, 1))
    assert layout_features((), 512, 0.1, (unaligned,)) == {"rows:unaligned"}
    apart = torch.zeros(2, 64, 1, 1024, dtype=torch.float8_e4m3fn)[..., :512]
    assert layout_features((), 512, 0.1, (apart,)) == {"rows:unaligned"}


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-50, 2.0**-127])
def test_scales_that_do_not_keep_the_order(scale: float) -> None:
    assert layout_features((), 512, scale) == {"sm_scale:not_positive"}
    assert layout_features((), 512, torch.tensor(scale)) == frozenset(), "not read on the host"


def test_output_groups_of_parts_of_heads() -> None:
    assert layout_features((), 1024, 1.0) == frozenset()
    assert layout_features((), 256, 1.0) == {"groups:partial_heads"}


@pytest.mark.parametrize(
    ("main", "extra", "backend"),
    [
        ("V4", None, "hopper"),
        ("V4", "V4", "hopper"),
        ("V41", "V41_FP4", "hopper"),
        ("V41", "V41_FP4_INLINE", "hopper"),
        ("V41_INLINE", "V41", "hopper"),
        ("V4", "V41", "triton"),
        ("BF16", None, "triton"),
        ("V41_FP4", None, "triton"),
        ("NVFP4_384", "V4", "triton"),
    ],
)
def test_pools_on_hopper(main: str, extra: str | None, backend: str) -> None:
    features = PLAIN | pool_features(main, extra)
    assert select("sparse_mla_decode", features, "sm90").backend == backend
    assert select("sparse_mla_decode", features, "sm80").backend == "triton"


@pytest.mark.parametrize("op", ["sparse_mla_prefill", "sparse_mla_decode"])
@pytest.mark.parametrize("out", sorted(OUT_FEATURES))
def test_hopper_stores_every_format(op: str, out: str) -> None:
    pool = pool_features("V4", None) if op == "sparse_mla_decode" else frozenset()
    for width in ("d_qk:512", "d_qk:576"):
        features = (PLAIN - {"d_qk:512", "out:bf16"}) | pool | {width, out}
        assert select(op, features, "sm90").backend == "hopper"


@pytest.mark.parametrize(
    "feature",
    [
        "rows:unaligned",
        "heads:far_apart",
        "pages:large",
        "scales:far_apart",
        "groups:partial_heads",
    ],
)
def test_what_hopper_leaves_to_the_portable_kernel(feature: str) -> None:
    features = PLAIN | pool_features("V4", None) | {feature}
    assert select("sparse_mla_decode", features, "sm90").backend == "triton"

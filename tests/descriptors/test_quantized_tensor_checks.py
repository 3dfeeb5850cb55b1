"""QuantizedTensor over tensors of the caller: what it accepts and refuses, in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlacast.descriptors.out_format import Bf16, Fp8Group, Fp8Tensor, Mxfp8, Nvfp4, OutFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor

E4M3 = torch.float8_e4m3fn
ROW_MAJOR = Fp8Group(128, "float32", "row_major")
MN_MAJOR = Fp8Group(128, "float32", "mn_major")
PACKED = Fp8Group(32, "ue8m0_packed", "mn_major")


def codes(tokens: int = 6, groups: int = 2, features: int = 512) -> torch.Tensor:
    """e4m3 data."""
    return torch.zeros(tokens, groups, features, dtype=torch.uint8).view(E4M3)


def mn_major(tokens: int = 6, column: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Scale factors [tokens, 2, 4], stride 1 along tokens."""
    return torch.zeros(2 * 4 * column, dtype=dtype).as_strided(
        (tokens, 2, 4), (1, 4 * column, column)
    )


def row_major(tokens: int = 6) -> torch.Tensor:
    """Scale factors [tokens, 2, 4] float32, contiguous."""
    return torch.zeros(tokens, 2, 4)


def test_good_buffers() -> None:
    assert QuantizedTensor(codes().to(torch.bfloat16), None, Bf16()).num_tokens == 6
    assert QuantizedTensor(codes(), None, Fp8Tensor(1.0)).features == 512
    assert QuantizedTensor(codes(), row_major(), ROW_MAJOR).num_groups == 2
    assert QuantizedTensor(codes(), mn_major(), MN_MAJOR).total_tokens == 6
    packed = QuantizedTensor(codes(), mn_major(dtype=torch.int32), PACKED)
    assert packed.ends_buffer
    swizzled = torch.zeros(128, 64, dtype=torch.uint8).view(E4M3)
    nvfp4 = QuantizedTensor(torch.zeros(6, 2, 256, dtype=torch.uint8), swizzled, Nvfp4(1.0))
    assert nvfp4.features == 512


def test_a_range_of_a_larger_buffer() -> None:
    whole = mn_major(tokens=13, column=16)
    part = QuantizedTensor(
        codes(), whole[3:9], MN_MAJOR, row_start=3, num_tokens=6, total_tokens=13
    )
    assert (part.row_start, len(part), part.total_tokens) == (3, 6, 13)
    assert not part.ends_buffer
    # Without total_tokens nobody knows whose rows follow: the range owns no padding.
    tail = QuantizedTensor(codes(), whole[7:13], MN_MAJOR, row_start=7)
    assert tail.total_tokens is None and not tail.ends_buffer
    head = QuantizedTensor(codes(), whole[:6], MN_MAJOR)
    assert head.total_tokens is None and not head.ends_buffer


@pytest.mark.parametrize(
    ("strides", "fits"),
    [
        # Groups inside of a token, with and without gaps.
        ((1536, 512, 1), True),
        ((1600, 520, 1), True),
        # Tokens inside of a group.
        ((512, 2048, 1), True),
        # The second group of a token lies on the next token's first.
        ((512, 512, 1), False),
        ((512, 1024, 1), False),
        # One element short.
        ((1535, 512, 1), False),
        ((512, 2047, 1), False),
    ],
)
def test_rows_of_groups_may_lie_apart_but_not_on_each_other(
    strides: tuple[int, int, int], fits: bool
) -> None:
    data = torch.zeros(8192, dtype=torch.bfloat16).as_strided((4, 3, 512), strides)
    if fits:
        assert QuantizedTensor(data, None, Bf16()).data is data
    else:
        with pytest.raises(ValueError, match=r"^QuantizedTensor: data must .*rows that do not ove"):
            QuantizedTensor(data, None, Bf16())


def test_nvfp4_range_needs_the_whole_swizzled_buffer() -> None:
    data = torch.zeros(6, 2, 256, dtype=torch.uint8)
    for rows, good in ((128, False), (256, True), (384, False)):
        sf = torch.zeros(rows, 64, dtype=torch.uint8).view(E4M3)
        if good:
            part = QuantizedTensor(data, sf, Nvfp4(1.0), row_start=125, total_tokens=200)
            assert part.sf is sf or (part.sf is not None and part.sf.data_ptr() == sf.data_ptr())
        else:
            with pytest.raises(ValueError, match=rf"^QuantizedTensor: sf must .*256.*got .*{rows}"):
                QuantizedTensor(data, sf, Nvfp4(1.0), row_start=125, total_tokens=200)


@pytest.mark.parametrize(
    "out_format", [Bf16(), Fp8Tensor(1.0), ROW_MAJOR, Mxfp8(), Nvfp4(1.0)], ids=repr
)
def test_wrong_data_dtype(out_format: OutFormat) -> None:
    for dtype in (torch.float16, torch.float32, torch.int8):
        with pytest.raises(ValueError, match=r"^QuantizedTensor: data must have dtype .*got "):
            QuantizedTensor(torch.zeros(6, 2, 512).to(dtype), None, out_format)


def test_data_is_three_dimensional_with_a_contiguous_last_dimension() -> None:
    for shape in ((6, 1024), (6,), (1, 6, 2, 512)):
        with pytest.raises(ValueError, match=r"^QuantizedTensor: data must have shape .*got \["):
            QuantizedTensor(torch.zeros(shape, dtype=torch.bfloat16), None, Bf16())
    strided = torch.zeros(6, 2, 1024, dtype=torch.bfloat16)[..., ::2]
    with pytest.raises(ValueError, match=r"^QuantizedTensor: data must .*stride"):
        QuantizedTensor(strided, None, Bf16())


@pytest.mark.parametrize("out_format", [ROW_MAJOR, MN_MAJOR, PACKED, Mxfp8("chunk32")], ids=repr)
def test_missing_scale_factors(out_format: OutFormat) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^QuantizedTensor: sf must "):
        QuantizedTensor(codes(), None, out_format)


def test_stray_scale_factors() -> None:
    for data, out_format in ((codes().to(torch.bfloat16), Bf16()), (codes(), Fp8Tensor(1.0))):
        with pytest.raises((TypeError, ValueError), match=r"^QuantizedTensor: sf must .*None"):
            QuantizedTensor(data, row_major(), out_format)


@pytest.mark.parametrize("shape", [(5, 2, 4), (6, 1, 4), (6, 2, 5), (6, 8), (8, 2, 4)], ids=str)
def test_wrong_scale_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^QuantizedTensor: sf must have shape .*got \["):
        QuantizedTensor(codes(), torch.zeros(shape), ROW_MAJOR)


def test_wrong_scale_dtype() -> None:
    with pytest.raises(
        ValueError, match=r"^QuantizedTensor: sf must have dtype int32, got float32"
    ):
        QuantizedTensor(codes(), mn_major(), PACKED)
    with pytest.raises(
        ValueError, match=r"^QuantizedTensor: sf must have dtype float32, got int32"
    ):
        QuantizedTensor(codes(), mn_major(dtype=torch.int32), MN_MAJOR)
    data = torch.zeros(6, 2, 256, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=r"^QuantizedTensor: sf must have dtype .*float8_e4m3fn.*got float32"
    ):
        QuantizedTensor(data, torch.zeros(128, 64), Nvfp4(1.0))


def test_wrong_scale_strides() -> None:
    with pytest.raises(ValueError, match=r"^QuantizedTensor: sf must .*stride"):
        QuantizedTensor(codes(), row_major(), MN_MAJOR)
    with pytest.raises(ValueError, match=r"^QuantizedTensor: sf must .*stride"):
        QuantizedTensor(codes(), mn_major(), ROW_MAJOR)
    overlapping = torch.zeros(256).as_strided((6, 2, 4), (1, 20, 5))
    with pytest.raises(ValueError, match=r"^QuantizedTensor: sf must .*stride"):
        QuantizedTensor(codes(), overlapping, MN_MAJOR)
    every_second = torch.zeros(256).as_strided((6, 2, 4), (2, 64, 16))
    with pytest.raises(ValueError, match=r"^QuantizedTensor: sf must .*stride"):
        QuantizedTensor(codes(), every_second, MN_MAJOR)
    data = torch.zeros(6, 2, 256, dtype=torch.uint8)
    swizzled = torch.zeros(64, 128, dtype=torch.uint8).view(E4M3).t()
    with pytest.raises(ValueError, match=r"^QuantizedTensor: sf must be contiguous"):
        QuantizedTensor(data, swizzled, Nvfp4(1.0))


@pytest.mark.parametrize("meaningless", [0, 7, 10**9])
def test_the_token_stride_of_one_token_means_nothing(meaningless: int) -> None:
    sf = torch.ones(32).as_strided((1, 2, 4), (meaningless, 16, 4))
    assert QuantizedTensor(codes(1), sf, MN_MAJOR).num_tokens == 1
    sf = torch.ones(32).as_strided((1, 2, 4), (meaningless, 4, 1))
    assert QuantizedTensor(codes(1), sf, ROW_MAJOR).num_tokens == 1
    data = codes(1).as_strided((1, 2, 512), (meaningless, 512, 1))
    assert QuantizedTensor(data, None, Fp8Tensor(1.0)).num_tokens == 1


def test_scales_on_another_device() -> None:
    with pytest.raises(ValueError, match=r"^QuantizedTensor: sf must be on cpu.*got meta"):
        QuantizedTensor(codes(), row_major().to("meta"), ROW_MAJOR)


@pytest.mark.parametrize("stray", [None, 5, [[1.0]]], ids=str)
def test_no_tensors(stray: Any) -> None:
    with pytest.raises(TypeError, match=r"^QuantizedTensor: data must be a torch\.Tensor, got"):
        QuantizedTensor(stray, row_major(), ROW_MAJOR)
    if stray is not None:
        with pytest.raises(TypeError, match=r"^QuantizedTensor: sf must be a torch\.Tensor, got"):
            QuantizedTensor(codes(), stray, ROW_MAJOR)


def test_format_must_be_a_descriptor() -> None:
    stray: Any = "fp8_tensor"
    with pytest.raises(TypeError, match=r"^QuantizedTensor: format must be .*got str"):
        QuantizedTensor(codes(), None, stray)


def test_rows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^QuantizedTensor: num_tokens must .*6.*got 5"):
        QuantizedTensor(codes(), None, Fp8Tensor(1.0), num_tokens=5)
    with pytest.raises(ValueError, match=r"^QuantizedTensor: row_start must .*got -1"):
        QuantizedTensor(codes(), None, Fp8Tensor(1.0), row_start=-1)
    with pytest.raises(ValueError, match=r"^QuantizedTensor: row_start must be at most"):
        QuantizedTensor(codes(), None, Fp8Tensor(1.0), row_start=2**63)
    with pytest.raises(ValueError, match=r"^QuantizedTensor: total_tokens must be at most"):
        QuantizedTensor(codes(), None, Fp8Tensor(1.0), total_tokens=10**30)
    with pytest.raises(TypeError, match=r"^QuantizedTensor: total_tokens must be an int or None"):
        QuantizedTensor(codes(), None, Fp8Tensor(1.0), total_tokens="6")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^QuantizedTensor: total_tokens must .*got 8"):
        QuantizedTensor(codes(), None, Fp8Tensor(1.0), row_start=3, total_tokens=8)


@pytest.mark.parametrize(
    ("features", "out_format"),
    [
        (500, ROW_MAJOR),
        (192, Fp8Group(128)),
        (96, Fp8Group(64)),
        (1000, Mxfp8()),
        (544, Mxfp8("chunk32")),
        (520, Nvfp4(1.0)),
    ],
    ids=str,
)
def test_features_that_do_not_hold_whole_groups(features: int, out_format: OutFormat) -> None:
    with pytest.raises(ValueError, match=rf"features must .*got {features}"):
        QuantizedTensor.empty(4, 2, features, out_format)


def test_counts_of_empty() -> None:
    with pytest.raises(ValueError, match=r"num_tokens must .*got -1"):
        QuantizedTensor.empty(-1, 2, 512, Bf16())
    with pytest.raises(ValueError, match=r"num_groups must .*got 0"):
        QuantizedTensor.empty(4, 0, 512, Bf16())

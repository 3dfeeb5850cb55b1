"""OutFormat descriptors: keys, equality that ignores scales, scale tensors, bad arguments."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import mlacast
from mlacast.descriptors.out_format import (
    Bf16,
    Fp8Group,
    Fp8Tensor,
    Mxfp8,
    Nvfp4,
    OutFormat,
    out_format_from_key,
)


@dataclass(frozen=True)
class FormatCase:
    """A descriptor and what it says about its buffers for 1024 features a group."""

    key: str
    out_format: OutFormat
    data_dtype: torch.dtype = torch.float8_e4m3fn
    data_features: int = 1024
    has_sf: bool = True
    sf_words: int | None = None
    order: str = "head"
    scale: float | None = None


GROUPS = [
    FormatCase(f"fp8_group:{size}:{sf}:{layout}", Fp8Group(size, sf, layout), sf_words=words)
    for size, scales in ((128, 8), (64, 16), (32, 32))
    for sf, words in (("float32", scales), ("float32_pow2", scales), ("ue8m0_packed", scales // 4))
    for layout in ("row_major", "mn_major")
]
CASES = [
    FormatCase("bf16", Bf16(), torch.bfloat16, has_sf=False),
    FormatCase("fp8_tensor", Fp8Tensor(0.3), has_sf=False, scale=0.3),
    *GROUPS,
    FormatCase("mxfp8:head", Mxfp8(), sf_words=8),
    FormatCase("mxfp8:chunk32", Mxfp8(order="chunk32"), sf_words=8, order="chunk32"),
    FormatCase("nvfp4", Nvfp4(0.7), torch.uint8, 512, scale=0.7),
]
IDS = [case.key for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_key_and_way_back(case: FormatCase) -> None:
    assert case.out_format.key == case.key
    back = out_format_from_key(case.key, case.scale)
    assert type(back) is type(case.out_format)
    assert back == case.out_format
    assert back.key == case.key
    if case.scale is not None:
        scale = back.scale_tensor("cpu")
        assert scale is not None
        # Half an ulp of float32, which the scale is kept in, is 6e-8 of it.
        assert scale.item() == pytest.approx(case.scale, rel=1e-7)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_buffer_facts(case: FormatCase) -> None:
    out_format = case.out_format
    assert isinstance(out_format, OutFormat)
    assert out_format.data_dtype == case.data_dtype
    assert out_format.data_features(1024) == case.data_features
    assert out_format.has_sf is case.has_sf
    assert out_format.order == case.order
    if case.sf_words is not None:
        assert out_format.sf_words(1024) == case.sf_words


def test_defaults_are_the_documented_ones() -> None:
    assert Fp8Group() == Fp8Group(128, "float32", "row_major")
    assert Fp8Group().key == "fp8_group:128:float32:row_major"
    assert Mxfp8() == Mxfp8(order="head", group=32)
    assert Mxfp8("chunk32", 32).key == "mxfp8:chunk32"


def test_keys_are_distinct_and_equal_formats_have_equal_hashes() -> None:
    formats = {case.out_format for case in CASES}
    assert len(formats) == len(CASES)
    assert len({case.key for case in CASES}) == len(CASES)
    for case in CASES:
        twin = out_format_from_key(case.key, case.scale)
        assert hash(twin) == hash(case.out_format)
        assert {case.out_format: 1}[twin] == 1


@pytest.mark.parametrize("kind", [Fp8Tensor, Nvfp4])
def test_equality_and_hash_ignore_the_scale(kind: type[Fp8Tensor] | type[Nvfp4]) -> None:
    numbers = [kind(scale) for scale in (1.0, 2.5, 3)]
    tensors = [kind(torch.full(shape, 7.0)) for shape in ((1,), (), (1, 1))]
    formats = [*numbers, *tensors]
    assert all(left == right for left in formats for right in formats)
    assert len(set(formats)) == 1
    assert len({each.key for each in formats}) == 1


def test_formats_of_different_kinds_differ() -> None:
    kinds: list[OutFormat] = [Bf16(), Fp8Tensor(1.0), Nvfp4(1.0), Fp8Group(), Mxfp8()]
    for index, left in enumerate(kinds):
        assert [other for other, right in enumerate(kinds) if left == right] == [index]
    assert Fp8Group(128) != Fp8Group(64)
    assert Fp8Group(128, "float32") != Fp8Group(128, "float32_pow2")
    assert Fp8Group(128, "float32", "mn_major") != Fp8Group(128, "float32", "row_major")
    assert Mxfp8("head") != Mxfp8("chunk32")


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_frozen(case: FormatCase) -> None:
    for name in ("scale", "global_scale", "group_size", "sf", "layout", "order", "group"):
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
            setattr(case.out_format, name, 5)


@pytest.mark.parametrize("kind", [Fp8Tensor, Nvfp4])
@pytest.mark.parametrize(
    "scale", [0.25, 3, torch.tensor([0.25]), torch.tensor(0.25), torch.tensor([[0.25]])], ids=str
)
def test_scale_tensor(kind: type[Fp8Tensor] | type[Nvfp4], scale: float | torch.Tensor) -> None:
    tensor = kind(scale).scale_tensor("cpu")
    assert tensor is not None
    assert tensor.dtype == torch.float32
    assert tensor.numel() == 1
    assert tensor.device.type == "cpu"
    assert tensor.item() == float(scale)


def test_a_scale_tensor_is_read_when_it_is_used() -> None:
    scale = torch.tensor([1.0])
    out_format = Fp8Tensor(scale)
    scale.fill_(2.0)
    tensor = out_format.scale_tensor("cpu")
    assert tensor is not None
    assert tensor.item() == 2.0


def test_formats_without_a_scale_have_no_scale_tensor() -> None:
    for out_format in (Bf16(), Fp8Group(), Mxfp8()):
        assert out_format.scale_tensor("cpu") is None


@pytest.mark.parametrize("group_size", [0, 1, 16, 96, 256, -128])
def test_bad_group_size(group_size: int) -> None:
    with pytest.raises(ValueError, match=rf"group_size must be .*128.*64.*32.*got {group_size}"):
        Fp8Group(group_size)


@pytest.mark.parametrize("sf", ["ue8m0", "fp32", "", "Float32"])
def test_bad_scale_kind(sf: str) -> None:
    with pytest.raises(ValueError, match=rf"sf must be .*float32_pow2.*ue8m0_packed.*got '{sf}'"):
        Fp8Group(128, sf)


@pytest.mark.parametrize("layout", ["col_major", "row", ""])
def test_bad_layout(layout: str) -> None:
    with pytest.raises(ValueError, match=rf"layout must be .*row_major.*mn_major.*got '{layout}'"):
        Fp8Group(128, "float32", layout)


def test_bad_mxfp8() -> None:
    with pytest.raises(ValueError, match=r"order must be .*head.*chunk32.*got 'chunk16'"):
        Mxfp8(order="chunk16")
    for group in (16, 64, 128):
        with pytest.raises(ValueError, match=rf"group must be .*32.*got {group}"):
            Mxfp8(group=group)


@pytest.mark.parametrize("kind", [Fp8Tensor, Nvfp4])
def test_bad_scales(kind: type[Fp8Tensor] | type[Nvfp4]) -> None:
    argument = "scale" if kind is Fp8Tensor else "global_scale"
    for tensor in (torch.ones(2), torch.ones(0), torch.ones(1, 3)):
        with pytest.raises(ValueError, match=rf"{argument} must .*got "):
            kind(tensor)
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        with pytest.raises(ValueError, match=rf"{argument} must .*float32.*got "):
            kind(torch.ones(1, dtype=dtype))
    for stray in ("1.0", None, [1.0], True):
        with pytest.raises((TypeError, ValueError), match=f"{argument} must "):
            kind(stray)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key", ["", "fp8", "fp8_group", "fp8_group:96:float32:row_major", "mxfp8:x", "BF16"]
)
def test_unknown_keys(key: str) -> None:
    with pytest.raises(ValueError, match="must "):
        out_format_from_key(key)


@pytest.mark.parametrize("key", ["fp8_tensor", "nvfp4"])
def test_keys_that_need_a_scale(key: str) -> None:
    with pytest.raises((TypeError, ValueError), match="scale"):
        out_format_from_key(key)


def test_public_names() -> None:
    for kind in (Bf16, Fp8Tensor, Fp8Group, Mxfp8, Nvfp4, OutFormat):
        assert getattr(mlacast, kind.__name__) is kind


def test_a_scale_given_as_a_number_is_put_on_a_device_once() -> None:
    scale = 0.0721
    first = Fp8Tensor(scale).scale_tensor("cpu")
    with torch.inference_mode():
        inside = Nvfp4(scale).scale_tensor(torch.device("cpu"))
    assert inside is first and not inside.is_inference()
    assert first.dtype == torch.float32 and first.tolist() == [torch.tensor(scale).item()]
    assert Fp8Tensor(scale).scale_tensor("meta").device.type == "meta"
    with FakeTensorMode():
        fakes = [Fp8Tensor(number).scale_tensor("cpu") for number in (scale, scale * 3)]
    assert all(isinstance(fake, FakeTensor) for fake in fakes)
    assert type(Fp8Tensor(scale * 3).scale_tensor("cpu")) is torch.Tensor

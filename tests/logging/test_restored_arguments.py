"""Arguments of every kind come back as they were: values, bytes, strides, shared memory."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.call_log import replay
from mlacast.call_log.errors import DumpError
from mlacast.compat.flash_mla import FlashMLASchedMeta
from tests.logging.observed import Log

RoundTrip = Callable[..., list[Any]]


@pytest.fixture
def round_trip(dump_log: Log, monkeypatch: pytest.MonkeyPatch) -> RoundTrip:
    """``round_trip(*values)``: what a replay hands to the function in their place."""
    seen: list[Any] = []

    def take(*args: Any) -> None:
        seen[:] = args

    def send(*values: Any) -> list[Any]:
        dump_log.observe(take)(*values)
        monkeypatch.setattr("mlacast.call_log.replay.find_function", lambda name: take)
        report = replay.replay_dump(dump_log.dumps[-1], compare=True)
        assert report.outcome == "same", report
        assert all(one is not other for one, other in zip(seen, values, strict=True) if is_big(one))
        return list(seen)

    return send


def is_big(value: object) -> bool:
    return isinstance(value, (Tensor, mlacast.QuantizedTensor, mlacast.Rope))


def bits(tensor: Tensor) -> list[int]:
    """Bytes of the elements, in order."""
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1)
    return flat.view(torch.uint8).tolist()


def assert_same_tensor(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    assert actual.device == expected.device
    assert bits(actual) == bits(expected)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_of_every_dtype(round_trip: RoundTrip, dtype: torch.dtype) -> None:
    # All byte values: NaNs of every payload, infinities, both zeros.
    x = torch.arange(256, dtype=torch.uint8).repeat(8).view(dtype)
    assert_same_tensor(round_trip(x)[0], x)


def test_bool_and_scalars_tensors(round_trip: RoundTrip) -> None:
    x, y = torch.tensor([True, False, True]), torch.tensor(3.5)
    back = round_trip(x, y)
    assert_same_tensor(back[0], x)
    assert_same_tensor(back[1], y)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x[:, ::2], id="step"),
        pytest.param(lambda x: x.t(), id="transposed"),
        pytest.param(lambda x: x[3:, 5:9], id="window"),
        pytest.param(lambda x: x[:1].expand(7, -1), id="broadcast"),
        pytest.param(lambda x: x.as_strided((5, 4), (2, 1)), id="overlapping rows"),
        pytest.param(lambda x: x[2, 3], id="one element"),
        pytest.param(lambda x: x[:0], id="no rows"),
        pytest.param(lambda x: x[4:, 3:3], id="no columns"),
        pytest.param(lambda x: x.as_strided((0, 3), (17, 5)), id="empty with strides"),
    ],
)
def test_strided_views(round_trip: RoundTrip, view: Callable[[Tensor], Tensor]) -> None:
    x = view(torch.randn(8, 12))
    assert_same_tensor(round_trip(x)[0], x)


def test_views_that_share_memory_share_it_again(round_trip: RoundTrip) -> None:
    base = torch.arange(100, dtype=torch.int32)
    first, second, apart = round_trip(base[10:40], base[30:60], base[70:90])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.untyped_storage().data_ptr() != apart.untyped_storage().data_ptr()
    first[20] = -1
    assert second[0] == -1
    assert (first[:20].tolist(), second[1:].tolist()) == (list(range(10, 30)), list(range(31, 60)))
    assert apart.tolist() == list(range(70, 90))


def test_views_that_only_touch_stay_apart(round_trip: RoundTrip) -> None:
    base = torch.arange(100, dtype=torch.int32)
    first, second = round_trip(base[10:40], base[40:60])
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_a_view_inside_another_does_not_hide_the_rest_of_it(round_trip: RoundTrip) -> None:
    base = torch.arange(100, dtype=torch.int32)
    wide, inner, late = round_trip(base[:90], base[10:20], base[50:95])
    assert late.tolist() == list(range(50, 95))
    assert wide.data_ptr() + 4 * 50 == late.data_ptr()
    assert wide.data_ptr() + 4 * 10 == inner.data_ptr()


def test_the_same_tensor_twice_is_one_memory(round_trip: RoundTrip) -> None:
    x = torch.zeros(4)
    one, other = round_trip(x, x)
    assert one.data_ptr() == other.data_ptr()


def test_one_memory_as_two_dtypes(round_trip: RoundTrip) -> None:
    x = torch.arange(64, dtype=torch.uint8)
    codes, words = round_trip(x, x[8:].view(torch.int32))
    assert codes.data_ptr() + 8 == words.data_ptr()
    assert_same_tensor(words, x[8:].view(torch.int32))


def test_only_the_bytes_in_use_are_saved(round_trip: RoundTrip, dump_log: Log) -> None:
    pool = torch.zeros(1 << 22, dtype=torch.uint8)
    round_trip(pool[1000:1100])
    assert sum(file.stat().st_size for file in dump_log.dumps[-1].iterdir()) < 10_000


@pytest.mark.parametrize("offset", [0, 1, 32, 48, 64, 100, 192])
def test_alignment_and_surroundings_survive(round_trip: RoundTrip, offset: int) -> None:
    base = torch.zeros(512, dtype=torch.uint8)
    assert base.data_ptr() % 64 == 0
    (x,) = round_trip(base[offset : offset + 100])
    assert x.data_ptr() % 64 == offset % 64
    # A part of a storage never looks like the whole of one, and a whole never like a part.
    assert x.untyped_storage().nbytes() > 100
    (whole,) = round_trip(torch.zeros(100, dtype=torch.uint8))
    assert whole.untyped_storage().nbytes() == 100
    if offset:
        (end,) = round_trip(base[offset:])
        assert end.untyped_storage().nbytes() > 512 - offset


FORMATS = [
    mlacast.Bf16(),
    mlacast.Fp8Tensor(0.5),
    mlacast.Fp8Group(128, "float32", "row_major"),
    mlacast.Fp8Group(64, "float32_pow2", "mn_major"),
    mlacast.Fp8Group(32, "ue8m0_packed", "mn_major"),
    mlacast.Mxfp8(),
    mlacast.Mxfp8("chunk32"),
    mlacast.Nvfp4(3.0),
]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.key)
@pytest.mark.parametrize(
    "rows", [slice(0, 10), slice(0, 3), slice(3, 7), slice(7, 10), slice(4, 4)], ids=str
)
def test_token_ranges_of_buffers(
    round_trip: RoundTrip, format: mlacast.OutFormat, rows: slice
) -> None:
    buffer = mlacast.QuantizedTensor.empty(10, 2, 512, format)
    mlacast.quantize_output(torch.randn(10, 1024), format, out=buffer)
    part = buffer[rows]
    (back,) = round_trip(part)
    assert back.format == part.format
    facts = ("row_start", "num_tokens", "total_tokens", "num_groups", "features", "ends_buffer")
    for fact in facts:
        assert getattr(back, fact) == getattr(part, fact), fact
    assert_same_tensor(back.data, part.data)
    if part.sf is None:
        assert back.sf is None
    else:
        assert_same_tensor(back.sf, part.sf)
        padded = part.sf_rows_with_padding()
        assert padded is not None
        assert_same_tensor(back.sf_rows_with_padding(), padded)
    assert torch.equal(back.dequantize(), part.dequantize())


@pytest.mark.parametrize("format", [mlacast.Mxfp8(), mlacast.Fp8Tensor(1.0), mlacast.Nvfp4(1.0)])
def test_a_range_of_unknown_total_keeps_it_unknown(
    round_trip: RoundTrip, format: mlacast.OutFormat
) -> None:
    whole = mlacast.QuantizedTensor.empty(256, 1, 512, format)
    mlacast.quantize_output(torch.randn(256, 512), format, out=whole)
    sf = whole.sf
    if sf is not None and format.sf_layout == "mn_major":
        sf = sf[:5]
    part = mlacast.QuantizedTensor(whole.data[:5], sf, format)
    (back,) = round_trip(part)
    assert back.total_tokens == part.total_tokens


def test_ranges_of_one_buffer_share_it(round_trip: RoundTrip) -> None:
    buffer = mlacast.QuantizedTensor.empty(10, 1, 512, mlacast.Mxfp8())
    first, second, whole = round_trip(buffer[:5], buffer[5:], buffer)
    whole.data.view(torch.uint8)[7] = 56
    whole.sf[7] = 9
    assert second.data.view(torch.uint8)[2, 0, 0] == 56
    assert second.sf[2].flatten().tolist() == [9] * 4
    assert first.data.data_ptr() == whole.data.data_ptr()


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.key)
def test_output_formats(round_trip: RoundTrip, format: mlacast.OutFormat) -> None:
    (back,) = round_trip(format)
    assert back == format and back.key == format.key


def test_scales_of_formats_in_tensors(round_trip: RoundTrip) -> None:
    scale = torch.tensor([0.25])
    fp8, fp4, shared = round_trip(mlacast.Fp8Tensor(scale), mlacast.Nvfp4(scale), scale)
    assert fp8.scale.tolist() == fp4.global_scale.tolist() == [0.25]
    assert fp8.scale.data_ptr() == fp4.global_scale.data_ptr() == shared.data_ptr()


def test_kv_formats(round_trip: RoundTrip) -> None:
    names = ["BF16", "FP8", "V32", "V4", "V41", "V41_FP4", "V41_INLINE", "NVFP4_384"]
    formats = [mlacast.KvFormat.from_name(name) for name in names]
    assert round_trip(*formats) == formats


def test_rope_with_a_strided_table(round_trip: RoundTrip) -> None:
    rope = mlacast.Rope(torch.randn(9, 128)[:, :64], torch.arange(4), "half")
    (back,) = round_trip(rope)
    assert_same_tensor(back.cos_sin_cache, rope.cos_sin_cache)
    assert_same_tensor(back.positions, rope.positions)
    assert back.pairing == "half"


def test_schedules(round_trip: RoundTrip) -> None:
    schedule = mlacast.plan_sparse_decode(
        3,
        8,
        64,
        kv_format=mlacast.KvFormat.V41,
        extra_topk=8,
        extra_kv_format=mlacast.KvFormat.V41_FP4,
        num_splits=4,
    )
    assert round_trip(schedule) == [schedule]


def test_filled_metadata_of_flash_mla(round_trip: RoundTrip) -> None:
    config = FlashMLASchedMeta.Config(1, 2, 8, 64, 1, False, True, 32, None, None)
    metadata = FlashMLASchedMeta()
    metadata.fill(config, config, 3, torch.device("cpu"))
    (back,) = round_trip(metadata)
    assert type(back) is FlashMLASchedMeta
    assert back.config == config and back.tile_scheduler_metadata == config
    assert back.num_splits is not None and back.num_splits.tolist() == [0, 3]
    assert back.have_initialized


Pair = collections.namedtuple("Pair", ["codes", "scales"])


def test_containers(round_trip: RoundTrip) -> None:
    x = torch.arange(3)
    value = {"a": [x, (x, None, [])], 2: (), "c": {}, (1, "t"): torch.Size([2, 3])}
    (back,) = round_trip(value)
    assert list(back) == list(value)
    assert back["a"][0].tolist() == [0, 1, 2]
    assert type(back["a"][1]) is tuple and back["a"][1][1:] == (None, [])
    assert back[2] == () and back["c"] == {}
    assert type(back[(1, "t")]) is torch.Size and back[(1, "t")] == (2, 3)


def test_a_named_tuple_keeps_its_fields(round_trip: RoundTrip) -> None:
    (back,) = round_trip(Pair(torch.ones(2), None))
    assert type(back).__name__ == "Pair"
    assert back.codes.tolist() == [1, 1] and back.scales is None
    assert back == (back.codes, None)


def test_plain_values(round_trip: RoundTrip) -> None:
    values = [
        None,
        True,
        0,
        -(2**70),
        "text \N{GREEK SMALL LETTER ALPHA} \ud800",
        b"\x00\xff",
        0.1,
        1e-320,
        torch.bfloat16,
        torch.device("cpu"),
    ]
    assert round_trip(*values) == values
    zero, nan, inf = round_trip(-0.0, float("nan"), float("-inf"))
    assert math.copysign(1, zero) == -1 and math.isnan(nan) and inf == -math.inf
    assert [type(back) for back in round_trip(True, 1, 1.0)] == [bool, int, float]


def test_a_parameter_comes_back_as_its_tensor(round_trip: RoundTrip) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    assert_same_tensor(round_trip(parameter)[0], parameter.detach())


class Stranger:
    """Not of mlacast."""


@dataclasses.dataclass
class StrangeData:
    """A dataclass, but not of mlacast."""

    x: int = 1


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Stranger(), "x[1] is a tests.logging.test_restored_arguments:Stranger"),
        (StrangeData(), "x[1] is a tests.logging.test_restored_arguments:StrangeData"),
        (1j, "x[1] is a builtins:complex"),
        (torch.zeros(2, 2).to_sparse(), "x[1] is a torch:Tensor"),
        (endless(), "builtins:list"),
    ],
)
def test_what_cannot_be_recorded_is_named_and_refused(
    dump_log: Log, value: object, name: str
) -> None:
    def quantize_output(x: list[Any]) -> int:
        return 7

    assert dump_log.observe(quantize_output)([1, value]) == 7
    assert "cannot be replayed: " in dump_log.text
    assert name in dump_log.text
    with pytest.raises(DumpError, match=r"argument x\[.* was not recorded"):
        replay.replay_dump(dump_log.dumps[0])

"""Every refusal of the fused step names argument, requirement and value, and writes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from mlacast.compat import flash_mla
from tests.cache_writers import V4, V32, V41, V41_FP4
from tests.compat.flash_mla.cases import FusedCase, decode_call, prefill_call
from tests.compat.flash_mla.shared_buffers import StepBuffer, step_buffer

FUSED = flash_mla.fused_norm_rope_attn_rope_cast
S_Q, H_Q, GROUPS, W = 5, 16, 2, 8
FP8 = torch.float8_e4m3fn
Pair = tuple[Any, Any]
OutMaker = Callable[[StepBuffer], Any]
Changer = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class BadOut:
    """An ``out`` made from a good buffer, and the message it must raise."""

    id: str
    make: OutMaker
    match: str
    errors: tuple[type[Exception], ...] = (ValueError,)


def fp8_as(change: Callable[[Tensor], Any]) -> OutMaker:
    return lambda buffer: (change(buffer.fp8), buffer.sf)


def sf_as(change: Callable[[Tensor], Any]) -> OutMaker:
    return lambda buffer: (buffer.fp8, change(buffer.sf))


def restrided(*strides: int) -> OutMaker:
    """The scale words under other strides."""
    return sf_as(lambda sf: sf.as_strided(sf.shape, strides))


def shifted(count: int) -> OutMaker:
    """The codes ``count`` bytes further on."""

    def make(buffer: StepBuffer) -> Any:
        storage = buffer.fp8_storage.view(FP8)
        offset = buffer.fp8.storage_offset() + count
        return storage.as_strided(buffer.fp8.shape, buffer.fp8.stride(), offset), buffer.sf

    return make


TYPE_OR_VALUE = (TypeError, ValueError)
BAD_OUT = (
    BadOut("lone-codes", lambda b: (b.fp8, None), r"out(_sf)? must .*None", TYPE_OR_VALUE),
    BadOut("lone-scales", lambda b: (None, b.sf), r"out(_fp8)? must .*None", TYPE_OR_VALUE),
    BadOut("bare-tensor", lambda b: b.fp8, r"out must .*got .*Tensor", TYPE_OR_VALUE),
    BadOut("one-element", lambda b: (b.fp8,), r"out must .*got .*1", TYPE_OR_VALUE),
    BadOut("three-elements", lambda b: (b.fp8, b.sf, b.sf), r"out must .*got .*3", TYPE_OR_VALUE),
    BadOut("text", lambda b: "out", r"out must .*got .*str; .*buffer.sf", TYPE_OR_VALUE),
    BadOut("codes-no-tensor", lambda b: ([1], b.sf), r"out_fp8 must .*got list", (TypeError,)),
    BadOut("scales-no-tensor", lambda b: (b.fp8, 3), r"out_sf must .*got int", (TypeError,)),
    BadOut(
        "codes-uint8",
        fp8_as(lambda x: x.view(torch.uint8)),
        r"out_fp8 must .*float8_e4m3fn.*got uint8",
    ),
    BadOut(
        "codes-e5m2",
        fp8_as(lambda x: x.view(torch.float8_e5m2)),
        r"out_fp8 must .*float8_e4m3fn.*got float8_e5m2",
    ),
    BadOut("codes-short", fp8_as(lambda x: x[:4]), r"out_fp8 must .*got .*4, 2, 4096"),
    BadOut("codes-per-head", fp8_as(lambda x: x.view(5, 16, 512)), r"out_fp8 must .*5, 16, 512"),
    BadOut("codes-flat", fp8_as(lambda x: x.view(5, 8192)), r"out_fp8 must .*5, 8192"),
    BadOut(
        "codes-group-major",
        fp8_as(lambda x: x.view(2, 5, 4096).transpose(0, 1)),
        r"out_fp8 must .*contiguous.*got .*4096, 20480, 1",
    ),
    BadOut("codes-off-by-16", shifted(16), r"out_fp8 must .*32.*got "),
    BadOut("codes-off-by-1", shifted(1), r"out_fp8 must .*32.*got "),
    BadOut("codes-on-meta", fp8_as(lambda x: x.to("meta")), r"out_fp8 must .*cpu.*got meta"),
    BadOut("scales-on-meta", sf_as(lambda x: x.to("meta")), r"out_sf must .*cpu.*got meta"),
    BadOut(
        "scales-float32",
        sf_as(lambda x: x.view(torch.float32)),
        r"out_sf must .*int32.*got float32",
    ),
    BadOut(
        "scales-uint32", sf_as(lambda x: x.view(torch.uint32)), r"out_sf must .*int32.*got uint32"
    ),
    BadOut(
        "scales-bytes",
        sf_as(lambda x: x.contiguous().view(torch.uint8)),
        r"out_sf must .*got .*5, 2, 128.*a word holds four scale bytes",
    ),
    BadOut("scales-short", sf_as(lambda x: x[:4]), r"out_sf must .*got .*4, 2, 32"),
    BadOut("scales-few-words", sf_as(lambda x: x[..., :8]), r"out_sf must .*got .*5, 2, 8"),
    # The good buffer has strides (1, 32 * 5, 5).
    BadOut("scales-token-stride-2", restrided(2, 160, 5), r"out_sf must .*stride.*1.*got.*2"),
    BadOut("scales-token-stride-0", restrided(0, 160, 5), r"out_sf must .*stride.*1.*got.*0"),
    BadOut("scales-row-major", restrided(64, 32, 1), r"out_sf must .*stride.*1.*got.*64"),
    BadOut("scales-pitch-4", restrided(1, 160, 4), r"out_sf must .*stride.*5.*got.*4"),
    BadOut("scales-pitch-0", restrided(1, 160, 0), r"out_sf must .*stride.*5.*got.*0"),
    BadOut("scales-planes-overlap", restrided(1, 159, 5), r"out_sf must .*stride.*160.*got.*159"),
    BadOut("scales-planes-equal", restrided(1, 0, 5), r"out_sf must .*stride.*160.*got.*0"),
)


def call_arguments(mode: str) -> dict[str, Any]:
    case = FusedCase(mode, s_q=S_Q, h_q=H_Q, groups=GROUPS, lengths=True, sink="finite")
    if mode == "prefill":
        return prefill_call(case).arguments
    layouts = (V41, V41_FP4)
    decode_case = FusedCase(
        mode, s_q=S_Q, h_q=H_Q, groups=GROUPS, lengths=True, sink="finite", caches=layouts
    )
    return decode_call(decode_case).arguments


def function_of(mode: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(FUSED, mode)
    return function


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("bad", BAD_OUT, ids=lambda bad: bad.id)
def test_bad_out_is_refused_and_untouched(bad: BadOut, mode: str) -> None:
    buffer = step_buffer(S_Q, GROUPS, W)
    arguments = call_arguments(mode)
    with pytest.raises(bad.errors, match=bad.match) as caught:
        function_of(mode)(**arguments, out=bad.make(buffer))
    assert mode in str(caught.value)
    assert buffer.untouched()


@dataclass(frozen=True)
class BadCall:
    """A change of one good call's arguments, and the message it must raise."""

    id: str
    change: Changer
    match: str
    errors: tuple[type[Exception], ...] = (ValueError,)
    modes: tuple[str, ...] = field(default=("prefill", "decode"))


def put(**values: Any) -> Changer:
    return lambda arguments: values


def alter(name: str, change: Callable[[Tensor], Any]) -> Changer:
    return lambda arguments: {name: change(arguments[name])}


def mentions(*texts: str) -> str:
    """A pattern for a message that holds all ``texts`` in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(text)})" for text in texts)


FLAGS = (
    BadCall(
        "32-channels-only",
        put(num_per_channels=128),
        mentions("num_per_channels", "128", "out_format="),
    ),
    BadCall(
        "not-16-channels",
        put(num_per_channels=16),
        mentions("num_per_channels", "16", "out_format="),
    ),
    BadCall(
        "row-major-scales",
        put(use_tma_aligned_col_major_sf=False),
        mentions("use_tma_aligned_col_major_sf", "False", "out_format="),
    ),
    BadCall("unrounded-scales", put(round_sf=False), mentions("round_sf", "False", "out_format=")),
    BadCall(
        "float-scales",
        put(use_packed_ue8m0=False),
        mentions("use_packed_ue8m0", "False", "out_format="),
    ),
    BadCall("rope-dim-32", put(rope_dim=32), mentions("rope_dim", "32", "rope=")),
    BadCall("rope-dim-0", put(rope_dim=0), mentions("rope_dim", "0", "rope=")),
    BadCall("d-v-256", put(d_v=256), mentions("d_v", "256") + "(?=.*(out_format=|rope=))"),
)

DECODE, PREFILL = ("decode",), ("prefill",)
INPUTS = (
    BadCall("q-float16", alter("q", Tensor.half), r"q must .*bfloat16.*got float16"),
    BadCall("q-list", put(q=[1.0]), r"q must .*Tensor.*got list", (TypeError,)),
    BadCall("q-576", put(q=torch.zeros(5, 16, 576).bfloat16()), r"q must .*512.*got .*576"),
    BadCall("q-flat", alter("q", lambda x: x.flatten(1)), r"q must .*got .*5, 8192"),
    BadCall("q-heads-12", alter("q", lambda x: x[:, :12].contiguous()), r"q must .*8.*got .*12"),
    BadCall("q-meta", alter("q", lambda x: x.to("meta")), r"must .*(cpu|meta).*got (meta|cpu)"),
    BadCall("groups-3", put(n_wv_group=3), r"n_wv_group must .*16.*got 3"),
    BadCall("groups-0", put(n_wv_group=0), r"n_wv_group must .*got 0"),
    BadCall("groups-32", put(n_wv_group=32), r"n_wv_group must .*16.*got 32"),
    BadCall(
        "table-8-wide",
        put(cos_sin_cache=torch.zeros(50, 8)),
        r"cos_sin_cache must .*64.*got .*50, 8",
    ),
    BadCall(
        "table-63-wide",
        put(cos_sin_cache=torch.zeros(50, 63)),
        r"cos_sin_cache must .*64.*got .*50, 63",
    ),
    BadCall(
        "table-bf16",
        alter("cos_sin_cache", Tensor.bfloat16),
        r"cos_sin_cache must .*float32.*got bfloat16",
    ),
    BadCall(
        "table-half", alter("cos_sin_cache", Tensor.half), r"cos_sin_cache must .*float32.*float16"
    ),
    BadCall(
        "table-meta",
        alter("cos_sin_cache", lambda x: x.to("meta")),
        r"cos_sin_cache must .*got meta",
    ),
    BadCall(
        "positions-float",
        alter("token_positions", Tensor.float),
        r"token_positions must .*int32.*got float32",
    ),
    BadCall(
        "positions-short", alter("token_positions", lambda x: x[:4]), r"token_positions must .*5.*4"
    ),
    BadCall("sink-short", alter("attn_sink", lambda x: x[:8]), r"attn_sink must .*16.*got .*8"),
    BadCall(
        "sink-bf16", alter("attn_sink", Tensor.bfloat16), r"attn_sink must .*float32.*bfloat16"
    ),
    BadCall(
        "length-short",
        alter("topk_length", lambda x: x[:4]),
        r"topk_length must .*5.*got .*4.*for each row",
    ),
    BadCall(
        "length-float", alter("topk_length", Tensor.float), r"topk_length must .*int32.*float32"
    ),
    BadCall("kv-float32", alter("kv", Tensor.float), r"kv must .*bfloat16.*float32", modes=PREFILL),
    BadCall(
        "kv-576",
        put(kv=torch.zeros(9, 1, 576).bfloat16()),
        r"kv must .*512.*got .*9, 1, 576",
        modes=PREFILL,
    ),
    BadCall(
        "kv-two-heads",
        put(kv=torch.zeros(9, 2, 512).bfloat16()),
        r"kv must .*got .*9, 2, 512",
        modes=PREFILL,
    ),
    BadCall(
        "indices-float",
        alter("indices", Tensor.float),
        r"indices must .*int32.*float32",
        modes=PREFILL,
    ),
    BadCall(
        "indices-short",
        alter("indices", lambda x: x[:4]),
        r"indices must .*5.*got .*4",
        modes=PREFILL,
    ),
    BadCall(
        "slots-short",
        alter("indices_in_kvcache", lambda x: x[:4]),
        r"indices_in_kvcache must .*5.*got .*4",
        modes=DECODE,
    ),
    BadCall(
        "slots-float",
        alter("indices_in_kvcache", Tensor.float),
        r"indices_in_kvcache must .*int32.*float32",
        modes=DECODE,
    ),
    BadCall(
        "extra-cache-alone",
        put(extra_indices_in_kvcache=None, extra_topk_length=None),
        r"extra_indices_in_kvcache must .*None",
        TYPE_OR_VALUE,
        DECODE,
    ),
    BadCall(
        "extra-indices-alone",
        put(extra_k_cache=None, extra_topk_length=None),
        r"extra_k_cache must .*None",
        TYPE_OR_VALUE,
        DECODE,
    ),
    BadCall(
        "extra-length-alone",
        put(extra_k_cache=None, extra_indices_in_kvcache=None),
        r"extra_(k_cache|topk_length) must ",
        TYPE_OR_VALUE,
        DECODE,
    ),
    BadCall(
        "extra-slots-short",
        alter("extra_indices_in_kvcache", lambda x: x[:4]),
        r"extra_indices_in_kvcache must .*5.*got .*4",
        modes=DECODE,
    ),
    BadCall(
        "cache-bf16",
        put(k_cache=torch.zeros(3, 4, 1, 528).bfloat16()),
        r"k_cache must .*got .*bfloat16",
        modes=DECODE,
    ),
    BadCall(
        "cache-two-heads",
        put(k_cache=torch.zeros(3, 4, 2, 528, dtype=torch.uint8)),
        r"k_cache must .*got .*3, 4, 2, 528",
        modes=DECODE,
    ),
    BadCall(
        "cache-rows-apart",
        put(k_cache=torch.zeros(3, 4, 1, 544, dtype=torch.uint8)[..., :528]),
        r"k_cache must .*got ",
        modes=DECODE,
    ),
    BadCall(
        "cache-pages-overlap",
        alter("k_cache", lambda x: x.as_strided(x.shape, (528, 528, 528, 1))),
        r"k_cache must .*got ",
        modes=DECODE,
    ),
    *(
        BadCall(
            f"cache-{width}-bytes",
            put(k_cache=torch.zeros(3, 4, 1, width, dtype=torch.uint8)),
            rf"k_cache must .*(584.*528|528.*584).*got .*{width}",
            modes=DECODE,
        )
        for width in (512, 576, 288, V32.token_bytes, 640)
    ),
    BadCall(
        "extra-656",
        put(extra_k_cache=torch.zeros(3, 4, 1, V32.token_bytes, dtype=torch.uint8)),
        r"extra_k_cache must .*got .*656",
        modes=DECODE,
    ),
    BadCall(
        "288-beside-584",
        put(k_cache=torch.zeros(3, 4, 1, V4.token_bytes, dtype=torch.uint8)),
        r"extra_k_cache must .*528.*|extra_k_cache must .*288",
        modes=DECODE,
    ),
)

CASES = [
    pytest.param(bad, mode, id=f"{mode}-{bad.id}") for bad in FLAGS + INPUTS for mode in bad.modes
]


@pytest.mark.parametrize(("bad", "mode"), CASES)
def test_bad_argument_is_refused_and_out_untouched(bad: BadCall, mode: str) -> None:
    buffer = step_buffer(S_Q, GROUPS, W)
    arguments = call_arguments(mode)
    arguments |= bad.change(arguments)
    with pytest.raises(bad.errors, match=bad.match):
        function_of(mode)(**arguments, out=buffer.rows(0, S_Q))
    assert buffer.untouched()


OVERLAPS = {
    "codes-over-query": r"^fused_norm_rope_attn_rope_cast.prefill: out_fp8 must not share .* q,",
    "scales-over-codes": r"^fused_norm_rope_attn_rope_cast.prefill: out_fp8 must .* with out_sf,",
}


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_overlapping_buffers_are_refused(overlap: str) -> None:
    arguments = prefill_call(FusedCase("overlap", s_q=2)).arguments
    size = arguments["q"].numel()
    raw = torch.zeros(2 * size, dtype=torch.uint8)
    codes = raw[size:].view(FP8).view(2, 1, size // 2)
    words = torch.zeros(64, dtype=torch.int32)
    if overlap == "codes-over-query":
        # A bf16 query over the whole buffer, the codes in its second half.
        arguments["q"] = raw.view(torch.bfloat16).view_as(arguments["q"])
    else:
        words = raw[size:].view(torch.int32)[:64]
    out = codes, words.as_strided((2, 1, 32), (1, 64, 2))
    with pytest.raises(ValueError, match=OVERLAPS[overlap]):
        FUSED.prefill(**arguments, out=out)
    assert not bool(raw.any())

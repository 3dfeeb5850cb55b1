"""``out=(out_fp8, out_sf)``: bits of the allocating call, same objects, nothing else written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.compat import flash_mla
from tests.cache_writers import V4, V41, V41_FP4
from tests.compat.flash_mla.cases import FusedCall, FusedCase, decode_call, prefill_call
from tests.compat.flash_mla.compare import assert_same_bits
from tests.compat.flash_mla.element_orders import ceil4
from tests.compat.flash_mla.hand_calls import dequantised
from tests.compat.flash_mla.shared_buffers import SENTINEL_WORD, StepBuffer, step_buffer

FUSED = flash_mla.fused_norm_rope_attn_rope_cast

SIZES = tuple(
    FusedCase(
        f"h{h_q}-s{s_q}{'-norm' if norm else ''}",
        s_q=s_q,
        h_q=h_q,
        groups=h_q // 8,
        topk=4,
        norm=norm,
        lengths=True,
        sink="mixed",
    )
    for h_q, s_q, norm in [
        (64, 1, False),
        (64, 1, True),
        (64, 5, False),
        (64, 7, True),
        (64, 128, False),
        (64, 200, True),
        (128, 1, True),
        (128, 5, True),
        (128, 7, False),
        (128, 128, True),
        (128, 200, False),
    ]
)
DECODE_SIZES = (
    FusedCase("584-s1", s_q=1, h_q=64, groups=8, caches=(V4,), norm=True),
    FusedCase("584-s5-h128", s_q=5, h_q=128, groups=16, caches=(V4, V4), lengths=True),
    FusedCase("528-288-s7", s_q=7, h_q=64, groups=8, caches=(V41, V41_FP4), sink="mixed"),
    FusedCase("528-s128", s_q=128, h_q=8, groups=2, topk=4, caches=(V41,), norm=True),
    FusedCase("584-s200", s_q=200, h_q=8, groups=1, topk=4, caches=(V4,), lengths=True),
)


def make_call(case: FusedCase) -> FusedCall:
    return decode_call(case) if case.caches else prefill_call(case)


def run_call(call: FusedCall, out: Any = None) -> tuple[Tensor, ...]:
    function = FUSED.decode if call.case.caches else FUSED.prefill
    result: tuple[Tensor, ...] = function(**call.arguments, out=out)
    return result


def buffer_for(case: FusedCase, tokens: int, **layout: int) -> StepBuffer:
    return step_buffer(tokens, case.groups, case.w, **layout)


def assert_written(rows: tuple[Tensor, Tensor], expected: tuple[Tensor, ...]) -> None:
    assert_same_bits(rows[0], expected[0])
    assert_same_bits(rows[1], expected[1])


@pytest.mark.parametrize("case", SIZES + DECODE_SIZES, ids=lambda case: case.id)
def test_same_bits_same_objects_nothing_else(case: FusedCase) -> None:
    call = make_call(case)
    expected = run_call(call)
    # Three tokens in front and two behind; no boundary is a multiple of four.
    buffer = buffer_for(case, case.s_q + 5, group_gap=3)
    rows = buffer.rows(3, 3 + case.s_q)
    returned = run_call(call, out=rows)
    assert returned[0] is rows[0]
    assert returned[1] is rows[1]
    assert_written(rows, expected)
    for one, other in zip(returned[2:], expected[2:], strict=True):
        assert_same_bits(one, other)
    buffer.erase(3, 3 + case.s_q)
    assert buffer.untouched()


@pytest.mark.parametrize("case", [SIZES[2], DECODE_SIZES[2]], ids=lambda case: case.id)
@pytest.mark.parametrize("extra", [0, 1, 3, 60])
def test_any_pitch_of_the_scale_words(case: FusedCase, extra: int) -> None:
    """stride(2) from exactly s_q on, multiple of four or not; its padding is never written."""
    call = make_call(case)
    expected = run_call(call)
    buffer = buffer_for(case, case.s_q, sf_pitch=case.s_q + extra)
    rows = buffer.rows(0, case.s_q)
    run_call(call, out=rows)
    assert_written(rows, expected)
    buffer.erase(0, case.s_q)
    assert buffer.untouched()


@pytest.mark.parametrize("case", [SIZES[0], DECODE_SIZES[0]], ids=lambda case: case.id)
@pytest.mark.parametrize("stride", [0, 7, 10**9])
def test_one_token_ignores_the_token_stride(case: FusedCase, stride: int) -> None:
    call = make_call(case)
    expected = run_call(call)
    buffer = buffer_for(case, 1, sf_pitch=6)
    _, plane, pitch = buffer.sf.stride()
    fp8 = buffer.fp8.as_strided(buffer.fp8.shape, (stride, *buffer.fp8.stride()[1:]))
    sf = buffer.sf.as_strided(buffer.sf.shape, (stride, plane, pitch))
    returned = run_call(call, out=(fp8, sf))
    assert returned[0] is fp8
    assert returned[1] is sf
    assert_written((buffer.fp8, buffer.sf), expected)
    buffer.erase(0, 1)
    assert buffer.untouched()


@pytest.mark.parametrize("case", [SIZES[3], DECODE_SIZES[1]], ids=lambda case: case.id)
def test_own_result_can_be_passed_again(case: FusedCase) -> None:
    call = make_call(case)
    first = run_call(call)
    codes, words = first[0].clone(), first[1].clone()
    again = run_call(call, out=(first[0], first[1]))
    assert again[0] is first[0]
    assert_same_bits(again[0], codes)
    assert_same_bits(again[1], words)


@pytest.mark.parametrize("case", [SIZES[3], DECODE_SIZES[1]], ids=lambda case: case.id)
def test_repeated_calls_give_the_same_bits(case: FusedCase) -> None:
    call = make_call(case)
    first = run_call(call)
    for one, other in zip(run_call(call), first, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("s_q", [1, 2, 3, 5])
def test_allocated_scale_padding_is_zero(s_q: int) -> None:
    """The words behind the last token that a GEMM reads along are no NaN."""
    call = prefill_call(FusedCase("padding", s_q=s_q, groups=2))
    out_sf = run_call(call)[1]
    padding = ceil4(s_q) - s_q
    shape = (padding, *out_sf.shape[1:])
    tail = out_sf.as_strided(shape, out_sf.stride(), out_sf.storage_offset() + s_q)
    assert bool((tail == 0).all())


def test_zero_tokens_into_an_empty_range() -> None:
    case = FusedCase("zero", s_q=2, groups=2)
    call = prefill_call(case)
    for name in ("q", "indices", "token_positions"):
        call.arguments[name] = call.arguments[name][:0]
    buffer = buffer_for(case, 6)
    rows = buffer.rows(3, 3)
    returned = run_call(call, out=rows)
    assert returned[0] is rows[0]
    assert returned[1] is rows[1]
    assert buffer.untouched()


@dataclass(frozen=True)
class Segment:
    """One launch of a mixed step: its call and its token range."""

    call: FusedCall
    start: int
    stop: int


def mixed_segments(h_q: int, groups: int) -> list[Segment]:
    """Prefill of 7 tokens, decode of 2 and of 1, prefill of 3; boundaries 2, 9, 11, 12, 15."""
    common: dict[str, Any] = {"h_q": h_q, "groups": groups, "lengths": True}
    cases = [
        FusedCase("first", s_q=7, norm=True, **common),
        FusedCase("decode", s_q=2, caches=(V4, V4), sink="mixed", **common),
        FusedCase("one-token", s_q=1, caches=(V41, V41_FP4), **common),
        FusedCase("last", s_q=3, neox=True, sink="finite", **common),
    ]
    starts = [2, 9, 11, 12]
    return [
        Segment(make_call(case), start, start + case.s_q)
        for case, start in zip(cases, starts, strict=True)
    ]


MIXED_TOKENS = 15
GROUPINGS = [(64, 8), (64, 4), (24, 8), (128, 16)]


@pytest.mark.parametrize(("h_q", "groups"), GROUPINGS)
def test_launches_of_a_mixed_step_share_one_buffer(h_q: int, groups: int) -> None:
    segments = mixed_segments(h_q, groups)
    buffer = step_buffer(MIXED_TOKENS, groups, h_q // groups, sf_pitch=MIXED_TOKENS + 2)
    for segment in reversed(segments):
        rows = buffer.rows(segment.start, segment.stop)
        returned = run_call(segment.call, out=rows)
        assert returned[0] is rows[0]
        assert returned[1] is rows[1]
    for segment in segments:
        rows = buffer.rows(segment.start, segment.stop)
        assert_written(rows, run_call(segment.call))
        buffer.erase(segment.start, segment.stop)
    # The first two tokens belong to nobody.
    assert buffer.untouched()


@pytest.mark.parametrize(("h_q", "groups"), GROUPINGS[:3])
def test_mixed_buffer_is_dequantised_as_one(h_q: int, groups: int) -> None:
    """A QuantizedTensor over the whole buffer reads every launch's rows in natural head order."""
    w = h_q // groups
    whole = mlacast.QuantizedTensor.empty(
        MIXED_TOKENS, groups, w * 512, mlacast.Mxfp8(order="chunk32")
    )
    whole.data.view(torch.uint8).zero_()
    expected = torch.zeros(MIXED_TOKENS, h_q, 512, dtype=torch.float64)
    for segment in mixed_segments(h_q, groups):
        part = whole[segment.start : segment.stop]
        run_call(segment.call, out=(part.data, part.sf))
        alone = run_call(segment.call)
        expected[segment.start : segment.stop] = dequantised(alone[0], alone[1], groups, h_q)
    actual = whole.dequantize()
    assert actual.shape == (MIXED_TOKENS, groups, w * 512)
    # A code times a power of two is exact in float32.
    assert torch.equal(actual.double().view(MIXED_TOKENS, h_q, 512)[2:], expected[2:])


def test_rows_outside_keep_an_earlier_result() -> None:
    case = FusedCase("steps", s_q=3, groups=2)
    first, second = prefill_call(case), prefill_call(case)
    buffer = buffer_for(case, 6)
    run_call(first, out=buffer.rows(0, 3))
    before = [x.clone() for x in buffer.rows(0, 3)]
    run_call(second, out=buffer.rows(3, 6))
    for rows, saved in zip(buffer.rows(0, 3), before, strict=True):
        assert_same_bits(rows, saved)
    assert not bool((buffer.sf == SENTINEL_WORD).any())

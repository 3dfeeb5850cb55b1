"""The fused step against the float64 oracle: quantised output, scale bytes, lse and max_logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlacast.compat import flash_mla
from tests.cache_writers import V4, V41, V41_FP4, V41_FP4_INLINE, V41_INLINE
from tests.compat.flash_mla.cases import FusedCall, FusedCase, decode_call, prefill_call
from tests.compat.flash_mla.compare import assert_mxfp8_output, assert_within
from tests.compat.flash_mla.element_orders import ceil4

FUSED = flash_mla.fused_norm_rope_attn_rope_cast

PREFILL_REGULAR = (
    FusedCase("h64", h_q=64, groups=8),
    FusedCase("h64-norm-sinks", h_q=64, groups=8, norm=True, sink="mixed"),
    FusedCase("h128", h_q=128, groups=16, s_q=7, lengths=True),
    FusedCase("h128-norm-neox", h_q=128, groups=16, norm=True, neox=True),
    FusedCase("h128-one-token", h_q=128, groups=16, s_q=1, sink="finite"),
    FusedCase("h64-200-tokens", h_q=64, groups=8, s_q=200, topk=4, lengths=True),
    FusedCase("h64-128-tokens-norm", h_q=64, groups=8, s_q=128, topk=4, norm=True, neox=True),
)
PREFILL_IRREGULAR = (
    FusedCase("h8-one-group", sink="finite", lengths=True),
    FusedCase("h8-group-per-head", groups=8, norm=True),
    FusedCase("h24-two-groups-of-12", h_q=24, groups=2, neox=True, sink="mixed"),
    FusedCase("h24-eight-groups-of-3", h_q=24, groups=8, lengths=True),
    FusedCase("h64-groups-of-16", h_q=64, groups=4, sink="mixed", lengths=True),
    FusedCase("h40-groups-of-5", h_q=40, groups=8, norm=True, neox=True, lengths=True),
    FusedCase("int64-positions", positions=torch.int64, norm=True, sink="mixed", lengths=True),
    FusedCase("wide-lists", topk=150, rows=300, s_q=3),
    FusedCase("one-column", topk=1, s_q=7),
)

DECODE_FOOTER = (
    FusedCase("584", caches=(V4,), h_q=64, groups=8),
    FusedCase("584-norm-sinks-lengths", caches=(V4,), norm=True, sink="mixed", lengths=True),
    FusedCase("584-neox-h128", caches=(V4,), h_q=128, groups=16, s_q=3, neox=True),
    FusedCase("584-odd-pages", caches=(V4,), page_size=5, h_q=24, groups=2),
    FusedCase("584-twice", caches=(V4, V4), sink="mixed", lengths=True),
    FusedCase("584-twice-norm-200-tokens", caches=(V4, V4), s_q=200, topk=4, norm=True),
    FusedCase("528", caches=(V41,), h_q=64, groups=8, sink="finite"),
    FusedCase("528-one-token-h128", caches=(V41,), h_q=128, groups=16, s_q=1, norm=True),
    FusedCase("528-page-1", caches=(V41,), page_size=1, lengths=True),
    FusedCase("528-and-288", caches=(V41, V41_FP4), h_q=64, groups=4, lengths=True),
    FusedCase("528-and-288-norm-neox", caches=(V41, V41_FP4), norm=True, neox=True, sink="mixed"),
    FusedCase("528-twice", caches=(V41, V41), sink="mixed", positions=torch.int64),
)
DECODE_INLINE = (
    FusedCase("inline-528", caches=(V41_INLINE,), h_q=64, groups=8, lengths=True),
    FusedCase("inline-528-and-288", caches=(V41_INLINE, V41_FP4_INLINE), norm=True, sink="mixed"),
    FusedCase("inline-528-and-288-neox", caches=(V41_INLINE, V41_FP4_INLINE), neox=True, s_q=7),
    FusedCase("inline-leaves-584-alone", caches=(V4, V4), lengths=True, s_q=7),
)


def assert_matches_oracle(call: FusedCall, returned: tuple[Any, ...]) -> None:
    case = call.case
    out_fp8, out_sf, *statistics = returned
    words = case.w * 4
    assert out_fp8.shape == (case.s_q, case.groups, case.w * 512)
    assert out_fp8.dtype == torch.float8_e4m3fn
    assert out_fp8.is_contiguous()
    assert out_sf.shape == (case.s_q, case.groups, words)
    assert out_sf.dtype == torch.int32
    assert out_sf.stride() == (1, words * ceil4(case.s_q), ceil4(case.s_q))

    attended = call.attended()
    if not case.caches:
        assert_within(statistics.pop(0), attended.max_logits, attended.logit_budget, "max_logits")
    assert_within(statistics.pop(0), attended.lse, attended.lse_budget, "lse")
    assert not statistics
    assert_mxfp8_output(out_fp8, out_sf, case.w, attended)


@pytest.mark.parametrize("case", PREFILL_REGULAR + PREFILL_IRREGULAR, ids=lambda case: case.id)
def test_prefill(case: FusedCase) -> None:
    call = prefill_call(case)
    assert_matches_oracle(call, FUSED.prefill(**call.arguments))


@pytest.mark.parametrize("case", DECODE_FOOTER, ids=lambda case: case.id)
def test_decode(case: FusedCase) -> None:
    call = decode_call(case)
    assert_matches_oracle(call, FUSED.decode(**call.arguments))


@pytest.mark.parametrize("case", DECODE_INLINE, ids=lambda case: case.id)
def test_decode_with_inline_scales(case: FusedCase) -> None:
    flash_mla.set_v41_placement("inline")
    call = decode_call(case)
    assert_matches_oracle(call, FUSED.decode(**call.arguments))

"""``flash_mla_sparse_fwd``: sparse prefill in natural order with bf16 output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mlacast.compat import flash_mla
from tests.compat.flash_mla.cases import make_indices, make_lengths, make_sink, poison_tails
from tests.compat.flash_mla.compare import assert_bf16_output, assert_same_bits, assert_within
from tests.compat.flash_mla.oracle import attend, select_keys


@dataclass(frozen=True)
class SparseCase:
    id: str
    s_q: int = 5
    h_q: int = 8
    d_qk: int = 576
    topk: int = 10
    rows: int = 40
    sink: str = "none"
    lengths: bool = False


CASES = (
    SparseCase("576"),
    SparseCase("512", d_qk=512),
    SparseCase("576-sinks-lengths", sink="mixed", lengths=True),
    SparseCase("512-h64", d_qk=512, h_q=64, sink="finite", lengths=True),
    SparseCase("576-h128", h_q=128, s_q=3),
    SparseCase("576-h7", h_q=7, lengths=True),
    SparseCase("512-one-head-one-token", d_qk=512, h_q=1, s_q=1),
    SparseCase("576-wide-list", topk=200, rows=400, s_q=2),
)


@dataclass(frozen=True)
class SparseCall:
    arguments: dict[str, Any]
    keys: list[Tensor]


def make_call(case: SparseCase) -> SparseCall:
    kv = torch.randn(case.rows, 1, case.d_qk).bfloat16()
    kv[1::2] = float("nan")
    indices = make_indices(case.s_q, case.topk, case.rows, torch.arange(0, case.rows, 2))
    lengths = make_lengths(case.s_q, case.topk) if case.lengths else None
    poison_tails(indices, lengths, dead_row=1)
    arguments = {
        "q": torch.randn(case.s_q, case.h_q, case.d_qk).bfloat16(),
        "kv": kv,
        "indices": indices[:, None],
        "sm_scale": 0.05,
        "attn_sink": make_sink(case.sink, case.h_q),
        "topk_length": lengths,
    }
    return SparseCall(arguments, select_keys(kv[:, 0], indices, lengths))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_oracle(case: SparseCase) -> None:
    call = make_call(case)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(**call.arguments)
    sink = call.arguments["attn_sink"]
    attended = attend(call.arguments["q"], call.keys, sm_scale=0.05, sink=sink)
    assert_bf16_output(out, attended)
    assert_within(max_logits, attended.max_logits, attended.logit_budget, "max_logits")
    assert_within(lse, attended.lse, attended.lse_budget, "lse")


@pytest.mark.parametrize("case", CASES[2:4], ids=lambda case: case.id)
def test_out_is_filled_in_place(case: SparseCase) -> None:
    call = make_call(case)
    expected = flash_mla.flash_mla_sparse_fwd(**call.arguments)
    # Rows of a wider, longer parent.
    parent = torch.full((case.s_q + 4, case.h_q * 512 + 32), 0x5A5A, dtype=torch.int16)
    rows = parent.view(torch.bfloat16)[2 : 2 + case.s_q, : case.h_q * 512]
    out = torch.unflatten(rows, 1, (case.h_q, 512))
    returned = flash_mla.flash_mla_sparse_fwd(**call.arguments, out=out)
    assert returned[0] is out
    for one, other in zip(returned, expected, strict=True):
        assert_same_bits(one, other)
    out.view(torch.int16).fill_(0x5A5A)
    assert bool((parent == 0x5A5A).all())


def test_zero_tokens_and_zero_columns() -> None:
    call = make_call(CASES[0])
    none = {"q": call.arguments["q"][:0], "indices": call.arguments["indices"][:0]}
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(**call.arguments | none)
    assert out.shape == (0, 8, 512)
    assert max_logits.shape == lse.shape == (0, 8)
    empty = {"indices": call.arguments["indices"][..., :0]}
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(**call.arguments | empty)
    assert bool((out == 0).all())
    assert bool((max_logits == float("-inf")).all())
    assert bool((lse == float("inf")).all())


def test_other_value_width_is_refused() -> None:
    call = make_call(CASES[0])
    with pytest.raises(ValueError, match=r"(?s)(?=.*d_v)(?=.*512)(?=.*256)"):
        flash_mla.flash_mla_sparse_fwd(**call.arguments, d_v=256)


BAD_OUT = (
    pytest.param(lambda out: out[:4], r"out must .*got .*4, 8, 512", id="short"),
    pytest.param(lambda out: out.half(), r"out must .*bfloat16.*got float16", id="float16"),
    pytest.param(lambda out: out.to("meta"), r"out must .*cpu.*got meta", id="meta"),
    pytest.param(lambda out: "out", r"out must .*got str", id="text"),
)


@pytest.mark.parametrize(("change", "match"), BAD_OUT)
def test_bad_out_is_refused(change: Any, match: str) -> None:
    call = make_call(CASES[0])
    out = torch.full((5, 8, 512), 3.0).bfloat16()
    with pytest.raises((TypeError, ValueError), match=match):
        flash_mla.flash_mla_sparse_fwd(**call.arguments, out=change(out))
    assert bool((out == 3.0).all())


BAD_INPUTS = (
    pytest.param("q", lambda x: x.float(), r"q must .*bfloat16.*got float32", id="q-float32"),
    pytest.param("q", lambda x: x[..., :320], r"q must .*got .*320", id="q-320"),
    pytest.param("kv", lambda x: x[..., :512], r"(kv|q) must .*got .*5(12|76)", id="kv-narrower"),
    pytest.param(
        "kv", lambda x: x.expand(-1, 2, -1), r"kv must .*got .*40, 2, 576", id="two-kv-heads"
    ),
    pytest.param(
        "indices", lambda x: x.float(), r"indices must .*int32.*float32", id="float-indices"
    ),
    pytest.param("indices", lambda x: x[:3], r"indices must .*5.*got .*3, ", id="short-indices"),
)


@pytest.mark.parametrize(("name", "change", "match"), BAD_INPUTS)
def test_bad_input_is_refused(name: str, change: Any, match: str) -> None:
    call = make_call(CASES[0])
    arguments = call.arguments | {name: change(call.arguments[name])}
    with pytest.raises(ValueError, match=match):
        flash_mla.flash_mla_sparse_fwd(**arguments)

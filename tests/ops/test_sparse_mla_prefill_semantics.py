"""sparse_mla_prefill on every backend against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import mlacast
from tests import oracles
from tests.oracles import RopeSpec
from tests.scenarios import draw_indices, prefill_inputs, transposed_queries

SM_SCALE = 0.02


@dataclass(frozen=True)
class Case:
    """One call; the fields are the switches of the op."""

    id: str
    width: int = 512
    s_q: int = 5
    heads: int = 2
    s_kv: int = 40
    topk: int = 24
    eps: float | None = None
    pairing: str | None = None
    sink: bool = False
    q_order: str = "head"
    singleton_kv_head: bool = False


CASES = (
    Case("plain"),
    Case("plain_576", width=576),
    Case("one_head", heads=1),
    Case("seven_heads", heads=7),
    Case("singleton_kv_head", singleton_kv_head=True),
    Case("norm_rope_sink_interleaved", eps=1e-6, pairing="interleaved", sink=True),
    Case(
        "norm_rope_sink_half_chunk16",
        eps=1e-6,
        pairing="half",
        sink=True,
        q_order="chunk16",
        heads=8,
    ),
    Case("rope_sink_576", width=576, pairing="half", sink=True),
    Case("one_column", topk=1),
    Case("odd_width_of_the_list", topk=33),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bf16_output_matches_the_oracle(case: Case, backend: str) -> None:
    lengths = torch.randint(-1, case.topk + 3, (case.s_q,), dtype=torch.int32)
    inputs = prefill_inputs(
        s_q=case.s_q,
        heads=case.heads,
        width=case.width,
        s_kv=case.s_kv,
        topk=case.topk,
        topk_length=lengths,
    )
    sink = torch.randn(case.heads) if case.sink else None
    spec, rope = None, None
    if case.pairing is not None:
        spec = RopeSpec(oracles.exact_rope_table(7), torch.randint(0, 7, (case.s_q,)), case.pairing)
        rope = mlacast.Rope(spec.cos_sin, spec.positions, pairing=case.pairing)
    q = inputs.q if case.q_order == "head" else oracles.chunk16_from_head_order(inputs.q)
    kv, indices = inputs.kv, inputs.indices
    if case.singleton_kv_head:
        kv, indices = kv.unsqueeze(1), indices.unsqueeze(1)
    before = [tensor.clone() for tensor in (q, kv, indices)]
    out, max_logits, lse = mlacast.sparse_mla_prefill(
        q,
        kv,
        indices,
        sm_scale=SM_SCALE,
        topk_length=lengths,
        attn_sink=sink,
        q_norm_eps=case.eps,
        rope=rope,
        q_order=case.q_order,
        backend=backend,
    )
    expected = oracles.attend(
        inputs.q,
        oracles.select_rows(inputs.kv, inputs.indices, lengths),
        sm_scale=SM_SCALE,
        attn_sink=sink,
        q_norm_eps=case.eps,
        rope=spec,
    )
    assert isinstance(out, torch.Tensor)
    assert (out.dtype, out.shape) == (torch.bfloat16, (case.s_q, case.heads, 512))
    assert (lse.dtype, max_logits.dtype) == (torch.float32, torch.float32)
    oracles.assert_matches(out, lse, expected, actual_max_logits=max_logits)
    for tensor, copy in zip((q, kv, indices), before, strict=True):
        assert oracles.same_bits(tensor, copy), "inputs are never modified"


def test_permuted_and_natural_query_order_give_the_same_bits(backend: str) -> None:
    inputs = prefill_inputs(s_q=3, heads=8, width=512, s_kv=20, topk=12)
    rope = mlacast.Rope(oracles.exact_rope_table(4), torch.tensor([3, 0, 1], dtype=torch.int32))
    results = [
        mlacast.sparse_mla_prefill(
            q,
            inputs.kv,
            inputs.indices,
            sm_scale=SM_SCALE,
            rope=rope,
            q_norm_eps=1e-6,
            q_order=order,
            backend=backend,
        )
        for q, order in (
            (inputs.q, "head"),
            (oracles.chunk16_from_head_order(inputs.q), "chunk16"),
        )
    ]
    for natural, permuted in zip(*results, strict=True):
        assert oracles.same_bits(natural, permuted)


def test_rows_do_not_depend_on_their_batch_mates(backend: str) -> None:
    inputs = prefill_inputs(s_q=9, heads=2, width=512, s_kv=30, topk=20)

    def run(first: int, last: int) -> list[torch.Tensor]:
        result = mlacast.sparse_mla_prefill(
            inputs.q[first:last],
            inputs.kv,
            inputs.indices[first:last],
            sm_scale=SM_SCALE,
            backend=backend,
        )
        return [oracles.plain(part) for part in result]

    whole = run(0, 9)
    for row in range(9):
        for alone, together in zip(run(row, row + 1), whole, strict=True):
            assert oracles.same_bits(alone, together[row : row + 1])


@pytest.mark.parametrize("width", [512, 576])
def test_topk_zero_makes_every_row_empty(width: int, backend: str) -> None:
    q = transposed_queries(3, 2, width)
    kv = torch.full((4, width), float("nan"), dtype=torch.bfloat16)
    out, max_logits, lse = mlacast.sparse_mla_prefill(
        q,
        kv,
        torch.empty(3, 0, dtype=torch.int32),
        sm_scale=1.0,
        attn_sink=torch.zeros(2),
        backend=backend,
    )
    assert not oracles.plain(out).any()
    assert bool((lse == -float("inf")).all()) and bool((max_logits == -float("inf")).all())


def test_sm_scale_of_zero_averages_the_values(backend: str) -> None:
    kv = torch.randn(4, 512).bfloat16()
    indices = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    q = torch.randn(1, 1, 512).bfloat16()
    out, max_logits, lse = mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=0.0, backend=backend)
    expected = oracles.attend(q, [kv.double()], sm_scale=0.0)
    oracles.assert_matches(out, lse, expected, actual_max_logits=max_logits)
    assert float(max_logits) == 0.0


def test_an_integer_scale_is_a_number(backend: str) -> None:
    inputs = prefill_inputs(s_q=2, heads=2, width=512, s_kv=5, topk=4)
    arguments = (inputs.q, inputs.kv, inputs.indices)
    by_int = mlacast.sparse_mla_prefill(*arguments, sm_scale=1, backend=backend)
    by_float = mlacast.sparse_mla_prefill(*arguments, sm_scale=1.0, backend=backend)
    for left, right in zip(by_int, by_float, strict=True):
        assert oracles.same_bits(left, right)


@pytest.mark.parametrize("heads", [64, 128])
def test_many_heads(heads: int, backend: str) -> None:
    inputs = prefill_inputs(s_q=1, heads=heads, width=512, s_kv=9, topk=8)
    out, max_logits, lse = mlacast.sparse_mla_prefill(
        inputs.q, inputs.kv, inputs.indices, sm_scale=SM_SCALE, backend=backend
    )
    selected = oracles.select_rows(inputs.kv, inputs.indices)
    expected = oracles.attend(inputs.q, selected, sm_scale=SM_SCALE)
    oracles.assert_matches(out, lse, expected, actual_max_logits=max_logits)


def test_large_logits_do_not_overflow(backend: str) -> None:
    """exp() of either logit overflows float32 unless the maximum is taken off first."""
    kv = torch.zeros(2, 512, dtype=torch.bfloat16)
    kv[0, 0], kv[1, 0], kv[:, 1] = 64.0, 63.0, torch.tensor([1.0, 2.0])
    q = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    q[0, 0, 0] = 64.0
    indices = torch.tensor([[0, 1]], dtype=torch.int32)
    out, _, lse = mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=1.0, backend=backend)
    # Logits 4096 and 4032: the second weighs exp(-64) = 0 beside the first in bf16.
    assert float(lse) == 4096.0
    assert float(oracles.plain(out)[0, 0, 1]) == 1.0


def test_draw_indices_contains_what_it_promises() -> None:
    indices = draw_indices(50, 40, 10)
    valid = (indices >= 0) & (indices < 10)
    assert 0.6 < float(valid.float().mean()) < 0.9
    assert bool((indices == 10).any()) and bool((indices == -(2**31)).any())

"""The portable prefill kernel, interpreted: float32 against the reference in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.format_cases import FAMILIES, FormatCase, case_id
from tests.kernels import launches, store_cases
from tests.scenarios import draw_indices, forget_unused, indices_of, used_rows


@dataclass(frozen=True)
class PrefillCase:
    """One combination of options.

    Attributes:
        heads: Query heads.
        width: d_qk.
        topk: Index columns.
        norm: With the query norm.
        pairing: RoPE pairing, or None.
        order: Element order of the query.
        sink: With a sink of every kind, one a head: finite, -inf, +inf.
        lengths: topk_length of the three rows, or None.
        rows: Rows of kv.
    """

    heads: int = 2
    width: int = 512
    topk: int = 33
    norm: bool = False
    pairing: str | None = None
    order: str = "head"
    sink: bool = False
    lengths: tuple[int, int, int] | None = None
    rows: int = 20

    @property
    def id(self) -> str:
        parts = [f"h{self.heads}", f"d{self.width}", f"topk{self.topk}", f"rows{self.rows}"]
        parts += ["norm"] * self.norm + [self.pairing or ""] + ["sink"] * self.sink
        parts += [self.order, "lengths" if self.lengths else ""]
        return "-".join(part for part in parts if part)


CASES = (
    PrefillCase(),
    PrefillCase(heads=1, topk=1),
    PrefillCase(heads=3, topk=0, pairing="half", sink=True),
    PrefillCase(heads=16, norm=True),
    PrefillCase(heads=17, pairing="interleaved", sink=True),
    PrefillCase(heads=20, norm=True, pairing="half", sink=True, lengths=(33, 0, 7)),
    PrefillCase(heads=8, norm=True, pairing="interleaved", order="chunk16", lengths=(40, -3, 1)),
    PrefillCase(heads=5, pairing="half", order="chunk16"),
    PrefillCase(heads=3, order="chunk16", sink=True),
    PrefillCase(width=576),
    PrefillCase(heads=3, width=576, pairing="interleaved", sink=True, lengths=(33, 32, 31)),
    PrefillCase(heads=1, width=576, pairing="half", topk=70),
    PrefillCase(rows=0, sink=True, norm=True, pairing="interleaved"),
    PrefillCase(rows=1, topk=65),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_options_match_the_reference(case: PrefillCase) -> None:
    """Positions lie inside, past and before the table; unread rows are NaN."""
    lengths = None if case.lengths is None else torch.tensor(case.lengths, dtype=torch.int32)
    indices = draw_indices(3, case.topk, case.rows)
    indices[1, : case.topk // 2] = -1
    kv = forget_unused(torch.randn(case.rows, case.width), used_rows(indices, case.rows, lengths))
    natural = torch.randn(3, case.heads, case.width)
    permuted = case.order == "chunk16"
    q = oracles.chunk16_from_head_order(natural) if permuted else natural
    rope = None
    if case.pairing is not None:
        rope = mlacast.Rope(launches.unit_table(9), launches.POSITIONS, case.pairing)
    options: dict[str, Any] = {
        "topk_length": lengths,
        "attn_sink": launches.sinks(case.heads) if case.sink else None,
        # Large enough beside squares of about 5 that a kernel without it is wrong.
        "q_norm_eps": 0.75 if case.norm else None,
        "rope": rope,
        "q_order": case.order,
    }
    out, max_logits, lse = mlacast.reference.sparse_mla_prefill(
        q, kv, indices, sm_scale=launches.SM_SCALE, compute_dtype=torch.float64, **options
    )
    expected = launches.oracle(
        (out, lse, max_logits),
        natural,
        oracles.select_rows(kv, indices, lengths),
        q_norm_eps=options["q_norm_eps"],
        has_rope=rope is not None,
    )
    result = launches.prefill(q, kv, indices, launches.float32_buffer(3, case.heads), **options)
    launches.assert_matches(result, expected)


def _run(q: Tensor, kv: Tensor, indices: Tensor, **options: Any) -> launches.Result:
    buffer = launches.float32_buffer(q.shape[0], q.shape[1])
    return launches.prefill(q, kv, indices, buffer, **options)


def test_a_first_block_without_valid_entries() -> None:
    """The 32 entries of the first block are out of range, alone, before and between valid ones."""
    kv, q = torch.randn(4, 512), torch.randn(4, 2, 512)
    hole = [-1] * 31 + [4]
    indices = indices_of(
        [[*hole, 3, *hole], [*hole, *hole, 2], [*hole, -1, *hole], [1, *hole, *hole]]
    )
    result = _run(q, kv, indices)
    for row, key in ((0, 3), (1, 2), (3, 1)):
        # One key has the weight 1, exactly.
        assert torch.equal(result.out.data[row], kv[key].expand(2, 512))
    assert not result.out.data[2].any()
    assert bool((result.lse[2] == -float("inf")).all())
    assert result.max_logits is not None
    assert bool((result.max_logits[2] == -float("inf")).all())


def test_nan_around_everything_that_is_read() -> None:
    """Rows of a wider NaN buffer, indices of a wider buffer of valid entries."""
    wide = torch.full((9, 600), float("nan"))
    kv = wide[::2, 20:532]
    kv.copy_(torch.randn(5, 512))
    indices_buffer = torch.zeros(3, 60, dtype=torch.int32)
    indices = indices_buffer[:, 7:40]
    indices.copy_(draw_indices(3, 33, 5))
    queries = torch.full((4, 3, 530), float("nan"))
    q = queries.transpose(0, 1)[:, :, 9:521]
    q.copy_(torch.randn(3, 4, 512))
    lengths = torch.tensor([[33, 0], [20, 0], [1, 0]], dtype=torch.int32)[:, 0]
    table = torch.full((9, 70), float("nan"))[:, 3:67]
    table.copy_(launches.unit_table(9))
    positions = torch.tensor([[1, 9], [7, 9], [8, 9]], dtype=torch.int32)[:, 0]
    strided = _run(
        q, kv, indices, topk_length=lengths, rope=mlacast.Rope(table, positions), q_norm_eps=0.75
    )
    packed = _run(
        q.contiguous(),
        kv.contiguous(),
        indices.contiguous(),
        topk_length=lengths.contiguous(),
        rope=mlacast.Rope(table.contiguous(), positions.long()),
        q_norm_eps=0.75,
    )
    assert not strided.out.data.isnan().any()
    assert oracles.same_bits(strided.out.data, packed.out.data)
    assert oracles.same_bits(strided.lse, packed.lse)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_the_norm_is_that_of_the_query_before_its_rotation(pairing: str) -> None:
    """Rows of the table are no unit vectors, so that the rotation changes the length."""
    q, kv = torch.randn(3, 2, 512), torch.randn(5, 512)
    rope = mlacast.Rope(oracles.exact_rope_table(9), torch.tensor([3, 5, 7]), pairing)
    indices, lengths = torch.tensor([[4], [1], [0]]), torch.ones(3, dtype=torch.int32)
    result = _run(q, kv, indices.to(torch.int32), topk_length=lengths, rope=rope, q_norm_eps=0.75)
    for token, (row,) in enumerate(indices.tolist()):
        line = rope.cos_sin_cache[rope.positions[token]]
        for head in range(2):
            query = q[token, head].double()
            scale = launches.SM_SCALE / math.sqrt(float(query.square().mean()) + 0.75)
            query[448:] = oracles.rotate(query[448:], line, pairing)
            terms = scale * query * kv[row].double()
            logit = float(terms.sum())
            # 512 partial sums of terms of random sign, as large as the root of their squares, are
            # rounded at random (4 is room for a bad draw); so are norm, scale and logarithm.
            allowed = 4 * 512**0.5 * float(terms.norm()) + 8 * abs(logit) + 1
            assert abs(float(result.lse[token, head]) - logit) <= allowed * oracles.FLOAT32_UNIT


def test_a_closed_sink_gives_zeros_whatever_the_values_are() -> None:
    """BC-07: +inf gives exact zeros, also beside infinite values, whose weighted sum is NaN."""
    kv = torch.full((2, 512), float("inf"))
    kv[1] = 1.0
    result = _run(
        torch.randn(2, 2, 512),
        kv,
        torch.tensor([[0, 1], [1, 0]], dtype=torch.int32),
        attn_sink=torch.tensor([float("inf"), 0.0]),
    )
    assert not result.out.data[:, 0].any() and not result.out.data[:, 0].isnan().any()


def test_an_empty_row_ignores_a_table_of_nan() -> None:
    table = torch.full((2, 64), float("nan"))
    table[1] = launches.unit_table(1)
    rope = mlacast.Rope(table, torch.tensor([0, 1, 0]))
    lengths = torch.tensor([0, 2, 0], dtype=torch.int32)
    indices = torch.zeros(3, 2, dtype=torch.int32)
    result = _run(
        torch.randn(3, 2, 512), torch.randn(1, 512), indices, topk_length=lengths, rope=rope
    )
    assert not result.out.data.isnan().any()
    assert not result.out.data[::2].any()


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_quantised_bytes_are_those_of_the_float32_output(case: FormatCase) -> None:
    """Any row offset: the whole storages equal the reference's quantiser on the kernel's rows."""
    q, kv, indices = torch.randn(3, 4, 512), torch.randn(20, 512), draw_indices(3, 33, 20)
    indices[2] = -1
    rope = mlacast.Rope(launches.unit_table(9), launches.POSITIONS)
    options: dict[str, Any] = {"rope": rope, "q_norm_eps": 0.75, "attn_sink": torch.randn(4)}
    exact = _run(q, kv, indices, **options).out.data
    for start, total in ((2, 5), (1, 9)):
        actual = store_cases.empty_buffer(case, total, 2, 1024, "cpu")
        expected = store_cases.empty_buffer(case, total, 2, 1024, "cpu")
        launches.prefill(q, kv, indices, actual[start : start + 3], **options)
        mlacast.reference.quantize_output(exact.reshape(3, 2, 1024), expected[start : start + 3])
        store_cases.assert_same_storages(actual, expected)


def test_a_row_does_not_depend_on_the_others() -> None:
    q, kv, indices = torch.randn(4, 3, 512), torch.randn(20, 512), draw_indices(4, 33, 20)
    together = _run(q, kv, indices)
    for row in range(4):
        alone = _run(q[row : row + 1], kv, indices[row : row + 1])
        assert oracles.same_bits(alone.out.data, together.out.data[row : row + 1])
        assert oracles.same_bits(alone.lse, together.lse[row : row + 1])

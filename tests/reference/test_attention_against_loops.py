"""Reference attention against the float64 loop oracle, in float32 and in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mlacast import KvFormat, Rope, reference
from tests import oracles
from tests.oracles import RopeSpec
from tests.scenarios import (
    CACHES,
    CacheCase,
    cache_id,
    draw_indices,
    prefill_inputs,
    transposed_queries,
)

SM_SCALE = 0.02


@dataclass(frozen=True)
class PrefillCase:
    """One prefill problem.

    Attributes:
        id: Readable name.
        width: d_qk.
        s_q, heads, s_kv, topk: Sizes.
        norm: Q norm on.
        pairing: RoPE pairing, None for no rotation.
        sink: One sink per head, among them both infinities.
        lengths: topk_length given.
        q_order: Order of the query's elements.
    """

    id: str
    width: int = 512
    s_q: int = 4
    heads: int = 3
    s_kv: int = 24
    topk: int = 16
    norm: bool = False
    pairing: str | None = None
    sink: bool = False
    lengths: bool = False
    q_order: str = "head"


PREFILL = (
    PrefillCase("plain_512"),
    PrefillCase("plain_576", width=576),
    PrefillCase("rope_576_half", width=576, pairing="half"),
    PrefillCase("norm", norm=True),
    PrefillCase("rope_interleaved", pairing="interleaved"),
    PrefillCase("everything", norm=True, pairing="half", sink=True, lengths=True, heads=8),
    PrefillCase(
        "everything_chunk16",
        norm=True,
        pairing="interleaved",
        sink=True,
        lengths=True,
        q_order="chunk16",
    ),
    PrefillCase("everything_576", width=576, pairing="interleaved", sink=True, lengths=True),
    PrefillCase("one_of_each", s_q=1, heads=1, s_kv=1, topk=1),
    PrefillCase("wide_list", topk=64, s_kv=200, s_q=2),
    PrefillCase("no_columns", topk=0),
    PrefillCase("no_rows", s_kv=0),
)


def _lengths(case: PrefillCase) -> Tensor | None:
    if not case.lengths:
        return None
    lengths = torch.randint(0, case.topk + 1, (case.s_q,), dtype=torch.int32)
    lengths[0], lengths[-1] = case.topk + 5, 0
    return lengths


def _sink(heads: int, wanted: bool) -> Tensor | None:
    if not wanted:
        return None
    sink = torch.randn(heads)
    sink[0], sink[-1] = float("inf"), -float("inf")
    return sink


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", PREFILL, ids=lambda case: case.id)
def test_prefill(case: PrefillCase, dtype: torch.dtype) -> None:
    lengths = _lengths(case)
    inputs = prefill_inputs(
        s_q=case.s_q,
        heads=case.heads,
        width=case.width,
        s_kv=case.s_kv,
        topk=case.topk,
        topk_length=lengths,
    )
    sink = _sink(case.heads, case.sink)
    spec, rope = None, None
    if case.pairing is not None:
        spec = RopeSpec(oracles.exact_rope_table(9), torch.randint(0, 9, (case.s_q,)), case.pairing)
        rope = Rope(spec.cos_sin, spec.positions, pairing=case.pairing)
    eps = 1e-6 if case.norm else None
    q = inputs.q if case.q_order == "head" else oracles.chunk16_from_head_order(inputs.q)
    out, max_logits, lse = reference.sparse_mla_prefill(
        q,
        inputs.kv,
        inputs.indices,
        sm_scale=SM_SCALE,
        topk_length=lengths,
        attn_sink=sink,
        q_norm_eps=eps,
        rope=rope,
        q_order=case.q_order,
        compute_dtype=dtype,
    )
    expected = oracles.attend(
        inputs.q,
        oracles.select_rows(inputs.kv, inputs.indices, lengths),
        sm_scale=SM_SCALE,
        attn_sink=sink,
        q_norm_eps=eps,
        rope=spec,
    )
    assert out.dtype == dtype
    oracles.assert_matches(out, lse, expected, actual_max_logits=max_logits)


@pytest.mark.parametrize("num_splits", [None, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_decode(cache: CacheCase, num_splits: int | None) -> None:
    s_q, heads, topk, num_pages, page_size = 3, 2, 20, 3, 5
    rows = num_pages * page_size
    filled = cache.fill(num_pages=num_pages, page_size=page_size, slots=[0, 2, 3, 4, 7, 9, 12, 14])
    indices = draw_indices(s_q, topk, rows)
    for token, line in enumerate(indices.tolist()):
        for column, index in enumerate(line):
            if 0 <= index < rows and bool(filled.rows[index].isnan().any()):
                indices[token, column] = -1
    q = transposed_queries(s_q, heads, cache.d_qk)
    sink = torch.tensor([0.5, -0.25])
    expected = oracles.attend(
        q, oracles.select_rows(filled.rows, indices), sm_scale=SM_SCALE, attn_sink=sink
    )
    for dtype in (torch.float32, torch.float64):
        out, lse = reference.sparse_mla_decode(
            q,
            filled.cache,
            indices,
            kv_format=KvFormat.from_name(cache.name),
            sm_scale=SM_SCALE,
            attn_sink=sink,
            num_splits=num_splits,
            compute_dtype=dtype,
        )
        oracles.assert_matches(out, lse, expected)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("width", [576, 512])
def test_dense_decode(width: int, causal: bool) -> None:
    batch, new_tokens, heads, page_size = 3, 2, 2, 4
    cache = CacheCase("BF16", width).fill(num_pages=6, page_size=page_size, slots=range(24))
    page_table = torch.tensor([[5, 0, 2], [1, 3, 4], [2, 2, 0]], dtype=torch.int32)
    seq_lens = torch.tensor([9, 1, 0], dtype=torch.int32)
    q = oracles.exact_queries(batch, new_tokens, heads, width)
    sink = torch.randn(heads)
    selected = []
    for request in range(batch):
        length = int(seq_lens[request])
        for token in range(new_tokens):
            visible = min(length, length - new_tokens + token + 1) if causal else length
            slots = [
                int(page_table[request, p // page_size]) * page_size + p % page_size
                for p in range(max(visible, 0))
            ]
            selected.append(cache.rows[torch.tensor(slots, dtype=torch.int64)])
    expected = oracles.attend(q.flatten(0, 1), selected, sm_scale=SM_SCALE, attn_sink=sink)
    for dtype in (torch.float32, torch.float64):
        out, lse = reference.dense_mla_decode(
            q,
            cache.cache,
            page_table,
            seq_lens,
            kv_format=KvFormat.BF16,
            sm_scale=SM_SCALE,
            causal=causal,
            attn_sink=sink,
            compute_dtype=dtype,
        )
        oracles.assert_matches(
            out.view(batch * new_tokens, heads, 512), lse.view(batch * new_tokens, heads), expected
        )


@pytest.mark.parametrize("lse_layout", ["th", "ht"])
def test_merge_attention_states(lse_layout: str) -> None:
    outs = [torch.randn(5, 3, 32) for _ in range(4)]
    lses = [torch.randn(5, 3) * 3 for _ in range(4)]
    lses[1][2], lses[0][3] = -float("inf"), float("inf")
    outs[1][2] = float("nan")
    for part in range(4):
        lses[part][4] = -float("inf")
    given = [lse.t() if lse_layout == "ht" else lse for lse in lses]
    out, lse = reference.merge_attention_states(outs, given, lse_layout=lse_layout)
    expected_out, expected_lse = oracles.merge_parts(outs, lses)
    got_lse = lse.t() if lse_layout == "ht" else lse
    # exp and log are good to a few u = 2**-24, the exponents reach 10 in size (relative error 10
    # u), four terms are summed: 64 u times max|out| < 6, and the same for an lse below 16.
    assert float((out.double() - expected_out).abs().max()) < 64 * 2.0**-24 * 6
    finite = expected_lse.isfinite()
    assert torch.equal(got_lse[~finite].double(), expected_lse[~finite])
    assert float((got_lse[finite].double() - expected_lse[finite]).abs().max()) < 64 * 2.0**-24

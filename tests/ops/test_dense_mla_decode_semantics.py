"""dense_mla_decode on every backend against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.format_cases import FAMILIES, FormatCase, assert_buffer_holds, case_id, poisoned_buffer
from tests.scenarios import CACHES, CacheCase, cache_id, indices_of, lengths_of

SM_SCALE = 0.02


@dataclass(frozen=True)
class Problem:
    """Two requests of ``new_tokens`` queries over pages of three tokens."""

    q: Tensor
    cache: Tensor
    page_table: Tensor
    seq_lens: Tensor
    selected: list[Tensor]


def _visible_rows(
    rows: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    new_tokens: int,
    page_size: int,
    causal: bool,
) -> list[Tensor]:
    """Rows seen by each of batch * new_tokens queries, position by position."""
    selected = []
    pages = rows.shape[0] // page_size
    for request, line in enumerate(page_table.tolist()):
        length = min(max(int(seq_lens[request]), 0), len(line) * page_size)
        for token in range(new_tokens):
            last = length - new_tokens + token + 1 if causal else length
            slots = [
                line[position // page_size] * page_size + position % page_size
                for position in range(max(last, 0))
                if 0 <= line[position // page_size] < pages
            ]
            selected.append(rows[torch.tensor(slots, dtype=torch.int64)])
    return selected


def _problem(
    cache: CacheCase, *, new_tokens: int = 2, heads: int = 2, causal: bool = True
) -> Problem:
    page_table = indices_of([[3, 0, 1], [2, 4, 4]])
    seq_lens = lengths_of(8, 2)
    live = [
        3 * page + offset
        for page, count in ((3, 3), (0, 3), (1, 2), (2, 2))
        for offset in range(count)
    ]
    filled = cache.fill(num_pages=5, page_size=3, slots=live)
    q = oracles.exact_queries(2, new_tokens, heads, cache.d_qk)
    rows = _visible_rows(filled.rows, page_table, seq_lens, new_tokens, 3, causal)
    return Problem(q, filled.cache, page_table, seq_lens, rows)


def _check(
    out: Tensor, lse: Tensor, q: Tensor, selected: list[Tensor], sink: Tensor | None = None
) -> None:
    expected = oracles.attend(q.flatten(0, 1), selected, sm_scale=SM_SCALE, attn_sink=sink)
    oracles.assert_matches(out.flatten(0, 1), lse.flatten(0, 1), expected)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_every_cache_format(cache: CacheCase, causal: bool, backend: str) -> None:
    problem = _problem(cache, causal=causal)
    out, lse = mlacast.dense_mla_decode(
        problem.q,
        problem.cache,
        problem.page_table,
        problem.seq_lens,
        kv_format=mlacast.KvFormat.from_name(cache.name),
        sm_scale=SM_SCALE,
        causal=causal,
        backend=backend,
    )
    assert isinstance(out, Tensor)
    assert (out.shape, out.dtype) == ((2, 2, 2, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 2, 2), torch.float32)
    _check(out, lse, problem.q, problem.selected)


def test_sink_and_single_query(backend: str) -> None:
    problem = _problem(CacheCase("BF16", 576), new_tokens=1, heads=3)
    sink = torch.tensor([0.0, float("inf"), -float("inf")])
    out, lse = mlacast.dense_mla_decode(
        problem.q,
        problem.cache,
        problem.page_table,
        problem.seq_lens,
        kv_format=mlacast.KvFormat.BF16,
        sm_scale=SM_SCALE,
        attn_sink=sink,
        backend=backend,
    )
    assert isinstance(out, Tensor)
    _check(out, lse, problem.q, problem.selected, sink)
    assert not out[:, :, 1].any()


def test_lengths_past_the_table_and_below_zero_are_clamped(backend: str) -> None:
    filled = CacheCase("BF16", 576).fill(num_pages=2, page_size=3, slots=range(6))
    page_table, seq_lens = indices_of([[1, 0], [0, 1]]), lengths_of(1000, -4)
    q = oracles.exact_queries(2, 1, 2, 576)
    out, lse = mlacast.dense_mla_decode(
        q,
        filled.cache,
        page_table,
        seq_lens,
        kv_format=mlacast.KvFormat.BF16,
        sm_scale=SM_SCALE,
        backend=backend,
    )
    assert isinstance(out, Tensor)
    _check(out, lse, q, _visible_rows(filled.rows, page_table, seq_lens, 1, 3, True))


def test_pages_outside_the_cache_are_masked(backend: str) -> None:
    filled = CacheCase("BF16", 576).fill(num_pages=2, page_size=3, slots=range(6))
    page_table = indices_of([[-1, 1, 2, 0, 2**31 - 1]])
    q = oracles.exact_queries(1, 1, 2, 576)
    out, lse = mlacast.dense_mla_decode(
        q,
        filled.cache,
        page_table,
        lengths_of(14),
        kv_format=mlacast.KvFormat.BF16,
        sm_scale=SM_SCALE,
        backend=backend,
    )
    assert isinstance(out, Tensor)
    _check(out, lse, q, _visible_rows(filled.rows, page_table, lengths_of(14), 1, 3, True))


def _run(
    problem: Problem, backend: str, out: Tensor | mlacast.QuantizedTensor | None = None
) -> Tensor | mlacast.QuantizedTensor:
    return mlacast.dense_mla_decode(
        problem.q,
        problem.cache,
        problem.page_table,
        problem.seq_lens,
        kv_format=mlacast.KvFormat.BF16,
        sm_scale=SM_SCALE,
        out=out,
        backend=backend,
    )[0]


def test_a_plain_output_is_written_through_its_strides(backend: str) -> None:
    problem = _problem(CacheCase("BF16", 576))
    parent = torch.full((2, 2, 3, 520), 7.0, dtype=torch.bfloat16)
    view = parent[:, :, 1:, 3:515]
    assert _run(problem, backend, view) is view
    assert oracles.same_bits(view.contiguous(), _run(problem, backend))
    view.fill_(7.0)
    assert bool((parent == 7.0).all())


def test_requests_with_a_gap_between_them_are_supported_or_refused(backend: str) -> None:
    problem = _problem(CacheCase("BF16", 576))
    parent = torch.full((2, 4, 2, 512), 7.0, dtype=torch.bfloat16)
    view = parent[:, 1:3]
    try:
        _run(problem, backend, view)
    except ValueError as error:
        assert "dense_mla_decode: out must" in str(error) and "strides" in str(error)
    else:
        assert oracles.same_bits(view.contiguous(), _run(problem, backend))
        view.fill_(7.0)
    assert bool((parent == 7.0).all())


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_a_range_of_a_shared_buffer(case: FormatCase, backend: str) -> None:
    """Four tokens into rows 3..7 of a buffer of seven: the last range clears the padding."""
    problem = _problem(CacheCase("BF16", 576))
    exact, _ = mlacast.reference.dense_mla_decode(
        problem.q,
        problem.cache,
        problem.page_table,
        problem.seq_lens,
        kv_format=mlacast.KvFormat.BF16,
        sm_scale=SM_SCALE,
    )
    buffer = poisoned_buffer(case, 7, 1, 1024)
    view = buffer[3:7]
    assert _run(problem, backend, view) is view
    filler = torch.randn(3, 1024)
    mlacast.quantize_output(filler, case.build(), out=buffer[0:3], backend=backend)
    whole = torch.cat((filler.view(3, 1, 1024), exact.reshape(4, 1, 1024)))
    assert_buffer_holds(buffer, case.expect(whole), case)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_quantised_output_has_the_bytes_of_the_quantised_reference(
    case: FormatCase, backend: str
) -> None:
    problem = _problem(CacheCase("BF16", 576))
    arguments = (problem.q, problem.cache, problem.page_table, problem.seq_lens)
    exact, exact_lse = mlacast.reference.dense_mla_decode(
        *arguments, kv_format=mlacast.KvFormat.BF16, sm_scale=SM_SCALE
    )
    out, lse = mlacast.dense_mla_decode(
        *arguments,
        kv_format=mlacast.KvFormat.BF16,
        sm_scale=SM_SCALE,
        out_format=case.build(),
        num_groups=2,
        backend=backend,
    )
    assert isinstance(out, mlacast.QuantizedTensor)
    assert_buffer_holds(out, case.expect(exact.reshape(4, 2, 512)), case)
    assert oracles.same_bits(lse, exact_lse.float())

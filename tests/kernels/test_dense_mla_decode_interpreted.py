"""The portable dense decode, interpreted: cache formats, causal tails, splits, outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.kernels.triton.dense_mla_decode import launch_dense_mla_decode
from tests import oracles
from tests.format_cases import FAMILIES, FormatCase, case_id
from tests.kernels import launches, store_cases
from tests.kernels.dense_decode_problems import Problem, make_problem
from tests.scenarios import CACHES, CacheCase, cache_id

BF16 = CacheCase("BF16", 576)
# Formats in turn without and with splits.
OUTPUTS = [(case, (1, 3)[at % 2]) for at, case in enumerate(FAMILIES)]


def case_name(value: FormatCase | int) -> str:
    """Readable parametrisation id."""
    return case_id(value) if isinstance(value, FormatCase) else f"{value}_splits"


def run(
    problem: Problem, q: Tensor, out: mlacast.QuantizedTensor, **options: Any
) -> launches.Result:
    """Run the launcher."""
    arguments: dict[str, Any] = {
        "kv_format": mlacast.KvFormat.from_name(problem.case.name),
        "sm_scale": launches.SM_SCALE,
        "v_scale": 1.0,
        "causal": True,
        "attn_sink": None,
        "num_splits": None,
        **options,
    }
    lse = torch.full(q.shape[:3], launches.POISON)
    # The interpreter reads bfloat16 wrongly: such rows in float32.
    is_rows = problem.cache.dtype == torch.bfloat16
    cache = problem.cache.float() if is_rows else problem.cache
    launch_dense_mla_decode(
        q, cache, problem.page_table, problem.seq_lens, out=out, lse=lse, **arguments
    )
    return launches.Result(out, lse.flatten(0, 1))


def draw_query(problem: Problem, per_request: int, heads: int) -> Tensor:
    """A query whose requests and tokens lie apart."""
    batch, width = problem.page_table.shape[0], problem.case.d_qk
    return torch.randn(per_request, batch, heads, width).transpose(0, 1)


@pytest.mark.parametrize("case", CACHES, ids=cache_id)
def test_every_cache_format(case: CacheCase) -> None:
    problem = make_problem(case, (34, 0), max_pages=7)
    q = draw_query(problem, 2, 2)
    result = run(problem, q, launches.float32_buffer(4, 2))
    flat = q.reshape(4, 2, case.d_qk)
    launches.assert_matches(
        result, oracles.attend(flat, problem.selected, sm_scale=launches.SM_SCALE)
    )


@pytest.mark.parametrize(
    ("num_splits", "per_request", "heads", "page_size", "causal"),
    [
        (1, 1, 1, 1, True),
        (1, 3, 17, 5, False),
        (2, 4, 2, 64, True),
        (3, 2, 1, 5, True),
        (8, 1, 3, 1, False),
    ],
)
def test_splits_tails_and_sinks(
    num_splits: int, per_request: int, heads: int, page_size: int, causal: bool
) -> None:
    problem = make_problem(
        BF16,
        (40, 2, -4) if page_size == 64 else (34, 1000),
        per_request=per_request,
        page_size=page_size,
        max_pages=max(2, 40 // page_size),
        causal=causal,
    )
    tokens = problem.page_table.shape[0] * per_request
    q, sink = draw_query(problem, per_request, heads), launches.sinks(heads)
    result = run(
        problem,
        q,
        launches.float32_buffer(tokens, heads),
        causal=causal,
        attn_sink=sink,
        num_splits=num_splits,
    )
    flat = q.reshape(tokens, heads, 576)
    launches.assert_matches(
        result,
        oracles.attend(flat, problem.selected, sm_scale=launches.SM_SCALE, attn_sink=sink),
    )


@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_an_e4m3_query_and_scales(num_splits: int, on_device: bool) -> None:
    problem = make_problem(CacheCase("FP8", 576), (33, 7), max_pages=7)
    q = draw_query(problem, 2, 3).to(torch.float8_e4m3fn)
    scales: dict[str, Any] = {"sm_scale": 0.0625, "v_scale": -2.5}
    if on_device:
        scales = {name: torch.tensor([value]) for name, value in scales.items()}
    result = run(problem, q, launches.float32_buffer(4, 3), num_splits=num_splits, **scales)
    plain = oracles.attend(q.float().reshape(4, 3, 576), problem.selected, sm_scale=0.0625)
    # Weights are rounded to float16, half a unit of which is 2**-11.
    largest = max(float(rows[:, :512].abs().max()) for rows in problem.selected if len(rows))
    expected = dataclasses.replace(
        plain, out=plain.out * -2.5, out_error=(plain.out_error + largest * 2.0**-10) * 2.5
    )
    launches.assert_matches(result, expected)


@pytest.mark.parametrize(("case", "num_splits"), OUTPUTS, ids=lambda value: case_name(value))
def test_quantised_bytes_are_those_of_the_float32_output(case: FormatCase, num_splits: int) -> None:
    problem = make_problem(BF16, (33, 7), per_request=1, max_pages=7)
    q = draw_query(problem, 1, 4)
    exact = run(problem, q, launches.float32_buffer(2, 4), num_splits=num_splits).out.data
    start, total = {1: (1, 9), 3: (2, 4)}[num_splits]
    actual = store_cases.empty_buffer(case, total, 2, 1024, "cpu")
    expected = store_cases.empty_buffer(case, total, 2, 1024, "cpu")
    run(problem, q, actual[start : start + 2], num_splits=num_splits)
    mlacast.reference.quantize_output(exact.reshape(2, 2, 1024), expected[start : start + 2])
    store_cases.assert_same_storages(actual, expected)

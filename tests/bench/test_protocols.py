"""Summaries of times, the number of input sets, and inputs that rotate."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mlacast.bench.cases import CASES
from mlacast.bench.compile import compile_cases
from mlacast.bench.costs import moved_bytes
from mlacast.bench.inputs import Pools, number_of_sets, prepare
from mlacast.bench.protocols import summarise
from tests.bench.small import shrink

L2_BYTES = 60 << 20


def test_a_summary_is_per_call() -> None:
    timing = summarise([float(us) for us in range(110, -10, -10)], 10)
    assert (timing.p10_us, timing.median_us, timing.p90_us) == pytest.approx((1.1, 5.5, 9.9))
    assert (timing.repeats, timing.calls) == (12, 10)


def test_one_time_is_its_own_summary() -> None:
    timing = summarise([7.0], 1)
    assert (timing.p10_us, timing.median_us, timing.p90_us) == (7.0, 7.0, 7.0)


def test_a_graph_leaves_nothing_in_the_cache() -> None:
    for case in CASES:
        sets = number_of_sets(case, L2_BYTES)
        if case.protocol == "burst":
            assert sets == 1
        elif sets < 512:
            assert sets * moved_bytes(case) >= 2 * L2_BYTES


def test_small_prefill_rotates_over_rows_larger_than_the_cache() -> None:
    case = next(case for case in CASES if case.tokens == 1 and case.kv_format is None)
    small = dataclasses.replace(shrink(case), tokens=1)
    row_bytes = small.rows * small.d_qk * 2
    workload = prepare(small, Pools(torch.device("cpu")), 8, row_bytes)
    addresses = [item.kv.data_ptr() for item in workload.sets if item.kv is not None]
    assert addresses[:3] * 2 + addresses[:2] == addresses
    assert len(set(addresses)) * row_bytes > 2 * row_bytes


def test_sets_share_pools_and_nothing_else() -> None:
    case = next(case for case in CASES if case.kv_format is not None)
    workload = prepare(shrink(case), Pools(torch.device("cpu")), 2, 0)
    first, second = workload.sets
    assert not torch.equal(first.indices, second.indices)
    assert first.q.data_ptr() != second.q.data_ptr()
    assert workload.arguments(first)["k_cache"] is workload.arguments(second)["k_cache"]


def test_compiling_in_one_process_is_left_to_the_run() -> None:
    compile_cases(["no such case"] * 2, torch.device("cpu"), chain=True, jobs=1)

"""The gate lets a right call through and stops a wrong one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mlacast
from mlacast.bench.cases import CASES, Case
from mlacast.bench.gate import Gate, check_call
from mlacast.bench.inputs import InputSet, Pools, Workload, prepare
from mlacast.bench.run import run_case
from tests.bench.small import L2_BYTES, shrink, ten_us

PREFILL = next(case for case in CASES if case.op == "sparse_mla_prefill")
DECODE = next(case for case in CASES if case.op == "sparse_mla_decode")
PLAIN = next(case for case in CASES if not case.fused)


def workload_of(case: Case) -> tuple[Workload, InputSet]:
    workload = prepare(shrink(case), Pools(torch.device("cpu")), 1, 0)
    return workload, workload.sets[0]


def changed(workload: Workload, item: InputSet, **changes: Any) -> Callable[[], object]:
    op = getattr(mlacast, workload.case.op)
    return functools.partial(op, **{**workload.arguments(item), **changes}, out=item.out)


@pytest.mark.parametrize("case", [PREFILL, DECODE, PLAIN], ids=lambda case: case.name)
def test_a_right_call_passes(case: Case) -> None:
    workload, item = workload_of(case)
    assert check_call(workload, item, workload.call(item)).passed


@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=lambda case: case.name)
@pytest.mark.parametrize("left_out", ["rope", "attn_sink", "q_norm_eps"])
def test_a_step_left_out_does_not_pass(case: Case, left_out: str) -> None:
    workload, item = workload_of(case)
    assert not check_call(workload, item, changed(workload, item, **{left_out: None})).passed


def test_a_scale_off_by_two_percent_does_not_pass() -> None:
    workload, item = workload_of(PLAIN)
    scale = workload.arguments(item)["sm_scale"] * 1.02
    assert not check_call(workload, item, changed(workload, item, sm_scale=scale)).passed


@pytest.mark.parametrize("case", [PREFILL, PLAIN], ids=lambda case: case.name)
def test_a_token_left_unwritten_is_seen(case: Case) -> None:
    workload, item = workload_of(case)
    right = workload.call(item)

    def skip_one_head() -> object:
        result = right()
        if isinstance(item.out, torch.Tensor):
            item.out[2, 3] = float("nan")
        else:
            item.out.data.view(torch.uint8)[2, 0, 512:1024] = 0x7F
        return result

    gate = check_call(workload, item, skip_one_head)
    assert gate.unwritten == 512
    assert not gate.passed


@pytest.mark.parametrize(
    ("figures", "passes"),
    [
        ((5e-3, 6e-3, 4e-3, 5e-3, 0), True),
        ((6e-3, 6e-3, 5e-3, 5e-3, 0), True),
        ((7e-3, 6e-3, 0.0, 5e-3, 0), False),
        ((0.0, 6e-3, 6e-3, 5e-3, 0), False),
        ((0.0, 6e-3, 0.0, 5e-3, 1), False),
        ((float("nan"), 6e-3, 0.0, 5e-3, 0), False),
        ((0.0, 6e-3, float("nan"), 5e-3, 0), False),
    ],
)
def test_every_figure_counts_by_itself(
    figures: tuple[float, float, float, float, int], passes: bool
) -> None:
    assert Gate(*figures).passed == passes


def test_outputs_and_logarithms_are_judged_apart() -> None:
    """Outputs off by 1.5 percent beside a right LSE, and an LSE off by 0.01 beside them."""
    workload, item = workload_of(PLAIN)
    right = workload.call(item)

    def wrong_output() -> object:
        result = right()
        assert isinstance(item.out, torch.Tensor)
        item.out.mul_(1.015)
        return result

    def wrong_logarithms() -> object:
        result = right()
        assert isinstance(result, tuple)
        return (*result[:-1], result[-1] + 0.01)

    for call, wrong in ((wrong_output, "error"), (wrong_logarithms, "lse_error")):
        gate = check_call(workload, item, call)
        assert not gate.passed
        beyond = {"error": gate.error > gate.limit, "lse_error": gate.lse_error > gate.lse_limit}
        assert [name for name, is_beyond in beyond.items() if is_beyond] == [wrong]


def test_a_wrong_case_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mlacast.sparse_mla_prefill

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **{**kwargs, "sm_scale": kwargs["sm_scale"] * 1.5})

    monkeypatch.setattr(mlacast, "sparse_mla_prefill", wrong)
    pools = Pools(torch.device("cpu"))
    options: dict[str, Any] = {"l2_bytes": L2_BYTES, "repeats": 3, "chain": True}
    result = run_case(shrink(PREFILL), pools, **options, measure=ten_us)
    assert result.times == {}
    assert result.error == "differs from the reference: op"


def test_an_exception_is_a_result() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no clock")

    pools = Pools(torch.device("cpu"))
    result = run_case(
        shrink(PREFILL), pools, l2_bytes=L2_BYTES, repeats=3, chain=True, measure=broken
    )
    assert (result.times, result.error) == ({}, "RuntimeError: no clock")

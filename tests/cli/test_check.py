"""``mlacast check``: passes here, and notices a library that computes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mlacast
from mlacast.cli import self_tests
from tests.cli.result import Run, json_of


def test_passes_on_the_cpu(run: Run) -> None:
    outcome = run("check", "--device", "cpu")
    assert outcome.exit_code == 0
    assert "FAIL" not in outcome.stdout
    assert mlacast.__version__ in outcome.stdout
    assert torch.__version__ in outcome.stdout


def test_json(run: Run) -> None:
    outcome = run("check", "--device", "cpu", "--backend", "reference", "--json")
    assert outcome.exit_code == 0
    answer = json_of(outcome)
    assert answer["passed"] is True
    assert answer["environment"]["device"] == "cpu"
    assert answer["environment"]["backend"] == "reference"
    assert answer["environment"]["packages"]["torch"] == torch.__version__
    assert [test["passed"] for test in answer["tests"]] == [True] * len(self_tests.SELF_TESTS)


def test_one_wrong_bit_fails_the_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right = mlacast.quantize_output

    def wrong(*args: Any, **kwargs: Any) -> mlacast.QuantizedTensor:
        result = right(*args, **kwargs)
        result.data.view(torch.uint8)[0, 0, 5] ^= 1
        return result

    monkeypatch.setattr(mlacast, "quantize_output", wrong)
    outcome = run("check", "--device", "cpu", "--json")
    assert outcome.exit_code == 1
    answer = json_of(outcome)
    assert answer["passed"] is False
    failed = {test["name"] for test in answer["tests"] if not test["passed"]}
    assert failed == {"e4m3 codes", "NVFP4 codes and scales"}


@pytest.mark.parametrize(
    ("scale", "failed"),
    [
        (1.02, {"prefill against float64"}),
        (float("nan"), {"prefill against float64"}),
    ],
)
def test_a_wrong_prefill_fails_the_check(
    run: Run, monkeypatch: pytest.MonkeyPatch, scale: float, failed: set[str]
) -> None:
    right = mlacast.sparse_mla_prefill

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out, max_logits, lse = right(*args, **kwargs)
        return (out * scale if isinstance(out, torch.Tensor) else out), max_logits, lse

    monkeypatch.setattr(mlacast, "sparse_mla_prefill", wrong)
    answer = json_of(run("check", "--device", "cpu", "--json"))
    assert {test["name"] for test in answer["tests"] if not test["passed"]} == failed


def test_a_wrong_lse_fails_the_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right = mlacast.sparse_mla_prefill

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out, max_logits, lse = right(*args, **kwargs)
        return out, max_logits, lse + 1e-3

    monkeypatch.setattr(mlacast, "sparse_mla_prefill", wrong)
    outcome = run("check", "--device", "cpu")
    assert outcome.exit_code == 1
    assert outcome.stdout.count("FAIL") == 1


def test_an_exception_is_a_failure_and_the_rest_still_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no [such] kernel")

    monkeypatch.setattr(mlacast, "sparse_mla_decode", broken)
    outcome = run("check", "--device", "cpu")
    assert outcome.exit_code == 1
    assert "RuntimeError: no [such] kernel" in outcome.stdout
    assert outcome.stdout.count("pass") == len(self_tests.SELF_TESTS) - 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "nowhere"), "nowhere"),
        (("--backend", "cutlass"), "backend must be one of"),
    ],
)
def test_bad_options_are_refused(run: Run, arguments: tuple[str, ...], words: str) -> None:
    outcome = run("check", *arguments)
    assert outcome.exit_code == 2
    assert words in outcome.stderr

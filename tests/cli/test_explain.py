"""``mlacast explain``: the backend an operation gets, as text and as JSON."""

from __future__ import annotations

import pytest

from tests.cli.result import Run, json_of


def test_text_names_operation_device_and_backend(run: Run) -> None:
    outcome = run("explain", "sparse_mla_decode")
    assert outcome.exit_code == 0
    assert "sparse_mla_decode on cpu: reference" in outcome.stdout


def test_json(run: Run) -> None:
    answer = json_of(run("explain", "quantize_output", "--device", "cpu", "--json"))
    assert answer["op"] == "quantize_output"
    assert answer["arch"] == "cpu"
    assert answer["backend"] == "reference"
    reasons = {verdict["backend"]: verdict["reason"] for verdict in answer["verdicts"]}
    assert reasons["reference"] == ""
    assert reasons["triton"] == reasons["hopper"] == "does not implement this operation"


def test_a_backend_that_does_not_run_there_gives_exit_code_1(run: Run) -> None:
    outcome = run("explain", "sparse_mla_decode", "--backend", "hopper", "--device", "cpu")
    assert outcome.exit_code == 1
    assert "asked for: hopper" in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sparse_mla",), "op must be one of"),
        (("sparse_mla_decode", "--backend", "fast"), "backend must be one of"),
        (("sparse_mla_decode", "--device", "gpu9"), "gpu9"),
        ((), "Missing argument"),
    ],
)
def test_bad_arguments_are_refused(run: Run, arguments: tuple[str, ...], words: str) -> None:
    outcome = run("explain", *arguments)
    assert outcome.exit_code == 2
    assert words in outcome.stderr
    assert outcome.stdout == ""


def test_the_environment_variable_counts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLACAST_BACKEND", "nonsense")
    outcome = run("explain", "sparse_mla_decode")
    assert outcome.exit_code == 2
    assert "MLACAST_BACKEND" in outcome.stderr

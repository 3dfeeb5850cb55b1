"""``mlacast bench``: what it says without a GPU, the list of cases, tables of a made-up run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mlacast.bench.cases import CASES
from tests.bench.small import report_of, run_small
from tests.cli.result import Run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_it_says_what_it_needs(run: Run) -> None:
    outcome = run("bench")
    assert outcome.exit_code == 1
    assert "need an NVIDIA GPU" in outcome.stderr
    assert len(outcome.stderr.strip().splitlines()) == 1


@pytest.mark.usefixtures("without_gpu")
def test_the_list_needs_no_gpu(run: Run) -> None:
    outcome = run("bench", "--list")
    assert outcome.exit_code == 0
    assert [case.name for case in CASES if case.name not in outcome.stdout] == []
    outcome = run("bench", "--list", "--case", "prefill-v32")
    assert "decode" not in outcome.stdout


def test_an_unknown_case_is_refused(run: Run) -> None:
    outcome = run("bench", "--case", "nothing")
    assert outcome.exit_code == 2
    assert "no case contains 'nothing'" in outcome.stderr


def test_the_script_of_a_checkout_has_the_same_options() -> None:
    command = [sys.executable, "benchmarks/run.py", "--list", "--case", "prefill-v32"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "prefill-v32-h128-k2048-kv8192-t4096" in done.stdout


@pytest.mark.parametrize("wrong", [False, True])
def test_tables_and_exit_code(run: Run, monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    from mlacast.cli import bench

    asked: dict[str, Any] = {}

    def pretend(cases: Any, device: torch.device, **options: Any) -> dict[str, Any]:
        asked.update(options, cases=[case.name for case in cases], device=device)
        result = run_small(cases[0])
        if wrong:
            result.times, result.error = {}, "differs from the reference: op"
        options["progress"](result)
        return report_of([result])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bench, "run", pretend)
    options = ("--quick", "--no-chain", "--no-host", "--json", "x.json")
    outcome = run("bench", "--case", "prefill-h64-k2048", *options)
    assert outcome.exit_code == (1 if wrong else 0), outcome.stderr
    assert asked["cases"] == ["prefill-h64-k2048-kv8192-t4096"]
    assert (asked["quick"], asked["chain"], asked["host"]) == (True, False, False)
    assert asked["json_path"] == Path("x.json")
    words = "differs from the reference: op" if wrong else "10.0 (10.0, 10.0)"
    assert words in outcome.stdout
    assert "host-decode" in outcome.stdout
    assert "prefill-h64-k2048-kv8192-t4096: " in outcome.stderr

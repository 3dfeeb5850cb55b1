"""Options of ``mlacast demo``: what reaches the job, its exit code, missing packages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cli.result import Run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the job by one that only notes what it was asked for."""
    seen: list[dict[str, Any]] = []
    job = ModuleType("mlacast.cli.demo")

    def run_demo(*, json: bool, out: Path | None, device: str | None, seed: int) -> int:
        seen.append({"json": json, "out": out, "device": device, "seed": seed})
        if device == "missing":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        if device == "old":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        return 3 if device == "fails" else 0

    monkeypatch.setattr(job, "run_demo", run_demo, raising=False)
    monkeypatch.setitem(sys.modules, "mlacast.cli.demo", job)
    return seen


def test_defaults(run: Run, calls: list[dict[str, Any]]) -> None:
    assert run("demo").exit_code == 0
    assert calls == [{"json": False, "out": None, "device": None, "seed": 0}]


def test_options(run: Run, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    outcome = run("demo", "--json", "--out", str(tmp_path), "--device", "cpu", "--seed", "7")
    assert outcome.exit_code == 0
    assert calls == [{"json": True, "out": tmp_path, "device": "cpu", "seed": 7}]


def test_exit_code_is_that_of_the_job(run: Run, calls: list[dict[str, Any]]) -> None:
    assert run("demo", "--device", "fails").exit_code == 3


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("missing", "pip install 'mlacast[cli]'"),
        ("old", "pip install 'mlacast[transformers]'; transformers >= 5.24 needs Python 3.11"),
    ],
)
def test_a_missing_package_is_named_with_the_remedy(
    run: Run, calls: list[dict[str, Any]], device: str, words: str
) -> None:
    outcome = run("demo", "--device", device)
    assert outcome.exit_code == 1
    assert words in outcome.stderr
    assert outcome.stdout == ""

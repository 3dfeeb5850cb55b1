"""tools/fuzz.py: how a run is cut into processes, and what it makes of their output."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tools import fuzz
from tools.fuzz import Part


def test_parts_share_the_calls_and_have_seeds_of_their_own() -> None:
    parts = fuzz.parts_of(1001, 3, 50)
    natural = [part for part in parts if not part.interpreted]
    assert sum(part.examples for part in natural) >= 1001
    interpreted = [part for part in parts if part.interpreted]
    assert sum(part.examples for part in interpreted) >= 1001
    assert len({part.seed for part in parts}) == len(parts) == 6
    assert {part.variables["MLACAST_FUZZ_EXAMPLES"] for part in parts} == {"334"}


@pytest.mark.parametrize(
    ("output", "status", "wanted"),
    [("..\nfuzz: 70 cases\n", 0, 0), ("fuzz: 20 cases\n", 0, 1), ("fuzz: 70 cases\n", 1, 1)],
)
def test_a_run_fails_for_a_failure_or_for_too_few_calls(
    output: str,
    status: int,
    wanted: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert "--hypothesis-seed=" in command[-1]
        return subprocess.CompletedProcess(command, status, output, "")

    monkeypatch.setattr(subprocess, "run", run)
    options = ["--cases", "100", "--processes", "1", "--jobs", "1", "--seed", "7"]
    assert fuzz.main(options) == wanted
    printed = capsys.readouterr().out
    assert "seeds 7 to 8" in printed and "cases in all" in printed
    assert ("repeat: " in printed) == (status == 1)


def test_part_is_a_command_that_pytest_takes() -> None:
    assert Part(5, 9, True).command[-1] == "--hypothesis-seed=9"
    assert Part(5, 9, True).variables["TRITON_INTERPRET"] == "1"

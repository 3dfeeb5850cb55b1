"""The list of tests that run under compute-sanitizer, and how its words are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import sanitize_gpu

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_of_the_list_exists() -> None:
    nodes = [f"tests/gpu/{test}" for test in sanitize_gpu.TESTS]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *nodes], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-500:]
    assert set(nodes) <= set(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("output", "count"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("== ERROR SUMMARY: 0 errors\n== ERROR SUMMARY: 3 errors\n", 3),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        ("1 passed in 3.00s\n", None),
    ],
)
def test_errors_are_counted(output: str, count: int | None) -> None:
    assert sanitize_gpu.summary(output) == count


@pytest.mark.parametrize(
    ("code", "output", "clean"),
    [
        (0, "1 passed in 3.0s\n== ERROR SUMMARY: 0 errors\n", True),
        (0, "1 passed in 3.0s\n== ERROR SUMMARY: 2 errors\n", False),
        (0, "1 passed in 3.0s\n", False),
        (0, "1 skipped in 3.0s\n== ERROR SUMMARY: 0 errors\n", False),
        (0, "1 passed, 1 skipped in 3.0s\n== ERROR SUMMARY: 0 errors\n", False),
        (1, "1 failed in 3.0s\n== ERROR SUMMARY: 0 errors\n", False),
    ],
)
def test_only_a_passed_run_without_errors_is_clean(
    monkeypatch: pytest.MonkeyPatch, code: int, output: str, clean: bool
) -> None:
    def fake(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, output, "")

    monkeypatch.setattr(subprocess, "run", fake)
    assert sanitize_gpu.run("sanitizer", "memcheck", "a_test", 1.0).is_clean is clean

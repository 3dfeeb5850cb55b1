"""The command line as a whole: help, version, unknown commands, missing packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mlacast
from tests.cli.result import Run

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("demo", "check", "explain", "formats", "bench", "list-dumps", "replay")


def test_version(run: Run) -> None:
    outcome = run("--version")
    assert outcome.exit_code == 0
    assert outcome.stdout.strip() == mlacast.__version__


def test_help_lists_every_command(run: Run) -> None:
    outcome = run("--help")
    assert outcome.exit_code == 0
    for command in COMMANDS:
        assert command in outcome.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(run: Run, command: str) -> None:
    outcome = run(command, "--help")
    assert outcome.exit_code == 0
    assert "--json" in outcome.stdout


def test_an_unknown_command_is_an_error(run: Run) -> None:
    outcome = run("chekc")
    assert outcome.exit_code == 2
    assert "chekc" in outcome.stderr


def test_python_m_mlacast_runs_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlacast", "formats", "V32", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert '"V32"' in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_named_with_the_remedy(package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; import mlacast.cli as c; c.main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert package in done.stderr
    assert "pip install 'mlacast[cli]'" in done.stderr
    assert "Traceback" not in done.stderr

"""The script for the newest triton: what it installs where, and what its exit status says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import triton_latest


def test_only_triton_is_installed_on_top_of_what_is_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: f"{tmp_path}\n")
    python = triton_latest.install(tmp_path / "environment")
    make, pip = commands
    assert make[:3] == [sys.executable, "-m", "venv"]
    assert pip[0] == str(python)
    assert pip[-1] == "triton" and "--no-deps" in pip
    folders = (tmp_path / "_packages_underneath.pth").read_text().splitlines()
    assert folders and all(Path(folder).name.endswith("-packages") for folder in folders)


@pytest.mark.parametrize(("status", "words"), [(0, "nothing breaks"), (1, "failures above")])
def test_the_exit_status_is_that_of_the_tests(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    words: str,
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        assert command[1:4] == ["-m", "pytest", "tests/kernels"] and command[-1] == "-x"
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: "9.9.9\n")
    assert triton_latest.run_tests(Path("python"), ["-x"]) == status
    said = capsys.readouterr().out
    assert "triton 9.9.9" in said and words in said


def test_the_folder_must_be_named() -> None:
    with pytest.raises(SystemExit, match="name the folder"):
        triton_latest.main([])

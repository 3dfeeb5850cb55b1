"""The environment script: which torch it takes, and the pins it installs with."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tools import make_env


def installed(monkeypatch: pytest.MonkeyPatch, packages: dict[str, tuple[str, list[str]]]) -> None:
    """Pretend that exactly these packages are installed: name -> (version, requirements)."""

    def look_up(name: str) -> tuple[str, list[str]]:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(metadata, "version", lambda name: look_up(name)[0])
    monkeypatch.setattr(metadata, "requires", lambda name: look_up(name)[1])


def imports(monkeypatch: pytest.MonkeyPatch, *, works: bool) -> None:
    def run(*args: object, **kwargs: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess([], 0 if works else 1)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize(
    ("version", "taken"),
    [
        ("2.11.0", True),
        ("2.13.0+cu130", True),
        ("2.12.0a0+gitabc", True),
        ("3.0", True),
        ("2.10.1", False),
        ("1.13.1", False),
        ("unknown", False),
    ],
)
def test_a_new_enough_torch_is_taken(
    monkeypatch: pytest.MonkeyPatch, version: str, taken: bool
) -> None:
    installed(monkeypatch, {"torch": (version, [])})
    imports(monkeypatch, works=True)
    assert make_env.host_torch() == (version if taken else None)


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    assert make_env.host_torch() is None


def test_a_torch_that_cannot_be_imported_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"torch": ("2.13.0", [])})
    imports(monkeypatch, works=False)
    assert make_env.host_torch() is None


def test_without_a_host_torch_every_pin_applies(tmp_path: Path) -> None:
    target = tmp_path / "constraints.txt"
    make_env.write_constraints(target, None)
    assert target.read_text() == (make_env.ROOT / "constraints.txt").read_text()


def test_around_a_host_torch_its_own_packages_are_not_pinned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = {
        "torch": ("2.11.0+cu126", ["typing_extensions>=4", "sympy", 'opt; extra == "opt-einsum"']),
        "typing-extensions": ("4.1", []),
        "sympy": ("1.13", ["mpmath<1.4"]),
        "mpmath": ("1.3", ["sympy; python_version > '3'"]),
        "pytest": ("8.0", []),
    }
    installed(monkeypatch, packages)
    target = tmp_path / "constraints.txt"
    make_env.write_constraints(target, "2.11.0+cu126")
    lines = target.read_text().splitlines()
    names = [line.split("==")[0] for line in lines if not line.startswith("#")]
    assert "torch==2.11.0+cu126" in lines
    assert names.count("torch") == 1
    assert not {"typing-extensions", "sympy", "mpmath"} & set(names)
    assert {"pytest", "ruff", "numpy"} <= set(names)


def test_triton_is_looked_for_in_the_environment_not_here(tmp_path: Path) -> None:
    empty = tmp_path / "python"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    empty.chmod(0o755)
    assert not make_env.has_triton(empty)

"""The command line as a function: arguments in, exit code and text out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

typer_testing = pytest.importorskip("typer.testing", reason="the extra `cli` is not installed")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """``run("check", "--json")``: a result with ``exit_code``, ``stdout`` and ``stderr``."""
    # Wide enough that no sentence is broken, and no colours between its words.
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def invoke(*arguments: str) -> object:
        from mlacast.cli.app import app

        return typer_testing.CliRunner().invoke(app, list(arguments))

    return invoke

"""Logs of every level, none of which shares a file with another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlacast.call_log.settings import Settings
from tests.logging.observed import Log


@pytest.fixture
def make_log(tmp_path: Path) -> Callable[..., Log]:
    """``make_log(level, **settings)``: a log in a fresh folder."""

    def make(level: int, **settings: Any) -> Log:
        return Log(
            Settings(
                level,
                str(tmp_path / "log.txt"),
                dump_dir=tmp_path / "dumps",
                **settings,
            )
        )

    return make


@pytest.fixture
def dump_log(make_log: Callable[..., Log]) -> Log:
    """A log that dumps."""
    return make_log(10)

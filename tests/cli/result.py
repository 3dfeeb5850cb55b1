"""Type of what a command gave back, so that tests need not know typer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol


class Outcome(Protocol):
    """Exit code and text of one command."""

    exit_code: int

    @property
    def stdout(self) -> str: ...

    @property
    def stderr(self) -> str: ...


Run = Callable[..., Outcome]


def json_of(outcome: Outcome) -> Any:
    """Parse all of standard output as strict JSON."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(outcome.stdout, parse_constant=refuse)

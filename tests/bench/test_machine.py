"""What a report says about where its numbers come from."""

from __future__ import annotations

import pytest

from mlacast.bench.machine import command_line


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ([], "mlacast bench"),
        (["bench", "--quick"], "mlacast bench --quick"),
        (
            ["--case", "a b", "--json", "/some/where.json", "--quick"],
            "mlacast bench --case 'a b' --quick",
        ),
        (["bench", "--json=x.json"], "mlacast bench"),
    ],
)
def test_the_command_works_from_every_installation(options: list[str], command: str) -> None:
    assert command_line(options) == command

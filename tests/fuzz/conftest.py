"""Count the calls that are drawn; keep interpreted files to processes that interpret."""

from __future__ import annotations

import os
from typing import Any

from tests.fuzz.subjects import CASES

# Triton decides at import time whether its functions are compiled or interpreted.
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import hurries, hurry

    if hurries():
        hurry()
    collect_ignore_glob = [
        "test_in_the_interpreter.py",
        "test_operations.py",
        "test_drop_ins.py",
        "test_invalid.py",
        "test_steadiness.py",
        "test_tool.py",
    ]
else:
    collect_ignore_glob = ["test_*_interpreted.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many calls were drawn by this process."""
    if CASES:
        terminalreporter.write_line(f"fuzz: {sum(CASES.values())} cases")

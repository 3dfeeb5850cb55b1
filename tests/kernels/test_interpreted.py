"""Run every ``test_*_interpreted.py`` in a process of its own under Triton's CPU interpreter.

Triton decides at import time whether its functions are compiled or interpreted, and other tests of
the same process may have imported it already.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the portable kernels need triton")
pytest.importorskip("numpy", reason="triton's interpreter needs numpy")

HERE = Path(__file__).resolve().parent
FILES = sorted(HERE.glob("test_*_interpreted.py"))


def test_there_are_interpreted_files() -> None:
    assert len(FILES) >= 4


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.stem).removeprefix("test_"))
def test_passes_in_the_interpreter(file: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(file),
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
    ]
    done = subprocess.run(
        command, cwd=HERE.parent.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout.splitlines()[-1], done.stdout[-2000:]

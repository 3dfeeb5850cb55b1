"""Run every ``test_*_interpreted.py`` under Triton's CPU interpreter, in processes of their own.

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
# A process takes seconds to import what it needs, and several share the work.
PROCESSES = 4


def test_there_are_interpreted_files() -> None:
    assert len(FILES) >= 4


@pytest.mark.parametrize("part", range(PROCESSES))
def test_passes_in_the_interpreter(part: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    files = [str(file) for file in FILES[part::PROCESSES]]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *files, *options],
        cwd=HERE.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout.splitlines()[-1], done.stdout[-2000:]

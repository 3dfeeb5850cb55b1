"""Start the interpreted share of the calls in a process of its own, as part of the suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.profile import EXAMPLES

pytest.importorskip("triton", reason="the portable kernels need triton")
pytest.importorskip("numpy", reason="triton's interpreter needs numpy")

HERE = Path(__file__).resolve().parent


@pytest.mark.skipif(EXAMPLES is not None, reason="a long run starts such a process itself")
def test_drawn_calls_pass_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", str(HERE), *options]
    done = subprocess.run(
        command, cwd=HERE.parent.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]

"""Everything here runs on a GPU; without one it is skipped."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu import steps

HERE = Path(__file__).resolve().parent
TIME_LIMIT_S = 200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where torch sees no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is false")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture
def end_hanging_process() -> Iterator[None]:
    """Warp groups that wait for each other would keep the process, and the GPU, for ever."""
    faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=["triton", None], ids=["triton", "chosen"])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test through the portable backend, and through the one that dispatch chooses."""
    monkeypatch.setattr(steps, "BACKEND", request.param)

"""Fixtures of the whole suite: seeds, a clean environment, backends, memory never cleared."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

BACKENDS = ("reference",)
ENVIRONMENT = ("MLACAST_BACKEND", "MLACAST_VALIDATE", "MLACAST_BATCH_INVARIANT")


@pytest.fixture(autouse=True)
def _seed_from_node_id(request: pytest.FixtureRequest) -> None:
    """Seed torch from the test's id: stable between runs, different between tests."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own switches must not change what the tests see."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that can run on this machine."""
    return str(request.param)


@pytest.fixture
def poison() -> Callable[..., Tensor]:
    """``poison(*shape, dtype=...)``: a tensor of 0x5A bytes, to see what a call wrote."""

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0x5A)
        return tensor

    return make


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """Fill every torch.empty with NaN or the largest integer."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        assert torch.empty(3, dtype=torch.uint8).tolist() == [255] * 3
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@pytest.fixture
def validate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the value checks on for one test."""
    monkeypatch.setenv("MLACAST_VALIDATE", "1")

"""Fixture of the layout tests: memory that was never cleared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


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

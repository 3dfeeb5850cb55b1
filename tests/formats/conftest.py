"""Fixtures of the number format tests: an older build's cast, and flushed denormals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def cast_gives_nan_above_448(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every conversion to e4m3 answer NaN above 448, as older builds of the framework do."""
    real_to = torch.Tensor.to

    def cast(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = real_to(self, *args, **kwargs)
        if torch.float8_e4m3fn in (*args, *kwargs.values()) and self.dtype != torch.float8_e4m3fn:
            result = result.clone()
            result.view(torch.uint8)[self.abs() > 448.0] = 0x7F
        return result

    monkeypatch.setattr(torch.Tensor, "to", cast)
    probe = torch.tensor([449.0]).to(torch.float8_e4m3fn)
    assert probe.view(torch.uint8).tolist() == [0x7F], "the patched cast must answer NaN above 448"


@pytest.fixture
def flushed_denormals() -> Iterator[None]:
    """Flush float32 denormals in the arithmetic of this thread."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    yield
    torch.set_flush_denormal(False)

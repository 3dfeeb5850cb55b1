"""The example in docs/integrations/transformers.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "transformers.md"


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    torch.manual_seed(0)
    exec(compile(blocks[0], str(PAGE), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert float(lines[0].removeprefix("cosine: ")) > 0.99
    assert lines[1].count(",") == 7

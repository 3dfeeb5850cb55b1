"""Functions observed with settings of their own, and the dumps that they leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlacast
from mlacast.call_log import exported
from mlacast.call_log.record_file import append_record
from mlacast.call_log.settings import Settings

NAME = "mlacast.quantize_output"


@dataclass(frozen=True)
class Log:
    """A log of one level under a folder of its own.

    Attributes:
        settings: What is logged.
    """

    settings: Settings

    def observe(self, function: Callable[..., Any], name: str = NAME) -> Callable[..., Any]:
        """Return ``function`` as the public function ``name`` would be."""
        return exported(function, name, self.settings)

    def observed(self, name: str) -> Callable[..., Any]:
        """Return a public core function, observed."""
        return self.observe(getattr(mlacast, name), f"mlacast.{name}")

    @property
    def text(self) -> str:
        path = Path(self.settings.destination)
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def dumps(self) -> list[Path]:
        """Folders of the dumps, in the order of the calls."""
        root = self.settings.dump_dir
        folders = [path for path in root.iterdir() if path.is_dir()] if root.exists() else []
        return sorted(folders, key=lambda path: records_of(path)[0]["sequence"])

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.settings.dump_dir / "session.jsonl").open()]


def records_of(folder: Path) -> list[dict[str, Any]]:
    """Every line of a dump's record."""
    return [json.loads(line) for line in (folder / "metadata.jsonl").open()]


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a changed record whose checksum is right: by somebody who knows how."""
    record = records_of(folder)[-1]
    del record["sha256"]
    change(record)
    (folder / "metadata.jsonl").unlink()
    append_record(folder / "metadata.jsonl", record)

"""What a report says about where its numbers come from."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mlacast


def _output_of(*command: str) -> str | None:
    """First line that a program prints, None where there is no such program or it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def _commit() -> str | None:
    """Commit of the sources, "+" behind it if they differ; None outside of a checkout."""
    # An installed copy may lie inside somebody else's repository.
    top = _output_of("git", "rev-parse", "--show-toplevel")
    if top is None or Path(top, "mlacast") != Path(mlacast.__file__).parent:
        return None
    commit = _output_of("git", "rev-parse", "HEAD")
    changed = _output_of("git", "status", "--porcelain", "--", str(Path(top, "mlacast")))
    return f"{commit}+" if commit and changed else commit


def version_of(package: str) -> str | None:
    """Return the installed version of a package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def command_line(options: Sequence[str]) -> str:
    """Return the command that gives this run, in a form that works from every installation.

    Where the numbers were written to is left out.
    """
    kept = [option for option in options if not option.startswith("--json=")]
    if "--json" in kept:
        at = kept.index("--json")
        del kept[at : at + 2]
    # benchmarks/run.py goes without the word.
    return shlex.join(["mlacast", "bench", *kept[kept[:1] == ["bench"] :]])


def describe(device: torch.device) -> dict[str, Any]:
    """Return hardware, versions, date and command line as plain values."""
    properties = torch.cuda.get_device_properties(device)
    smi = ("nvidia-smi", "--format=csv,noheader", f"--id=GPU-{properties.uuid}")
    limits = _output_of(*smi, "--query-gpu=driver_version,clocks.max.sm,power.limit")
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver_clock_power": limits,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "python": platform.python_version(),
        "mlacast": mlacast.__version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(sys.argv[1:]),
    }

"""The ``--device`` option: a name that torch knows and that works here."""

from __future__ import annotations

import torch
import typer


def read_device(name: str | None) -> torch.device:
    """Return the device of that name; without one, a GPU if there is one, else the CPU.

    Raises:
        typer.BadParameter: torch does not know the name, or nothing of that name works here.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    # A build without the device asserts; an unknown word or a missing driver is a RuntimeError.
    except (AssertionError, NotImplementedError, RuntimeError):
        raise typer.BadParameter(
            f"device must be one that works here (cpu, or cuda with a GPU), got {name!r}"
        ) from None
    return device

"""How every command speaks: JSON or text on standard output, progress on standard error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

Item = TypeVar("Item")


def print_json(value: Any) -> None:
    """Print ``value`` as JSON; NaN and infinities, unknown to JSON, raise ValueError."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def console() -> Console:
    """Console on standard output, made anew for each command so that redirection is honoured."""
    return Console(highlight=False)


def progress_bar(*, shown: bool = True) -> Progress:
    """Return a progress bar on standard error that vanishes when it is done.

    Args:
        shown: False for ``--json``. Where standard error is no terminal nothing is drawn either.
    """
    errors = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not (shown and errors.is_terminal),
    )


def with_progress(
    items: Sequence[Item], names: Sequence[str], *, shown: bool = True
) -> Iterator[Item]:
    """Yield ``items`` one by one under a progress bar that names the one being worked on."""
    with progress_bar(shown=shown) as bar:
        task = bar.add_task("", total=len(items))
        for item, name in zip(items, names, strict=True):
            bar.update(task, description=name)
            yield item
            bar.advance(task)

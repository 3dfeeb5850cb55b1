"""``mlacast list-dumps``: the recorded calls in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from mlacast.call_log.listing import ListedDump
from mlacast.call_log.listing import list_dumps as find_dumps
from mlacast.call_log.settings import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE
from mlacast.cli.output import JsonFlag, console, print_json

# What to do where there is nothing to list or to replay.
SAVING_CALLS = (
    f"MLACAST_LOGLEVEL=10 saves calls, in {DEFAULT_DIRECTORY} unless {DIRECTORY_VARIABLE} is set"
)

DumpDirectory = Annotated[
    Path,
    typer.Argument(
        help="Folder of dumps, or one dump.", envvar=DIRECTORY_VARIABLE, show_default=True
    ),
]


def list_dumps(
    folder: DumpDirectory = Path(DEFAULT_DIRECTORY),
    details: Annotated[bool, typer.Option(help="List the arguments of each call too.")] = False,
    json: JsonFlag = False,
) -> None:
    """List the calls that were recorded in a folder, in their order."""
    try:
        dumps = find_dumps(folder)
    except FileNotFoundError as error:
        raise typer.BadParameter(f"{error}; {SAVING_CALLS}") from None
    if json:
        print_json([_as_json(dump) for dump in dumps])
        return
    count = "1 dump" if len(dumps) == 1 else f"{len(dumps)} dumps"
    lines = [line for dump in dumps for line in _lines(dump, details)]
    # Names are there to be copied and searched for: no line is broken, whatever the width.
    console().print(escape("\n".join([*lines, f"{count} in {folder}"])), soft_wrap=True)


def _lines(dump: ListedDump, details: bool) -> list[str]:
    lines = [f"{dump.folder.name}  {dump.status}  {dump.function}  {dump.size:,} bytes"]
    if dump.note:
        lines.append(f"    {dump.note}")
    if details:
        lines += [f"    {path}: {text}" for path, text in dump.arguments]
    return lines


def _as_json(dump: ListedDump) -> dict[str, object]:
    return {
        "folder": str(dump.folder),
        "function": dump.function,
        "status": dump.status,
        "timestamp": dump.timestamp,
        "bytes": dump.size,
        "replayable": dump.replayable,
        "note": dump.note,
        "arguments": [{"name": path, "value": text} for path, text in dump.arguments],
    }

"""``mlacast list-dumps``: the recorded calls in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from mlacast.call_log.listing import ListedDump
from mlacast.call_log.listing import list_dumps as find_dumps
from mlacast.call_log.settings import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE
from mlacast.cli.output import JsonFlag, console, print_json

# What to do where there is nothing to list or to replay.
SAVING_CALLS = (
    f"MLACAST_LOGLEVEL=10 saves calls, in {DEFAULT_DIRECTORY} unless {DIRECTORY_VARIABLE} is set"
)

_HEADS = ("dump", "function", "status", "bytes", "note")

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
    out = console()
    # Names are there to be copied: they may go over several lines, but are never cut.
    table = Table(*(Column(head, overflow="fold") for head in _HEADS))
    for dump in dumps:
        name = dump.function.removeprefix("mlacast.")
        table.add_row(
            escape(dump.folder.name), name, dump.status, f"{dump.size:,}", escape(dump.note)
        )
        if details:
            for path, text in dump.arguments:
                table.add_row("", escape(f"  {path}"), "", "", escape(text))
    out.print(table)
    count = "1 dump" if len(dumps) == 1 else f"{len(dumps)} dumps"
    out.print(f"{count} in {escape(str(folder))}")


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

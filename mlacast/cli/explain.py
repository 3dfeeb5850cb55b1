"""``mlacast explain``: which backend an operation gets on a device, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

import mlacast
from mlacast.cli.device import read_device
from mlacast.cli.output import JsonFlag, console, print_json


def explain(
    op: Annotated[str, typer.Argument(help="Operation, for example sparse_mla_decode.")],
    device: Annotated[
        str | None, typer.Option(help="Where the call would run; the CPU if not given.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend asked for: reference, triton or hopper.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Say which backend an operation gets on a device, and what the others lack.

    Exit code 1 if no backend, or not the one asked for, runs it there.
    """
    place = read_device(device or "cpu")
    try:
        found = mlacast.explain(op, device=place, backend=backend)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if json:
        print_json(asdict(found))
    else:
        out = console()
        asked = f" (asked for: {found.requested})" if found.requested else ""
        out.print(f"[bold]{found.op}[/] on {found.arch}{asked}: {found.backend or 'no backend'}")
        table = Table("backend", "covers", "reason")
        for verdict in found.verdicts:
            table.add_row(verdict.backend, "yes" if verdict.covers else "no", verdict.reason)
        out.print(table)
        for missing in found.not_built:
            out.print(f"not built: {missing}", markup=False)
    raise typer.Exit(0 if found.backend else 1)

"""The typer application: one command per file, registered here."""

from __future__ import annotations

from typing import Annotated

import typer

import mlacast
from mlacast.cli.bench import bench
from mlacast.cli.check import check
from mlacast.cli.demo_command import demo
from mlacast.cli.explain import explain
from mlacast.cli.formats import formats
from mlacast.cli.list_dumps import list_dumps
from mlacast.cli.replay import replay

app = typer.Typer(
    name="mlacast",
    help="MLA attention whose output is already the quantised input of the next GEMM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(check)
app.command()(explain)
app.command()(formats)
app.command()(bench)
app.command()(list_dumps)
app.command()(replay)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(mlacast.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_print_version),
    ] = False,
) -> None:
    """MLA attention whose output is already the quantised input of the next GEMM."""

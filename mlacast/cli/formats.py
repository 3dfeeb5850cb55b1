"""``mlacast formats``: draws where the bytes of every cache and output format go."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mlacast.cli.kv_drawings import describe_kv_format, draw_kv_format
from mlacast.cli.out_drawings import OUT_FORMATS, describe_out_format, draw_out_format
from mlacast.cli.output import JsonFlag, console, print_json
from mlacast.descriptors.kv_format import ALL_KV_FORMATS


def formats(
    name: Annotated[
        str | None, typer.Argument(help="One format, for example V4 or Mxfp8; all if not given.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Draw the byte maps of the KV cache formats and the layouts of the output formats."""
    wanted = None if name is None else name.lower()
    kv_formats = [known for known in ALL_KV_FORMATS if wanted in (None, known.name.lower())]
    out_formats = [known for known in OUT_FORMATS if wanted in (None, type(known).__name__.lower())]
    if not kv_formats and not out_formats:
        names = [known.name for known in ALL_KV_FORMATS]
        names += dict.fromkeys(type(known).__name__ for known in OUT_FORMATS)
        raise typer.BadParameter(f"no format is called {name!r}; there are {', '.join(names)}")
    if json:
        described: dict[str, Any] = {
            "kv_formats": [describe_kv_format(known) for known in kv_formats],
            "out_formats": [describe_out_format(known) for known in out_formats],
        }
        print_json(described)
        return
    out = console()
    for kv_format in kv_formats:
        out.print(draw_kv_format(kv_format))
    for out_format in out_formats:
        out.print(draw_out_format(out_format))

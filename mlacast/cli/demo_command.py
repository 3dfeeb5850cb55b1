"""``mlacast demo``: options of the main job; the job itself is ``mlacast.cli.demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlacast.cli.output import JsonFlag

_EXTRA_OF_PACKAGE = {"matplotlib": "cli", "transformers": "transformers", "numpy": "transformers"}


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the picture, created if needed; the current one if not given."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU is used if there is one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model's weights.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Run the attention of a small Hugging Face DeepSeek-V4 model through mlacast.

    Builds the model on the spot, runs prefill, decode and a mixed step into one shared FP8 buffer,
    compares logits with transformers' own attention and draws a picture.
    """
    try:
        from mlacast.cli.demo import run_demo

        code = run_demo(json=json, out=out, device=device, seed=seed)
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF_PACKAGE.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        hint = "; transformers >= 5.24 needs Python 3.11" if extra == "transformers" else ""
        typer.echo(
            f"mlacast demo: the package {error.name} is missing; "
            f"install it with: pip install 'mlacast[{extra}]'{hint}",
            err=True,
        )
        raise typer.Exit(1) from None
    raise typer.Exit(code)

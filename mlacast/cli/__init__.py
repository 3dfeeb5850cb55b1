"""The ``mlacast`` command line: demo, check, explain, formats, bench, list-dumps, replay.

Needs the extra ``cli`` (typer, rich, matplotlib). This file imports none of them, so that their
absence can be said in one sentence instead of a traceback.
"""

from __future__ import annotations

import sys

_CLI_PACKAGES = ("typer", "rich", "matplotlib", "click")


def main() -> None:
    """Run the command line; the console script ``mlacast`` and ``python -m mlacast`` come here."""
    try:
        from mlacast.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _CLI_PACKAGES:
            raise
        sys.exit(
            f"mlacast: the command line needs the package {error.name}; "
            "install it with: pip install 'mlacast[cli]'"
        )
    app()

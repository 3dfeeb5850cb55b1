"""Where the text of the log goes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import IO

_LOCK = threading.Lock()
_FILES: dict[str, IO[str]] = {}


def write_text(destination: str, text: str) -> None:
    """Append whole lines to ``"stdout"``, ``"stderr"`` or a file; never raises.

    Args:
        destination: One of the two words, or a path in which ``%i`` is the process number.
        text: Lines, each with its newline. Goes out in one piece, so that the blocks of several
            threads and processes do not mix.
    """
    try:
        with _LOCK:
            stream = _stream(destination)
            stream.write(text)
            stream.flush()
    # A full disk or a closed stream is no reason to fail the call that is being logged.
    except (OSError, ValueError) as error:
        if destination != "stderr":
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"mlacast: cannot log to {destination}: {error}\n{text}")


def _stream(destination: str) -> IO[str]:
    if destination == "stdout":
        return sys.stdout
    if destination == "stderr":
        return sys.stderr
    # Looked up for each text: after a fork the number is another one.
    path = destination.replace("%i", str(os.getpid()))
    if path not in _FILES:
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        _FILES[path] = open(path, "a", encoding="utf-8")  # noqa: SIM115 - kept open
    return _FILES[path]

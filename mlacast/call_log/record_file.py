"""``metadata.jsonl``, the record of a dump: written line by line, read with distrust."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from mlacast.call_log.errors import DumpError
from mlacast.call_log.record_checks import check_record

METADATA = "metadata.jsonl"
SESSION = "session.jsonl"
FORMAT = "mlacast dump"
FORMAT_VERSION = 1

_CHECKSUM = "sha256"

Record = dict[str, Any]


def append_record(path: Path, record: Record) -> None:
    """Append a record with its checksum as one line."""
    line = {**record, _CHECKSUM: _checksum(record)}
    text = json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n"
    # One write to a file opened for appending: lines of several processes do not mix.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _checksum(record: Record) -> str:
    text = json.dumps(record, separators=(",", ":"), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_record(folder: Path) -> Record:
    """Return the newest record of a dump.

    Raises:
        FileNotFoundError: The folder, or the record in it, is missing.
        DumpError: The record is damaged, was edited, or is of another format or version.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder")
    path = folder / METADATA
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {METADATA}: no dump, or one cut off at its start")
    text = path.read_bytes()
    # A process that was killed may leave half a line; the ones before it stand.
    lines = text.split(b"\n")[:-1]
    if not lines:
        raise DumpError(f"{path} has no complete line")
    records = [_parse(path, number, line) for number, line in enumerate(lines, start=1)]
    return records[-1]


def _parse(path: Path, number: int, line: bytes) -> Record:
    where = f"{path} line {number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{where} is no JSON: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise DumpError(f"{where} is no record of mlacast; dumps of other libraries are not read")
    if record.get("format_version") != FORMAT_VERSION:
        version = record.get("format_version")
        raise DumpError(f"{where} has format version {version}, this mlacast reads 1")
    claimed = record.pop(_CHECKSUM, None)
    try:
        actual = _checksum(record)
    except ValueError:
        actual = None
    if claimed is None or claimed != actual:
        raise DumpError(f"{where} does not match its checksum: it is damaged or was edited")
    try:
        check_record(record)
    except DumpError as error:
        raise DumpError(f"{where}: {error}") from None
    return record

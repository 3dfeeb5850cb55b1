"""The dumps in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlacast.call_log.errors import DumpError
from mlacast.call_log.record_file import METADATA, Record, read_record
from mlacast.call_log.tree import describe, walk

INCOMPLETE = "incomplete"
DAMAGED = "damaged"


@dataclass(frozen=True)
class ListedDump:
    """One dump.

    Attributes:
        folder: Where it is.
        status: ``"inputs_saved"``, ``"completed"``, ``"raised"``; ``"incomplete"`` if the process
            died while it saved the inputs; ``"damaged"`` if the record cannot be read.
        function: Public name of the function, empty if unknown.
        timestamp: When the call began, empty if unknown.
        size: Bytes of its files.
        replayable: Whether every argument was recorded.
        note: Error of the recorded call, what cannot be replayed, or why the record is no use.
        arguments: Name and description of each part of each argument.
    """

    folder: Path
    status: str
    function: str
    timestamp: str
    size: int
    replayable: bool
    note: str
    arguments: list[tuple[str, str]]


def is_dump(folder: Path) -> bool:
    """Whether a folder is a dump rather than a folder of dumps."""
    return (folder / METADATA).is_file()


def list_dumps(root: Path) -> list[ListedDump]:
    """Describe the dumps in ``root``, or ``root`` itself, in the order of the calls.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no folder")
    folders = [root] if is_dump(root) else [child for child in root.iterdir() if child.is_dir()]
    found = [_describe(folder) for folder in folders]
    return [dump for _, dump in sorted(found, key=lambda pair: pair[0])]


_SortKey = tuple[str, int, int, str]


def _describe(folder: Path) -> tuple[_SortKey, ListedDump]:
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    try:
        record = read_record(folder)
        arguments = [
            (path, describe(leaf))
            for argument in record["arguments"]
            for path, leaf in walk(argument["value"], argument["name"])
        ]
    except FileNotFoundError as error:
        return _unknown(folder, INCOMPLETE, size, str(error))
    except DumpError as error:
        return _unknown(folder, DAMAGED, size, str(error))
    key = (record["timestamp"], record["process_id"], record["sequence"], folder.name)
    return key, ListedDump(
        folder,
        record["execution_status"],
        record["function"],
        record["timestamp"],
        size,
        not record["opaque"],
        _note(record),
        arguments,
    )


def _unknown(folder: Path, status: str, size: int, note: str) -> tuple[_SortKey, ListedDump]:
    return ("", 0, 0, folder.name), ListedDump(folder, status, "", "", size, False, note, [])


def _note(record: Record) -> str:
    if record["opaque"]:
        return "cannot be replayed: " + "; ".join(str(part) for part in record["opaque"])
    if record["error"] is not None:
        return f"{record['error']['type']}: {record['error']['message']}"
    return record["outputs_missing"] or ""

"""Writing of dumps: inputs before the call, results and changed inputs after it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from mlacast.call_log.arguments import Argument
from mlacast.call_log.record_checks import COMPLETED, INPUTS, INPUTS_SAVED, OUTPUTS, RAISED
from mlacast.call_log.record_file import (
    FORMAT,
    FORMAT_VERSION,
    METADATA,
    SESSION,
    Record,
    append_record,
)
from mlacast.call_log.regions import Region, place_tensors
from mlacast.call_log.safetensors_file import DTYPES, Entry, digest_of, write_safetensors
from mlacast.call_log.settings import COUNT_VARIABLE, SIZE_VARIABLE, Settings
from mlacast.call_log.tree import TreeEncoder


class LimitReached(Exception):
    """A limit of the process forbids more dumps."""


@dataclass
class Budget:
    """What the dumps of this process have used of their limits."""

    settings: Settings
    count: int = 0
    size: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, size: int, *, dumps: int) -> None:
        """Reserve bytes and a number of dumps.

        Raises:
            LimitReached: That would pass a limit; nothing has been reserved.
        """
        settings = self.settings
        with self.lock:
            if self.count + dumps > settings.max_count:
                raise LimitReached(f"{settings.max_count} dumps were made ({COUNT_VARIABLE})")
            if self.size + size > settings.max_bytes:
                raise LimitReached(
                    f"{size} bytes on top of {self.size} would pass {settings.max_bytes} bytes "
                    f"({SIZE_VARIABLE})"
                )
            self.count += dumps
            self.size += size


class Dump:
    """The dump of one call, whose inputs are on disk once it exists.

    Args:
        budget: Limits of the process.
        header: Facts about the call that go into the record as they are.
        arguments: The arguments.
        encoder: What has encoded their values, in that order.
        nodes: The nodes of the values.

    Raises:
        LimitReached: A limit forbids the dump; nothing has been written.
        OSError: A file cannot be written.
    """

    def __init__(
        self,
        budget: Budget,
        header: Record,
        arguments: Sequence[Argument],
        encoder: TreeEncoder,
        nodes: Sequence[Any],
    ) -> None:
        self._budget = budget
        self._arguments = arguments
        self._regions, places = place_tensors(encoder.tensors)
        encoder.set_places(places)
        size = sum(region.size for region in self._regions)
        budget.take(size, dumps=1)
        self.folder = _make_folder(budget.settings.dump_dir, header)
        self._storages = _save(
            self.folder / INPUTS, encoder, self._regions, range(len(self._regions))
        )
        self._record: Record = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "execution_status": INPUTS_SAVED,
            **header,
            "arguments": [
                {"name": argument.name, "kind": argument.kind, "value": node}
                for argument, node in zip(arguments, nodes, strict=True)
            ],
            "opaque": encoder.opaque,
            "storages": self._storages,
            "outputs": None,
            "outputs_missing": None,
            "error": None,
            "seconds": None,
        }
        self._write()

    def completed(self, result: object, seconds: float) -> None:
        """Add the result, and what the call changed of its arguments."""
        self._record.update(execution_status=COMPLETED, seconds=seconds)
        self._finish(result)

    def raised(self, error: BaseException, seconds: float) -> None:
        """Add the error, and what the call changed of its arguments before it failed."""
        described = {"type": _type_name(error), "message": str(error)}
        self._record.update(execution_status=RAISED, error=described, seconds=seconds)
        self._finish(None)

    def _finish(self, result: object) -> None:
        try:
            self._record["outputs"] = self._outputs(result)
        # The device may be beyond reading after a failed call; the record says so and stays good.
        except Exception as error:
            self._record["outputs_missing"] = f"{_type_name(error)}: {error}"
        self._write()

    def _outputs(self, result: object) -> Record:
        encoder = TreeEncoder()
        result_node = encoder.encode(result, "result")
        nodes = {
            argument.name: encoder.encode(argument.value, argument.name)
            for argument in self._arguments
            if argument.kind != "default"
        }
        regions, places = place_tensors(encoder.tensors, self._regions)
        encoder.set_places(places)
        known = len(self._regions)
        changed = [
            number
            for number in range(known)
            if digest_of(regions[number].content) != self._storages[number]["sha256"]
        ]
        wanted = [*changed, *range(known, len(regions))]
        self._budget.take(sum(regions[number].size for number in wanted), dumps=0)
        saved = _save(self.folder / OUTPUTS, encoder, regions, wanted)
        storages = list(self._storages)
        for number, storage in zip(wanted, saved, strict=True):
            storages[number : number + 1] = [storage]
        return {"result": result_node, "arguments": nodes, "storages": storages}

    def _write(self) -> None:
        append_record(self.folder / METADATA, self._record)
        keys = ("execution_status", "function", "call", "sequence", "timestamp", "process_id")
        event = {key: self._record[key] for key in keys}
        event["dump_dir"] = self.folder.name
        append_record(self.folder.parent / SESSION, event)


def skip_dump(settings: Settings, header: Record, reason: str) -> None:
    """Note in the session's record that a call was not dumped, and why."""
    settings.dump_dir.mkdir(parents=True, exist_ok=True)
    keys = ("function", "call", "sequence", "timestamp", "process_id")
    event = {"execution_status": "skipped", **{key: header[key] for key in keys}, "reason": reason}
    append_record(settings.dump_dir / SESSION, event)


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}"


def _make_folder(root: Path, header: Record) -> Path:
    time = datetime.fromisoformat(header["timestamp"]).strftime("%Y%m%d_%H%M%S_%f")[:-3]
    function = header["function"].removeprefix("mlacast.")
    name = f"{time}_pid{header['process_id']}_{function}_call{header['call']:04}"
    # The program may change its directory before the call is over.
    folder = root.absolute() / name
    folder.mkdir(parents=True)
    return folder


def _save(
    path: Path, encoder: TreeEncoder, regions: Sequence[Region], wanted: Sequence[int]
) -> list[Record]:
    """Write the wanted regions, each under the name of the first tensor in it."""
    entries = [_entry(number, encoder, regions[number]) for number in wanted]
    digests = write_safetensors(path, entries)
    return [
        {
            "file": path.name,
            "name": entry.name,
            "bytes": regions[number].size,
            "before": regions[number].before,
            "after": regions[number].after,
            "device": str(regions[number].content.device),
            "sha256": digest,
        }
        for number, entry, digest in zip(wanted, entries, digests, strict=True)
    ]


def _entry(number: int, encoder: TreeEncoder, region: Region) -> Entry:
    """Describe a region as the one contiguous tensor that fills it, else as bytes."""
    members = [
        (path, node, tensor)
        for path, node, tensor in zip(encoder.paths, encoder.nodes, encoder.tensors, strict=True)
        if node["storage"] == number
    ]
    name = f"{members[0][0]}#{number}" if members else f"#{number}"
    for _, node, tensor in members:
        fills = tensor.is_contiguous() and tensor.nbytes == region.size
        if fills and tensor.dtype in DTYPES:
            return Entry(name, region.content, tensor.dtype, tuple(node["shape"]))
    return Entry(name, region.content, torch.uint8, (region.size,))

"""Replay of a dump: the recorded call, made again from its saved arguments."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mlacast.call_log.arguments import is_scratch
from mlacast.call_log.compare import Comparison, TensorComparison, Tolerance
from mlacast.call_log.errors import DumpError
from mlacast.call_log.process_state import recorded_state
from mlacast.call_log.record_checks import COMPLETED, INPUTS_SAVED, RAISED
from mlacast.call_log.record_file import Record, read_record
from mlacast.call_log.regions import Region, place_tensors, restore_region
from mlacast.call_log.restore import DeviceMap, TreeDecoder
from mlacast.call_log.safetensors_file import SafetensorsFile, digest_of
from mlacast.call_log.tree import TreeEncoder, leaves_of
from mlacast.call_log.wrap import unlogged

# How a replay went.
RAN = "ran"
SAME = "same"
DIFFERENT = "different"
FAILED = "failed"


@dataclass
class ReplayReport:
    """What a replay found.

    Attributes:
        dump: Folder of the dump.
        function: Public name of the function.
        recorded_status: ``"inputs_saved"`` (the process died in the call), ``"completed"`` or
            ``"raised"``.
        device: Where the tensors were put, ``"as recorded"`` without a choice.
        outcome: ``"same"``: equal to the record, or the same error. ``"different"``. ``"ran"``:
            came to its end and was not compared. ``"failed"``: raised, and no error was recorded.
        error: The error that the replayed call raised, in one line.
        differences: Sentences about what differs from the record.
        tensors: Every tensor compared.
        not_compared: Why nothing was compared, although asked for.
        seconds: Time of the replayed call.
    """

    dump: str
    function: str
    recorded_status: str
    device: str
    outcome: str = RAN
    error: str | None = None
    differences: list[str] = field(default_factory=list)
    tensors: list[TensorComparison] = field(default_factory=list)
    not_compared: str | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing failed and nothing differs."""
        return self.outcome in (RAN, SAME)


def replay_dump(
    folder: Path | str,
    *,
    compare: bool = False,
    device: torch.device | str | None = None,
    backend: str | None = None,
    tolerance: Tolerance | None = None,
) -> ReplayReport:
    """Make a recorded call again.

    The saved bytes are laid out as they were: strides, alignment, and memory that arguments share.
    Environment variables and switches of the record hold during the call, unless the variable is
    set now.

    Args:
        folder: Folder of one dump.
        compare: Compare the result, and what the call changed of its arguments, with the record.
        device: Where the tensors go instead of their recorded devices. In a call with tensors on a
            GPU, those on the CPU stay there.
        backend: Backend to use instead of the recorded one.
        tolerance: For floating-point elements; None compares bit for bit.

    Returns:
        A report. An error of the replayed call is part of it.

    Raises:
        FileNotFoundError: The folder or a file of the dump is missing.
        DumpError: The dump is damaged, was edited, or cannot be replayed here.
    """
    folder = Path(folder)
    record = read_record(folder)
    function = find_function(record["function"])
    device_of = _device_map(record, device)
    regions = _restore_regions(folder, record["storages"], device_of)
    arguments = _decode_arguments(record, TreeDecoder(regions, device_of), backend)
    place = "as recorded" if device is None else str(device)
    report = ReplayReport(str(folder), record["function"], record["execution_status"], place)
    args = [value for _, kind, value in arguments if kind == "positional"]
    kwargs = {name: value for name, kind, value in arguments if kind != "positional"}
    result: object = None
    with recorded_state(record["state"], backend):
        start = time.perf_counter()
        try:
            result = function(*args, **kwargs)
            _wait_for(regions)
        except Exception as error:
            report.error = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
        report.seconds = time.perf_counter() - start
    _judge_error(report, record)
    if compare and report.outcome != FAILED and not report.differences:
        after = [(name, value) for name, kind, value in arguments if kind != "default"]
        _compare(report, folder, record, regions, result, after, tolerance or Tolerance())
    return report


def find_function(name: str) -> Callable[..., Any]:
    """Return a public function of mlacast, without logging.

    Raises:
        DumpError: ``name`` is none: every part of it has to be exported by the one before.
    """
    parts = name.split(".")
    if parts[0] != "mlacast":
        raise DumpError(f"{name!r} is no public function of mlacast")
    found: Any = importlib.import_module("mlacast")
    for count, part in enumerate(parts[1:], start=2):
        path = ".".join(parts[:count])
        if path == "mlacast.compat" or (count == 3 and parts[1] == "compat"):
            try:
                found = importlib.import_module(path)
            except ImportError:
                raise DumpError(f"{name!r} is no public function of this mlacast") from None
        elif isinstance(found, ModuleType) and part in getattr(found, "__all__", ()):
            found = getattr(found, part)
        else:
            raise DumpError(f"{name!r} is no public function of this mlacast")
    if not inspect.isfunction(found):
        raise DumpError(f"{name!r} is no function")
    function: Callable[..., Any] = unlogged(found)
    return function


def _device_map(record: Record, device: torch.device | str | None) -> DeviceMap:
    """Where something recorded on a device goes."""
    recorded = {
        leaf["$tensor"]["device"]
        for argument in record["arguments"]
        for _, leaf in leaves_of(argument["value"], argument["name"])
        if isinstance(leaf, dict) and "$tensor" in leaf
    }
    on_accelerator = any(not name.startswith("cpu") for name in recorded)

    def place(name: str) -> torch.device:
        if device is not None and not (on_accelerator and name.startswith("cpu")):
            return torch.device(device)
        return torch.device(name)

    for name in sorted(recorded):
        try:
            torch.empty(0, device=place(name))
        except (AssertionError, RuntimeError):
            raise DumpError(
                f"recorded on {name}, which does not work here; choose a device, for example cpu"
            ) from None
    return place


def _restore_regions(folder: Path, storages: Sequence[Any], device_of: DeviceMap) -> list[Region]:
    """Read regions, checked against their digests."""
    files: dict[str, SafetensorsFile] = {}
    regions = []
    for storage in storages:
        file_name, name = storage["file"], storage["name"]
        if file_name not in files:
            files[file_name] = SafetensorsFile(folder / file_name)
        content = files[file_name].read(name)
        if digest_of(content) != storage["sha256"]:
            raise DumpError(f"{folder / file_name}: {name} does not match its checksum")
        place = device_of(storage["device"])
        regions.append(restore_region(content, storage["before"], storage["after"], place))
    return regions


def _decode_arguments(
    record: Record, decoder: TreeDecoder, backend: str | None
) -> list[tuple[str, str, Any]]:
    """Name, kind and value of each argument."""
    is_core = not record["function"].startswith("mlacast.compat.")
    decoded = []
    for argument in record["arguments"]:
        name, kind, node = argument["name"], argument["kind"], argument["value"]
        # What a function takes by default and no file can hold is its own business.
        if kind == "default" and isinstance(node, dict) and "$opaque" in node:
            continue
        value = decoder.decode(node, name)
        # The argument of this name in a drop-in module is another library's.
        if name == "backend" and backend is not None and is_core:
            value = backend
        decoded.append((name, kind, value))
    return decoded


def _wait_for(regions: Sequence[Region]) -> None:
    """Make errors of the device show up inside the call that caused them."""
    for kind in {region.content.device for region in regions}:
        if kind.type == "cuda":
            torch.cuda.synchronize(kind)


def _judge_error(report: ReplayReport, record: Record) -> None:
    error = record["error"]
    recorded = None if error is None else f"{error['type']}: {error['message']}"
    if record["execution_status"] == RAISED:
        report.outcome = SAME if report.error == recorded else DIFFERENT
        if report.error is None:
            report.differences.append(f"no error, recorded {recorded}")
        elif report.error != recorded:
            report.differences.append(f"{report.error}, recorded {recorded}")
    elif report.error is not None:
        report.outcome = FAILED


def _compare(
    report: ReplayReport,
    folder: Path,
    record: Record,
    regions: list[Region],
    result: object,
    arguments: Sequence[tuple[str, Any]],
    tolerance: Tolerance,
) -> None:
    outputs = record["outputs"]
    if outputs is None:
        died = record["execution_status"] == INPUTS_SAVED
        reason = "the recorded call did not come to its end" if died else record["outputs_missing"]
        report.not_compared = reason
        return
    encoder = TreeEncoder()
    node = encoder.encode(result, "result")
    nodes = {name: encoder.encode(value, name) for name, value in arguments}
    actual, places = place_tensors(encoder.tensors, regions)
    encoder.set_places(places)
    expected = _restore_regions(folder, outputs["storages"], lambda _: torch.device("cpu"))
    comparison = Comparison(expected, actual, len(regions), tolerance)
    if record["execution_status"] == COMPLETED:
        comparison.compare(outputs["result"], node, "result")
    members: dict[int, list[tuple[str, dict[str, Any]]]] = {}
    scratch: set[int] = set()
    for name, argument_node in nodes.items():
        if is_scratch(name):
            scratch |= {body["storage"] for _, body in _tensors_of(argument_node, name)}
            continue
        if name not in outputs["arguments"]:
            raise DumpError(f"the record has no argument {name} after the call")
        comparison.compare(outputs["arguments"][name], argument_node, name)
        for path, body in _tensors_of(argument_node, name):
            if body["storage"] is not None:
                members.setdefault(body["storage"], []).append((path, body))
    for number, found in members.items():
        if number < len(regions) and number not in scratch:
            bodies = [body for _, body in found]
            comparison.compare_rest(number, bodies, found[0][0])
    report.tensors = comparison.tensors
    report.differences = comparison.differences
    report.outcome = DIFFERENT if comparison.differences else SAME


def _tensors_of(node: Any, path: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, leaf["$tensor"])
        for name, leaf in leaves_of(node, path)
        if isinstance(leaf, dict) and "$tensor" in leaf
    ]

"""What is written about a call before and after it. Nothing here makes a call fail."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import torch

from mlacast.call_log.arguments import Argument, arguments_of
from mlacast.call_log.destination import write_text
from mlacast.call_log.dump import Budget, Dump, LimitReached, skip_dump
from mlacast.call_log.process_state import read_state, versions
from mlacast.call_log.settings import Settings
from mlacast.call_log.tree import TreeEncoder, describe, walk
from mlacast.call_log.value_statistics import statistics_of

_SEQUENCE = itertools.count(1)
_INTRODUCTIONS: set[str] = set()
_BUDGETS: dict[Settings, Budget] = {}
_LOCK = threading.Lock()


def is_capturing(tensors: Iterable[torch.Tensor] = ()) -> bool:
    """Whether a current stream records a graph; starts no device.

    Args:
        tensors: Those of a call. CUDA is asked about in any case, other devices if one has a tensor
            and their module knows graphs.
    """
    kinds = {"cuda"} if _cuda_may_capture() else set()
    kinds |= {tensor.device.type for tensor in tensors}
    return any(_captures(kind) for kind in kinds)


def _captures(kind: str) -> bool:
    ask = getattr(getattr(torch, kind, None), "is_current_stream_capturing", None)
    try:
        return ask is not None and bool(ask())
    # A build without CUDA has the question and no answer.
    except RuntimeError:
        return False


def _cuda_may_capture() -> bool:
    built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    # Without CUDA in the build there is nothing that asking could start.
    return not built or _cuda_runs()


def _cuda_runs() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class Observer:
    """Observes the calls of one function.

    Args:
        function: The function.
        name: Its public dotted name.
        settings: What to log.
    """

    def __init__(self, function: Callable[..., Any], name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.in_full = settings.level >= 3 and settings.selects(name)
        self.signature = inspect.signature(function)
        self._calls = itertools.count(1)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObservedCall:
        """Log what is known before the call."""
        observed = ObservedCall(self, next(self._calls))
        with self.contained():
            _introduce(self.settings)
            if self.in_full:
                observed.log_arguments(arguments_of(self.signature, args, kwargs))
            else:
                observed.write("API Call")
        observed.started = time.perf_counter()
        return observed

    @contextlib.contextmanager
    def contained(self) -> Iterator[None]:
        """Turn any failure inside into a line of the log."""
        try:
            # Statistics and copies of a tensor that requires gradients are no part of its graph.
            with torch.no_grad():
                yield
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.write_line(f"mlacast: call of {self.name} could not be logged: {reason}")

    def write_line(self, line: str) -> None:
        """Write one line to the log."""
        write_text(self.settings.destination, line + "\n")


class ObservedCall:
    """One call.

    Args:
        observer: Of the function.
        number: Which call of the function in this process, from 1.
    """

    def __init__(self, observer: Observer, number: int) -> None:
        self._observer = observer
        self._number = number
        self._dump: Dump | None = None
        self.started = 0.0

    def write(self, event: str, lines: list[str] | None = None, suffix: str = "") -> None:
        """Write the head of a block and its lines, all at once."""
        now = datetime.now().isoformat(sep=" ", timespec="milliseconds")
        head = f"[{now}] mlacast {event}: {self._observer.name}"
        if lines is not None:
            head += f" (call {self._number}){suffix}"
        text = "\n".join([head, *(f"    {line}" for line in lines or ())])
        write_text(self._observer.settings.destination, text + "\n")

    def log_arguments(self, arguments: list[Argument]) -> None:
        """Write the arguments; at level 10 save them."""
        settings = self._observer.settings
        encoder = TreeEncoder()
        nodes = [encoder.encode(argument.value, argument.name) for argument in arguments]
        lines: list[str] = []
        for argument, node in zip(arguments, nodes, strict=True):
            default = " (default)" if argument.kind == "default" else ""
            lines += self._lines(encoder, node, argument.name, default)
        # The text goes out first: saving takes longest and has most to fail from.
        self.write("API Call", lines)
        if settings.level >= 10:
            self._save(arguments, encoder, nodes)

    def returned(self, result: object) -> None:
        """Log the result."""
        seconds = time.perf_counter() - self.started
        if not self._observer.in_full:
            return
        with self._observer.contained():
            encoder = TreeEncoder()
            node = encoder.encode(result, "result")
            lines = self._lines(encoder, node, "result")
            self.write("API Return", lines, f" after {seconds * 1e3:.3f} ms")
        if self._dump is not None:
            with self._observer.contained():
                self._dump.completed(result, seconds)

    def raised(self, error: BaseException) -> None:
        """Log the error that the caller is about to get."""
        seconds = time.perf_counter() - self.started
        if not self._observer.in_full:
            return
        with self._observer.contained():
            self.write("API Error", [f"{type(error).__name__}: {error}"])
        if self._dump is not None:
            with self._observer.contained():
                self._dump.raised(error, seconds)

    def _lines(self, encoder: TreeEncoder, node: Any, path: str, suffix: str = "") -> list[str]:
        """One line for each part of a value; at level 5 another with a tensor's statistics."""
        by_node = {
            id(body): tensor for body, tensor in zip(encoder.nodes, encoder.tensors, strict=True)
        }
        with_statistics = self._observer.settings.level >= 5
        capturing = with_statistics and is_capturing(encoder.tensors)
        lines = []
        for name, part in walk(node, path):
            body = part.get("$tensor") if isinstance(part, dict) else None
            tensor = by_node.get(id(body))
            if tensor is None:
                lines.append(f"{name} = {describe(part)}{suffix}")
                continue
            contiguous = "contiguous" if tensor.is_contiguous() else "not contiguous"
            lines.append(f"{name} = {describe(part)}, {contiguous}{suffix}")
            if capturing:
                lines.append("    no statistics: a graph is being captured")
            elif with_statistics:
                lines.append(f"    {statistics_of(tensor)}")
        return lines

    def _save(self, arguments: list[Argument], encoder: TreeEncoder, nodes: list[Any]) -> None:
        settings = self._observer.settings
        header = {
            "function": self._observer.name,
            "call": self._number,
            "sequence": next(_SEQUENCE),
            "timestamp": datetime.now().isoformat(timespec="milliseconds"),
            "process_id": os.getpid(),
        }
        reason = ""
        if is_capturing(encoder.tensors):
            reason = "a graph is being captured"
        else:
            header["state"] = read_state()
            header["versions"] = versions(tensor.device for tensor in encoder.tensors)
            try:
                self._dump = Dump(_budget_of(settings), header, arguments, encoder, nodes)
            except LimitReached as limit:
                reason = str(limit)
        if reason:
            self._observer.write_line(f"    not dumped: {reason}")
            skip_dump(settings, header, reason)
        elif encoder.opaque:
            self._observer.write_line(f"    cannot be replayed: {'; '.join(encoder.opaque)}")


def _budget_of(settings: Settings) -> Budget:
    with _LOCK:
        return _BUDGETS.setdefault(settings, Budget(settings))


def _introduce(settings: Settings) -> None:
    """Write once what runs here. Only with the first call: importing reads no device."""
    if settings.destination in _INTRODUCTIONS:
        return
    _INTRODUCTIONS.add(settings.destination)
    devices = []
    if _cuda_runs():
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    lines = [f"mlacast call log, level {settings.level}, process {os.getpid()}"]
    lines += [f"    {name} {value}" for name, value in versions(devices).items()]
    if settings.level >= 10:
        lines.append(
            f"    dumps go to {settings.dump_dir}, at most {settings.max_count} and "
            f"{settings.max_bytes} bytes; they hold the full content of every tensor"
        )
    write_text(settings.destination, "\n".join(lines) + "\n")

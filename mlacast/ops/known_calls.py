"""Calls that were made before, found by everything that their checks and launches depend on.

The host work of a call (checks, choice of backend, layout of the launches) is a function of its
signature: shapes, strides, dtypes, devices and alignments of its tensors, and every other argument.
A model repeats a signature in each of its layers, so what a signature led to is kept: that it
passed the checks, and its launches as a function of addresses. Nothing that depends on values or
addresses is kept; whether an output overlaps another tensor is looked at every time.

Tracing, tensor subclasses, dispatch modes and profilers take the long way, through the operator.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.out_format import Bf16, Fp8Group, Fp8Tensor, Mxfp8, Nvfp4
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.dispatch.select import BACKEND_VARIABLE
from mlacast.ops.value_checks import VALIDATE_VARIABLE

# Sets of facts that are kept, and calls with the same facts whose tensors differ in metadata. A
# call takes a few kilobytes.
MAX_FACTS = 1024
MAX_METADATA = 16
_NUMBERS = frozenset({int, bool, str})
_SAME = "same as tensor"
# Described by all their attributes.
_DESCRIPTORS: set[type] = {Bf16, Fp8Group, Fp8Tensor, Mxfp8, Nvfp4, QuantizedTensor, Rope}
# Described by their type.
_OPAQUE: set[type] = set()

_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
_len_torch_function_stack = torch._C._len_torch_function_stack
_peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
_get_tracing_state = torch._C._get_tracing_state
_profiler_enabled = torch._C._autograd._profiler_enabled

Described = TypeVar("Described", bound=type)


def _reader(variable: str) -> Callable[[], str | bytes | None]:
    """A function that reads an environment variable as it is now.

    ``os.environ`` spends more than a microsecond to say that a variable is not set; the dictionary
    below it a tenth.
    """
    data = getattr(os.environ, "_data", None)
    if isinstance(data, dict) and os.name == "posix":
        return functools.partial(data.get, os.fsencode(variable))
    return functools.partial(os.environ.get, variable)


_read_validate = _reader(VALIDATE_VARIABLE)
_read_backend = _reader(BACKEND_VARIABLE)
_OFF = (None, "", "0", b"", b"0")


def described_by_attributes(kind: Described) -> Described:
    """Let calls be known that take a ``kind``: a class whose attributes say all there is to it."""
    _DESCRIPTORS.add(kind)
    return kind


def described_by_type(kind: Described) -> Described:
    """Let calls be known that take a ``kind``: its contents are looked at in every call."""
    _OPAQUE.add(kind)
    return kind


class Plan(Protocol):
    """Launches of a call as a function of the addresses of its tensors."""

    def __call__(self, addresses: list[int], /) -> None:
        """Launch on the current stream."""


class Launched(Protocol):
    """What a launcher may return: its launches, to be bound to the tensors of the call."""

    def bind(self, tensors: Sequence[torch.Tensor], /) -> Plan | None:
        """Return the plan, None if the launches cannot be repeated."""


class KnownCall:
    """A call that passed its checks.

    Args:
        plan: Its launches; None if it has to go through the operator.
        arguments: Arguments of the operator.
        outputs: Of the tensors among them, in order, those that may overlap another one.
    """

    __slots__ = ("_are_flat", "_pairs", "_positions", "plan")

    def __init__(
        self, plan: Plan | None, arguments: Sequence[Any], outputs: Sequence[int] = ()
    ) -> None:
        self.plan = plan
        self._are_flat = not any(isinstance(value, (list, tuple)) for value in arguments)
        flat = _flatten(arguments)
        self._positions = [at for at, value in enumerate(flat) if isinstance(value, torch.Tensor)]
        sizes = [_bytes_spanned(flat[at]) for at in self._positions]
        self._pairs = [
            (output, sizes[output], other, sizes[other])
            for output in outputs
            for other in range(len(sizes))
            if other not in outputs or other > output
            if sizes[output] and sizes[other]
        ]

    def repeat(self, arguments: Sequence[Any]) -> bool:
        """Launch with the addresses of ``arguments``, which have the signature of this call.

        Returns:
            False if nothing was launched: the call has no plan, or the address ranges of an output
            and another tensor intersect, which the operator looks into.
        """
        plan = self.plan
        if plan is None:
            return False
        flat = arguments if self._are_flat else _flatten(arguments)
        addresses = [flat[at].data_ptr() for at in self._positions]
        for output, size, other, other_size in self._pairs:
            start, other_start = addresses[output], addresses[other]
            if start < other_start + other_size and other_start < start + size:
                return False
        plan(addresses)
        return True


class Calls:
    """A bounded table of calls; the oldest leave first."""

    def __init__(self) -> None:
        self._calls: dict[tuple[object, ...], list[tuple[Any, KnownCall]]] = {}

    def find(self, op: str, values: Sequence[Any]) -> KnownCall | None:
        """Return the call of ``op`` with the signature of ``values``, None if it is not known.

        Args:
            op: Name of the operation.
            values: Every argument on which its checks or its launches depend.
        """
        if torch.compiler.is_compiling():
            return None
        described = _describe(op, values)
        if described is None:
            return None
        facts, tensors = described
        for metadata, call in self._calls.get(facts, ()):
            if metadata.check(*tensors):
                return call
        return None

    def remember(self, op: str, values: Sequence[Any], call: KnownCall) -> None:
        """Keep ``call`` unless ``values`` have no signature."""
        described = _describe(op, values)
        if described is None:
            return
        facts, tensors = described
        while facts not in self._calls and len(self._calls) >= MAX_FACTS:
            self._calls.pop(next(iter(self._calls)), None)
        # A new list: another thread may be walking through the old one.
        kept = self._calls.get(facts, [])[: MAX_METADATA - 1]
        self._calls[facts] = [(_metadata_of(tensors), call), *kept]

    def check_once(self, op: str, check: Callable[..., None], values: Sequence[Any]) -> None:
        """Call ``check(*values)``, which looks at metadata only, unless it accepted their like."""
        if self.find(op, values) is None:
            check(*values)
            if not torch.compiler.is_compiling():
                self.remember(op, values, KnownCall(None, ()))

    def clear(self) -> None:
        """Forget everything."""
        self._calls.clear()


# Calls of public functions by the caller's arguments, and of operators by the operator's.
PUBLIC = Calls()
OPERATORS = Calls()


class PlainMetadata:
    """Type, shape, strides, dtype and device of tensors, compared in Python."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._facts = self._read(tensors)

    @staticmethod
    def _read(tensors: Sequence[torch.Tensor]) -> list[object]:
        return [(type(t), t.shape, t.stride(), t.dtype, t.device) for t in tensors]

    def check(self, *tensors: torch.Tensor) -> bool:
        """Whether other tensors have the same metadata."""
        return self._read(tensors) == self._facts


def _metadata_of(tensors: Iterable[torch.Tensor]) -> Any:
    """What ``check(*tensors)`` compares with: torch's own guards, ten times faster than Python."""
    guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
    if guards is None:
        return PlainMetadata(*tensors)
    return guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _describe(
    op: str, values: Iterable[Any]
) -> tuple[tuple[object, ...], Iterable[torch.Tensor]] | None:
    """Split what a call's host work depends on into hashable facts and metadata of tensors.

    Returns:
        The facts (every other argument, alignments of the tensors, the backend of the environment)
        and the tensors; None for tensor subclasses and foreign objects, and while values are
        validated (MLACAST_VALIDATE), so that every call is checked.
    """
    if _read_validate() not in _OFF:
        return None
    facts: list[object] = [op, _read_backend()]
    tensors: dict[int, torch.Tensor] = {}
    try:
        known = _add_facts(facts, tensors, values)
    except RuntimeError:
        # A tensor that a transform wraps has no address.
        return None
    return (tuple(facts), tensors.values()) if known else None


def _add_facts(
    facts: list[object], tensors: dict[int, torch.Tensor], values: Iterable[Any]
) -> bool:
    """Append the facts of each value, the first of which tells how many follow.

    Tensors are collected by identity; of one that comes again the fact says which it is.
    """
    for value in values:
        kind = type(value)
        if value is None:
            facts.append(None)
        elif kind is torch.Tensor or kind is torch.nn.Parameter:
            if id(value) in tensors:
                facts += (_SAME, list(tensors).index(id(value)))
            else:
                tensors[id(value)] = value
                facts.append(value.data_ptr() & 31)
        elif kind is float:
            # 0.0 == -0.0, yet their products differ.
            facts += (float, value or str(value))
        elif kind in _NUMBERS:
            # 1 == True, yet a check may take only one of them.
            facts += (kind, value)
        elif kind is KvFormat:
            facts += (KvFormat, value.name)
        elif kind in _DESCRIPTORS:
            facts.append(kind)
            if not _add_facts(facts, tensors, vars(value).values()):
                return False
        elif kind in _OPAQUE:
            facts.append(kind)
        elif kind is list or kind is tuple:
            facts += (kind, len(value))
            if not _add_facts(facts, tensors, value):
                return False
        else:
            return False
    return True


def run_operator(op: str, run: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Eager kernel of an operator: repeat a known call, else ``run`` it and keep its launches.

    Args:
        op: Name of the operation.
        run: Its body. Returns what the operator returns or, for an operator that returns nothing,
            what its launcher returned.
        arguments: Arguments of the operator.
    """
    call = OPERATORS.find(op, arguments)
    if call is not None and call.repeat(arguments):
        return None
    # Forward only: without this, some outputs would carry a graph and others not.
    with torch.no_grad():
        distinct = _distinct(arguments)
        launched = run(*distinct)
        if not hasattr(launched, "bind"):
            return launched
        plan = launched.bind([v for v in _flatten(distinct) if isinstance(v, torch.Tensor)])
    if plan is not None:
        OPERATORS.remember(op, arguments, KnownCall(plan, arguments, _outputs(op, arguments)))
    return None


def call_operator(
    operator: Callable[..., Any],
    op: str,
    known: KnownCall | None,
    values: Sequence[Any],
    arguments: Sequence[Any],
    fresh: Sequence[torch.Tensor | None],
) -> None:
    """Last step of a public function: fill its outputs through the operator, or by a known call.

    Args:
        operator: ``torch.ops.mlacast.<op>``, which returns nothing.
        op: Name of the operation.
        known: What ``PUBLIC.find(op, values)`` gave.
        values: The caller's arguments.
        arguments: Arguments of the operator.
        fresh: Outputs among them that the public function has just allocated.
    """
    if known is not None and nobody_listens() and known.repeat(arguments):
        return
    operator(*arguments)
    if known is None and not torch.compiler.is_compiling():
        learn(PUBLIC, op, values, op, arguments, arguments, fresh)


def learn(
    calls: Calls,
    op: str,
    values: Sequence[Any],
    core_op: str,
    core_arguments: Sequence[Any],
    tensors: Sequence[torch.Tensor | None],
    fresh: Sequence[torch.Tensor | None],
) -> None:
    """Keep a call of ``op`` that has just made the call ``core_arguments`` of an operator.

    Args:
        calls: Table that gets it.
        op: Name under which it is found.
        values: Arguments by which it is found.
        core_op: Name of the operator that did the work.
        core_arguments: What the operator was called with.
        tensors: Arguments that `KnownCall.repeat` will get: ``core_arguments``, or only the tensors
            among them, in their order, maybe with None between them.
        fresh: Outputs among them that ``op`` allocates itself.
    """
    core = OPERATORS.find(core_op, core_arguments)
    plan = None if core is None else core.plan
    outputs = _outputs(core_op, core_arguments, fresh)
    calls.remember(op, values, KnownCall(plan, tensors, outputs))


def nobody_listens() -> bool:
    """Whether no mode, transform, tracer or profiler would see an operator that is called now."""
    return not (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or _profiler_enabled()
    )


def _outputs(
    op: str, arguments: Sequence[Any], fresh: Sequence[torch.Tensor | None] = ()
) -> list[int]:
    """Which of the tensors among ``arguments`` the operator writes, ``fresh`` ones left out."""
    written: list[int] = []
    at = 0
    schema = getattr(torch.ops.mlacast, op).default._schema
    for declared, value in zip(schema.arguments, arguments, strict=True):
        tensors = [v for v in _flatten([value]) if isinstance(v, torch.Tensor)]
        is_output = declared.alias_info is not None and declared.alias_info.is_write
        if is_output and not any(value is tensor for tensor in fresh):
            written += range(at, at + len(tensors))
        at += len(tensors)
    return written


def _distinct(arguments: Sequence[Any]) -> list[Any]:
    """Give a tensor that is passed twice two identities: launches tell tensors apart by them."""
    seen: set[int] = set()

    def once(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [once(entry) for entry in value]
        if isinstance(value, torch.Tensor):
            if id(value) in seen:
                value = value.detach()
            seen.add(id(value))
        return value

    return [once(value) for value in arguments]


def _flatten(arguments: Sequence[Any]) -> list[Any]:
    """Replace lists of tensors by their elements."""
    flat: list[Any] = []
    for value in arguments:
        if isinstance(value, (list, tuple)):
            flat.extend(value)
        else:
            flat.append(value)
    return flat


def _bytes_spanned(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element."""
    if tensor.numel() == 0:
        return 0
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()

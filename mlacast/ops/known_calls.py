"""Calls that were made before, found by everything that their checks and launches depend on.

The host work of a call (checks, choice of backend, layout of the launches) is a function of its
signature: shapes, strides, dtypes, devices and alignments of its tensors, and every other argument.
A model repeats a signature in each of its layers, so what a signature led to is kept: that it
passed the checks, and its launches as a function of addresses. Nothing that depends on values or
addresses is kept; whether an output overlaps another tensor is looked at every time.

Tracing, tensor subclasses, dispatch modes and profilers take the long way, through the operator.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from mlacast.ops.known_call import After, KnownCall, Repeated, flatten
from mlacast.ops.signature import describe, metadata_of, nobody_listens
from mlacast.ops.straight_calls import Straight

# Calls that a table keeps, 20 to 30 KB each, and calls with the same facts whose tensors differ in
# metadata, which are compared one after the other.
MAX_CALLS = 1024
MAX_METADATA = 16
# Calls of an operation that are tried one after the other before the tables are asked, and
# operations (functions are told apart by how they are called) that have such calls.
MAX_RECENT = 8
MAX_RECENT_OPS = 256

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class _Entry(NamedTuple):
    """A call of a table.

    Attributes:
        metadata: What its tensors are compared with.
        call: What it led to.
        number: When it came, in the order of all calls of the table.
    """

    metadata: Any
    call: KnownCall
    number: int


class Calls:
    """A bounded table of calls; the oldest leave first.

    Args:
        is_public: Whether the calls are those of public functions, behind which operators stand.
    """

    def __init__(self, is_public: bool = True) -> None:
        self._calls: dict[tuple[object, ...], list[_Entry]] = {}
        # Facts of every call by its number, the oldest first.
        self._ages: dict[int, tuple[object, ...]] = {}
        self._numbers = itertools.count()
        # Readers do without it: what they walk through is replaced, never changed.
        self._lock = threading.Lock()
        self._recent: dict[Hashable, tuple[Straight, ...]] = {}
        self._is_public = is_public

    def repeat(self, op: Hashable, values: Sequence[Any]) -> Any:
        """Make a call again if it was made twice.

        Args:
            op: Name of the operation.
            values: Every argument on which its checks or its launches depend.

        Returns:
            What the call returns, True if that is None; None if nothing was done.
        """
        # Traced by torch.compile, which knows this function.
        if _is_dynamo_compiling() or _RECORD.entries is not None:
            return None
        recent = self._recent.get(op, ())
        for straight in recent:
            result = straight(*values)
            if result is not None:
                if straight is not recent[0]:
                    self._put_first(op, straight)
                return result
        return None

    def keep(
        self,
        op: Hashable,
        values: Sequence[Any],
        known: KnownCall | None,
        repeated: Sequence[Repeated],
        result: Any,
        after: Sequence[After] = (),
    ) -> None:
        """Let `repeat` find a call that has just been repeated.

        Args:
            op: Name of the operation.
            values: Arguments by which it was found.
            known: What `find` gave; a call that is not known is not kept.
            repeated: Calls of operators that were made for it; none is kept but of a single one.
            result: What the caller gets: things among ``values``, fresh tensors, views of all of
                one, a tuple of these, or None.
            after: What is done with tensors of the result after the launches.
        """
        if known is None or len(repeated) != 1:
            return
        is_public = self._is_public
        straight = known.written(values, repeated[0], result, after, is_public=is_public)
        if straight is not None:
            self._put_first(op, straight)

    def _put_first(self, op: Hashable, straight: Straight) -> None:
        with self._lock:
            while op not in self._recent and len(self._recent) >= MAX_RECENT_OPS:
                del self._recent[next(iter(self._recent))]
            others = [other for other in self._recent.get(op, ()) if other is not straight]
            self._recent[op] = (straight, *others[: MAX_RECENT - 1])

    def find(self, op: Hashable, values: Sequence[Any]) -> KnownCall | None:
        """Return the call of ``op`` with the signature of ``values``, None if it is not known.

        Args:
            op: Name of the operation.
            values: Every argument on which its checks or its launches depend.
        """
        if torch.compiler.is_compiling():
            return None
        described = describe(op, values)
        if described is None:
            return None
        facts, tensors = described
        for entry in self._calls.get(facts, ()):
            if entry.metadata.check(*tensors):
                return entry.call
        return None

    def remember(self, op: Hashable, values: Sequence[Any], call: KnownCall) -> None:
        """Keep ``call`` unless ``values`` have no signature."""
        described = describe(op, values)
        if described is None:
            return
        facts, tensors = described
        entry = _Entry(metadata_of(tensors), call, next(self._numbers))
        with self._lock:
            entries = [entry, *self._calls.get(facts, ())]
            self._calls[facts] = entries[:MAX_METADATA]
            self._ages[entry.number] = facts
            for left_over in entries[MAX_METADATA:]:
                del self._ages[left_over.number]
            while len(self._ages) > MAX_CALLS:
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        number, facts = next(iter(self._ages.items()))
        del self._ages[number]
        kept = [entry for entry in self._calls[facts] if entry.number != number]
        if kept:
            self._calls[facts] = kept
        else:
            del self._calls[facts]

    def check_once(
        self, op: str, check: Callable[..., None], values: Sequence[Any], *settings: Any
    ) -> KnownCall | None:
        """Call ``check(*values)``, which looks at metadata only, unless it accepted their like.

        Args:
            op: Name of the operation.
            check: Raises if a value is wrong.
            values: Every argument of the operation.
            *settings: What else tells calls apart.

        Returns:
            The call, for `keep`, if its like was accepted.
        """
        key = (*values, *settings)
        known = self.find(op, key)
        if known is None:
            check(*values)
            if not torch.compiler.is_compiling():
                self.remember(op, key, KnownCall(None, ()))
        return known

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._calls.clear()
            self._ages.clear()
            self._recent.clear()


class _Record(threading.local):
    """Known calls that this thread has repeated since somebody asked for them."""

    entries: list[Repeated] | None = None


_RECORD = _Record()


@contextlib.contextmanager
def recorded() -> Iterator[list[Repeated]]:
    """Collect the known calls that public functions repeat meanwhile in this thread.

    A function that does no more than one of them, and views, may be kept by `Calls.keep_recorded`.
    """
    entries: list[Repeated] = []
    outer = _RECORD.entries
    _RECORD.entries = entries
    try:
        yield entries
    finally:
        _RECORD.entries = outer
        if outer is not None:
            outer.extend(entries)


def more_than_launches() -> None:
    """Say that the call in hand writes to tensors itself or reads values: it is not repeated."""
    if _RECORD.entries is not None:
        # Neither none nor one: such a record is not kept.
        _RECORD.entries.extend([Repeated(KnownCall(None, ()), (), ())] * 2)


# Calls of public functions by the caller's arguments, and of operators by the operator's.
PUBLIC = Calls()
OPERATORS = Calls(is_public=False)


def run_operator(op: str, run: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Eager kernel of an operator: repeat a known call, else ``run`` it and keep its launches.

    Args:
        op: Name of the operation.
        run: Its body. Returns what the operator returns or, for an operator that returns nothing,
            what its launcher returned.
        arguments: Arguments of the operator.
    """
    returned = OPERATORS.repeat(op, arguments)
    if returned is not None:
        return None if returned is True else returned
    call = OPERATORS.find(op, arguments)
    if call is not None and call.plan is not None:
        made = call.new_result()
        repeated = Repeated(call, (*arguments, *made), made)
        if call.repeat(repeated.arguments):
            returned = made[0] if made else None
            OPERATORS.keep(op, arguments, call, [repeated], returned)
            return returned
    # Forward only: without this, some outputs would carry a graph and others not.
    with torch.no_grad():
        distinct = _distinct(arguments)
        launched = run(*distinct)
        if not hasattr(launched, "bind"):
            return launched
        returned = launched.result
        tensors = [v for v in flatten(distinct) if isinstance(v, torch.Tensor)]
        plan = launched.bind(tensors if returned is None else [*tensors, returned])
    if plan is not None:
        known = KnownCall(plan, arguments, _outputs(op, arguments), returned)
        OPERATORS.remember(op, arguments, known)
    return returned


def call_operator(
    operator: Callable[..., Any],
    op: str,
    known: KnownCall | None,
    values: Sequence[Any],
    arguments: Sequence[Any],
    fresh: Sequence[torch.Tensor | None],
    result: Any,
    operator_name: str = "",
) -> None:
    """Last step of a public function: fill its outputs through the operator, or by a known call.

    Args:
        operator: ``torch.ops.mlacast.<op>``, which returns nothing.
        op: Name of the operation.
        known: What ``PUBLIC.find(op, values)`` gave.
        values: The caller's arguments.
        arguments: Arguments of the operator.
        fresh: Outputs among them that the public function has just allocated.
        result: What it will return.
        operator_name: Name of the operator if it is not ``op``.
    """
    if known is not None and nobody_listens() and known.repeat(arguments):
        repeated = Repeated(known, arguments, fresh)
        if _RECORD.entries is not None:
            _RECORD.entries.append(repeated)
        PUBLIC.keep(op, values, known, [repeated], result)
        return
    operator(*arguments)
    if known is None and not torch.compiler.is_compiling():
        learn(PUBLIC, op, values, operator_name or op, arguments, arguments, fresh)


def call_functional(
    operator: Callable[..., torch.Tensor],
    op: str,
    known: KnownCall | None,
    values: Sequence[Any],
    arguments: Sequence[Any],
) -> torch.Tensor:
    """`call_operator` for an operator that returns a new tensor, which this function returns."""
    if known is not None and known.plan is not None and nobody_listens():
        made = known.new_result()
        repeated = Repeated(known, (*arguments, *made), made)
        if known.repeat(repeated.arguments):
            PUBLIC.keep(op, values, known, [repeated], made[0])
            return made[0]
    returned = operator(*arguments)
    if known is None and not torch.compiler.is_compiling():
        core = OPERATORS.find(op, arguments)
        plan = None if core is None else core.plan
        PUBLIC.remember(op, values, KnownCall(plan, arguments, result=returned))
    return returned


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


def _outputs(
    op: str, arguments: Sequence[Any], fresh: Sequence[torch.Tensor | None] = ()
) -> list[int]:
    """Which of the tensors among ``arguments`` the operator writes, ``fresh`` ones left out."""
    written: list[int] = []
    at = 0
    for is_output, value in zip(_is_written(op), arguments, strict=True):
        tensors = [v for v in flatten([value]) if isinstance(v, torch.Tensor)]
        if is_output and not any(value is tensor for tensor in fresh):
            written += range(at, at + len(tensors))
        at += len(tensors)
    return written


@functools.cache
def _is_written(op: str) -> tuple[bool, ...]:
    """Whether the operator writes each of its arguments."""
    schema = getattr(torch.ops.mlacast, op).default._schema
    infos = [argument.alias_info for argument in schema.arguments]
    return tuple(info is not None and info.is_write for info in infos)


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

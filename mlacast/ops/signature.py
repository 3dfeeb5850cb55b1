"""What the host work of a call depends on: its signature, as facts and metadata of tensors.

Facts are hashable: every argument that is no tensor, the alignment of those that are, the backend
of the environment. Metadata (type, shape, strides, dtype, device) are compared by torch itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.out_format import Bf16, Fp8Group, Fp8Tensor, Mxfp8, Nvfp4
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.dispatch.select import BACKEND_VARIABLE
from mlacast.ops.value_checks import VALIDATE_VARIABLE

NUMBERS = frozenset({int, bool, str, torch.dtype})
_SAME = "same as tensor"
# Described by all their attributes.
DESCRIPTORS: set[type] = {Bf16, Fp8Group, Fp8Tensor, Mxfp8, Nvfp4, QuantizedTensor, Rope}
# Described by their type; of calls that are repeated, also by the attributes named here.
OPAQUE: dict[type, tuple[str, ...]] = {}

# Whether a mode, transform, tracer or profiler would see an operator that is called now.
dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
transform = torch._C._functorch.peek_interpreter_stack
tracing = torch._C._get_tracing_state
profiling = torch._C._autograd._profiler_enabled

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


read_validate = _reader(VALIDATE_VARIABLE)
read_backend = _reader(BACKEND_VARIABLE)
OFF = (None, "", "0", b"", b"0")


def described_by_attributes(kind: Described) -> Described:
    """Let calls be known that take a ``kind``: a class whose attributes say all there is to it."""
    DESCRIPTORS.add(kind)
    return kind


def described_by_type(*state: str) -> Callable[[Described], Described]:
    """Let calls be known that take an object of this class: its contents are looked at every time.

    Args:
        *state: Attributes without tensors, which have to be equal for a call to be repeated.
    """

    def register(kind: Described) -> Described:
        OPAQUE[kind] = state
        return kind

    return register


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


def metadata_of(tensors: Iterable[torch.Tensor]) -> Any:
    """What ``check(*tensors)`` compares with: torch's own guards, ten times faster than Python."""
    guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
    if guards is None:
        return PlainMetadata(*tensors)
    return guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def describe(
    op: Hashable, values: Iterable[Any]
) -> tuple[tuple[object, ...], Iterable[torch.Tensor]] | None:
    """Split what a call's host work depends on into hashable facts and metadata of tensors.

    Returns:
        The facts (every other argument, alignments of the tensors, the backend of the environment)
        and the tensors; None for tensor subclasses and foreign objects, and while values are
        validated (MLACAST_VALIDATE), so that every call is checked.
    """
    if read_validate() not in OFF:
        return None
    facts: list[object] = [op, read_backend()]
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
        elif kind in NUMBERS:
            # 1 == True, yet a check may take only one of them.
            facts += (kind, value)
        elif kind is KvFormat:
            facts += (KvFormat, value.name)
        elif kind in DESCRIPTORS:
            facts.append(kind)
            if not _add_facts(facts, tensors, vars(value).values()):
                return False
        elif kind in OPAQUE:
            facts.append(kind)
        elif kind is list or kind is tuple:
            facts += (kind, len(value))
            if not _add_facts(facts, tensors, value):
                return False
        else:
            return False
    return True


def nobody_listens() -> bool:
    """Whether no mode, transform, tracer or profiler would see an operator that is called now."""
    return not (
        torch.compiler.is_compiling()
        or dispatch_modes()
        or function_modes()
        or transform() is not None
        or tracing() is not None
        or profiling()
    )

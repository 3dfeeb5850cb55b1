"""A function for each signature of a call: is this call the same, and if so, launch.

`write_call` writes down as source what `signature.describe` would find in the arguments and what a
known call would do then: every number compared with its constant, metadata compared by torch in one
go, addresses read, alignment and overlap looked at, fresh outputs allocated, kernels launched.
Nothing is built on the way. Source is compiled once for each pattern of arguments and instantiated
for each signature.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.ops import signature

MAX_PATTERNS = 512
# Returns the result of the call, True if that is None; None if nothing was done: another signature,
# outputs that may overlap, somebody who listens.
Straight = Callable[..., Any]


class Plan(Protocol):
    """Launches of a call as a function of the addresses of its tensors."""

    @property
    def launch(self) -> Callable[..., None]:
        """Launches on the current stream: a function of one address for each tensor.

        It may be called while ``is_ready()``, which it does not ask.
        """

    @property
    def is_ready(self) -> Callable[[], bool]:
        """Whether ``launch`` may be called: the device is current and no hook listens."""

    @property
    def empty(self) -> Callable[..., torch.Tensor]:
        """``empty(sizes, strides, dtype)`` on the current device."""

    def __call__(self, addresses: list[int], /) -> None:
        """Launch on the current stream."""


class Pair(NamedTuple):
    """An output, another tensor, and how many bytes each spans; they may not overlap."""

    output: int
    output_bytes: int
    other: int
    other_bytes: int


class _Unwritable(Exception):
    """A call that takes or returns what source cannot describe."""


class _Writer:
    """Source of one function, and the constants that belong to it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: list[Any] = []
        self.leaves: list[torch.Tensor] = []
        self.places: dict[int, str] = {}

    def constant(self, value: Any) -> str:
        self.constants.append(value)
        return f"k{len(self.constants) - 1}"

    def require(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): return None")

    def value(self, value: Any, place: str) -> None:
        """Require of what stands at ``place`` what a signature has of ``value``."""
        kind = type(value)
        if value is None:
            self.require(f"{place} is None")
        elif kind is torch.Tensor or kind is torch.nn.Parameter:
            self._tensor(value, place)
        elif kind is torch.dtype:
            self.require(f"{place} is {self.constant(value)}")
        elif kind is float or kind in signature.NUMBERS:
            self.require(f"{place}.__class__ is {kind.__name__}")
            self.require(f"{place} == {self.constant(value)}")
            if kind is float and value == 0.0:
                self.require(f"str({place}) == {self.constant(str(value))}")
        elif kind is KvFormat:
            self.require(f"{place}.__class__ is {self.constant(kind)}")
            self.require(f"{place}.name == {self.constant(value.name)}")
        elif kind in signature.DESCRIPTORS:
            self.require(f"{place}.__class__ is {self.constant(kind)}")
            self.places.setdefault(id(value), place)
            for name, part in vars(value).items():
                self.value(part, self._local(f"{place}.{name}", f"{place}_{name}"))
        elif kind in signature.OPAQUE:
            self.require(f"{place}.__class__ is {self.constant(kind)}")
            for name in signature.OPAQUE[kind]:
                state = operator.attrgetter(name)(value)
                self.require(f"{place}.{name} == {self.constant(state)}")
        elif kind is list or kind is tuple:
            self.require(f"{place}.__class__ is {kind.__name__}")
            self.require(f"len({place}) == {self.constant(len(value))}")
            for at, part in enumerate(value):
                self.value(part, self._local(f"{place}[{at}]", f"{place}_{at}"))
        else:
            raise _Unwritable

    def _local(self, expression: str, name: str) -> str:
        self.lines.append(f"{name} = {expression}")
        return name

    def _tensor(self, tensor: torch.Tensor, place: str) -> None:
        if id(tensor) in self.places:
            self.require(f"{place} is {self.places[id(tensor)]}")
            return
        self.places[id(tensor)] = place
        self.leaves.append(tensor)

    def addresses(self) -> list[str]:
        """Read and check the alignments of the leaves; return where their addresses stand."""
        names = []
        for at, tensor in enumerate(self.leaves):
            names.append(self._local(f"{self.places[id(tensor)]}.data_ptr()", f"a{at}"))
        aligned = [
            name for name, t in zip(names, self.leaves, strict=True) if t.data_ptr() % 32 == 0
        ]
        if aligned:
            self.require(f"({' | '.join(aligned)}) & 31 == 0")
        for name, tensor in zip(names, self.leaves, strict=True):
            if name not in aligned:
                self.require(f"{name} & 31 == {self.constant(tensor.data_ptr() % 32)}")
        return names


def write_call(
    values: Sequence[Any],
    plan: Plan,
    tensors: Sequence[torch.Tensor],
    pairs: Sequence[Pair],
    fresh: Sequence[torch.Tensor],
    result: Any,
    after: Sequence[tuple[Callable[[torch.Tensor], object], torch.Tensor]] = (),
    *,
    is_public: bool = True,
) -> Straight | None:
    """Write the function of ``values`` that makes a call of their signature.

    Args:
        values: Every argument on which the checks and the launches depend.
        plan: The launches.
        tensors: Of the call, in the order of the plan: tensors among ``values``, views of them, and
            ``fresh`` ones.
        pairs: Those of ``tensors`` that may not overlap.
        fresh: Tensors that the call allocates, each a storage of its own.
        result: What the call returns: things among ``values``, ``fresh`` tensors or views of all of
            one, a tuple of these, or None.
        after: What is done with tensors of the result after the launches.
        is_public: Whether dispatch modes and their like have to be looked for.

    Returns:
        The function; None if the call cannot be written down.
    """
    writer = _Writer()
    try:
        for at, value in enumerate(values):
            writer.value(value, f"v{at}")
        return _finish(writer, len(values), plan, tensors, pairs, fresh, result, after, is_public)
    except _Unwritable:
        return None


def _finish(
    writer: _Writer,
    num_values: int,
    plan: Plan,
    tensors: Sequence[torch.Tensor],
    pairs: Sequence[Pair],
    fresh: Sequence[torch.Tensor],
    result: Any,
    after: Sequence[tuple[Callable[[torch.Tensor], object], torch.Tensor]],
    is_public: bool,
) -> Straight:
    """Write what follows the checks of the values, and compile everything."""
    metadata = signature.metadata_of(writer.leaves)
    if isinstance(metadata, signature.PlainMetadata):
        # It compares tensors; torch's own guards take anything.
        raise _Unwritable
    if writer.leaves:
        writer.require(f"check({', '.join(writer.places[id(leaf)] for leaf in writer.leaves)})")
    starts = _starts(writer, writer.addresses(), tensors, fresh)
    for pair in pairs:
        if any(starts[at].startswith("f") for at in (pair.output, pair.other)):
            # New memory overlaps nothing, and it has no address yet.
            continue
        distance = f"{starts[pair.output]} - ({starts[pair.other]})"
        below, above = writer.constant(-pair.output_bytes), writer.constant(pair.other_bytes)
        writer.lines.append(f"if {below} < {distance} < {above}: return None")
    writer.require("read_validate() in OFF")
    writer.require(f"read_backend() == {writer.constant(signature.read_backend())}")
    if is_public:
        writer.lines.append("if dispatch_modes() or function_modes() or profiling(): return None")
        writer.require("transform() is None and tracing() is None")
    writer.require("is_ready()")
    delivered = result if type(result) is tuple else (result,)
    places = dict(writer.places)
    for at, tensor in enumerate(fresh):
        shown = [
            part
            for part in delivered
            if isinstance(part, torch.Tensor) and _is_all_of(part, tensor)
        ]
        form = shown[0] if shown else tensor
        form_constants = (tuple(form.shape), form.stride(), form.dtype)
        arguments = ", ".join(writer.constant(value) for value in form_constants)
        writer.lines.append(f"f{at} = empty({arguments})")
        places.update((id(part), f"f{at}") for part in [*shown[:1], tensor])
    writer.lines.append(f"launch({', '.join(starts)})")
    for function, tensor in after:
        writer.lines.append(f"{writer.constant(function)}({_place(places, tensor)})")
    if result is None:
        writer.lines.append("return True")
    elif type(result) is tuple:
        writer.lines.append(f"return ({', '.join(_place(places, part) for part in result)},)")
    else:
        writer.lines.append(f"return {_place(places, result)}")
    build = _builder(num_values, len(writer.constants), "\n        ".join(writer.lines))
    return build(metadata.check, plan.is_ready, plan.empty, plan.launch, writer.constants)


def _starts(
    writer: _Writer,
    addresses: Sequence[str],
    tensors: Sequence[torch.Tensor],
    fresh: Sequence[torch.Tensor],
) -> list[str]:
    """Where each of ``tensors`` starts, as an expression."""
    starts = []
    for tensor in tensors:
        if tensor.data_ptr() == 0:
            # Without elements: the distance from the start of anything means nothing.
            starts.append("0")
            continue
        same = [at for at, new in enumerate(fresh) if _share(new, tensor)]
        if same and fresh[same[0]].data_ptr() == tensor.data_ptr():
            starts.append(f"f{same[0]}.data_ptr()")
            continue
        same = [at for at, leaf in enumerate(writer.leaves) if leaf is tensor]
        # A tensor that the call made of its arguments lies in the memory of exactly one of them.
        same = same or [at for at, leaf in enumerate(writer.leaves) if _share(leaf, tensor)]
        if len(same) != 1:
            raise _Unwritable
        offset = tensor.data_ptr() - writer.leaves[same[0]].data_ptr()
        name = addresses[same[0]]
        starts.append(f"{name} + {writer.constant(offset)}" if offset else name)
    return starts


def _share(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def _is_all_of(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether ``view`` has every element of a dense ``tensor``, in the same order of memory."""
    if view is tensor:
        return True
    is_dense = view.is_contiguous() and tensor.is_contiguous() and view.dtype == tensor.dtype
    same_memory = _share(view, tensor) and view.data_ptr() == tensor.data_ptr()
    return is_dense and same_memory and view.numel() == tensor.numel()


def _place(places: dict[int, str], value: Any) -> str:
    if id(value) not in places:
        raise _Unwritable
    return places[id(value)]


@functools.lru_cache(MAX_PATTERNS)
def _builder(num_values: int, num_constants: int, body: str) -> Callable[..., Straight]:
    """Compile what makes the functions of one pattern of arguments."""
    constants = ", ".join(f"k{at}" for at in range(num_constants))
    source = (
        "def build(check, is_ready, empty, launch, constants):\n"
        f"    [{constants}] = constants\n"
        f"    def call({', '.join(f'v{at}' for at in range(num_values))}):\n        {body}\n"
        "    return call\n"
    )
    scope = {name: getattr(signature, name) for name in _NAMES}
    exec(compile(source, f"<call with {num_values} arguments>", "exec"), scope)
    build: Callable[..., Straight] = scope["build"]
    return build


_NAMES = (
    "OFF",
    "dispatch_modes",
    "function_modes",
    "profiling",
    "read_backend",
    "read_validate",
    "tracing",
    "transform",
)

"""Straight-line functions that launch known kernels with new addresses.

What `Launches.bind` found is written down as source: one call for each kernel, its arguments spelt
out, constants in the closure. Compared with a loop over steps, a pool of arguments and Triton's own
``CudaLauncher.__call__``, that takes two thirds off what a repeated launch costs the host. Source
is compiled once for each pattern of arguments and instantiated for each signature.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

# Triton of this version launches through a C function behind ``CudaLauncher.__call__``, which adds
# scratch memory of the kernel, if it has any, and two switches. Others are called as they are.
_BARE_LAUNCH = "3.6"
MAX_PATTERNS = 256


class _Base:
    """An address where Triton looks for the tensor of a descriptor."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """Return the address."""
        return self._address


class Descriptor:
    """A tensor descriptor as Triton reads one at launch; one with its tensor would keep that alive.

    Args:
        address: Where its first element lies.
        shape: Its sizes.
        strides: Its strides, in elements.
        padding: What Triton reads outside of it.
    """

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, address: int, shape: Any, strides: Any, padding: str) -> None:
        self.base = _Base(address)
        self.shape = shape
        self.strides = strides
        self.padding = padding


@dataclass(frozen=True)
class Constant:
    """An argument that is the same in every launch."""

    value: Any


@dataclass(frozen=True)
class Pointer:
    """An argument at a fixed distance from the start of a tensor of the call, or of scratch.

    Attributes:
        number: Which tensor; scratch comes after those of the call.
        offset: Bytes from its start.
        form: Shape, strides and padding of a tensor descriptor; None for a plain address.
    """

    number: int
    offset: int
    form: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class BoundStep:
    """One launch: Triton function, compiled kernel, grid and arguments."""

    kernel: Any
    compiled: Any
    grid: tuple[int, int, int]
    arguments: tuple[Constant | Pointer, ...]


def straight_line(
    device: torch.device, steps: Sequence[BoundStep], num_tensors: int, scratch: Sequence[int]
) -> Callable[..., None]:
    """Return a function of ``num_tensors`` addresses that runs ``steps`` on the current stream.

    It may only be called while `readiness` says so.

    Args:
        device: Where the kernels run.
        steps: The launches.
        num_tensors: Tensors of the call.
        scratch: float32 elements of each scratch tensor, allocated in every call.
    """
    constants: list[Any] = []
    patterns = []
    for step in steps:
        run, head = _entry(step)
        constants.append(run)
        constants += head
        pattern: list[tuple[int, bool, bool]] = []
        for argument in step.arguments:
            if isinstance(argument, Constant):
                constants.append(argument.value)
                pattern.append((-1, False, False))
                continue
            if argument.offset:
                constants.append(argument.offset)
            if argument.form is not None:
                constants += argument.form
            pattern.append((argument.number, argument.offset != 0, argument.form is not None))
        patterns.append((len(head), tuple(pattern)))
    build = _builder(num_tensors, len(scratch), tuple(patterns))
    function: Callable[..., None] = build(
        driver.active.get_current_stream,
        device.index or 0,
        allocator(device),
        [(size,) for size in scratch],
        constants,
    )
    return function


def _entry(step: BoundStep) -> tuple[Any, tuple[Any, ...]]:
    """What launches a kernel, and what stands before and behind the stream in its arguments."""
    compiled = step.compiled
    run, packed = compiled.run, compiled.packed_metadata
    # No hooks, so nobody gets launch metadata.
    tail = (packed, None, None, None)
    if _has_bare_launch(run):
        switches = (run.launch_cooperative_grid, run.launch_pdl)
        return run.launch, (*step.grid, compiled.function, *switches, None, None, *tail)
    return run, (*step.grid, compiled.function, *tail)


def _has_bare_launch(run: Any) -> bool:
    if not triton.__version__.startswith(_BARE_LAUNCH + "."):
        return False
    from triton.backends.nvidia.driver import CudaLauncher

    has_scratch = isinstance(run, CudaLauncher) and (
        run.global_scratch_size or run.profile_scratch_size
    )
    return isinstance(run, CudaLauncher) and not has_scratch


@functools.lru_cache(MAX_PATTERNS)
def _builder(
    num_tensors: int,
    num_scratch: int,
    patterns: tuple[tuple[int, tuple[tuple[int, bool, bool], ...]], ...],
) -> Callable[..., Callable[..., None]]:
    """Compile what makes `straight_line` functions of one pattern of arguments."""
    names = (f"k{at}" for at in range(10**6))
    used: list[str] = []

    def constant() -> str:
        used.append(next(names))
        return used[-1]

    lines = ["stream = get_stream(index)"]
    for at in range(num_scratch):
        lines.append(f"s{at} = empty(sizes[{at}], (1,), float32)")
        lines.append(f"p{num_tensors + at} = s{at}.data_ptr()")
    for head, pattern in patterns:
        run = constant()
        fixed = [constant() for _ in range(head)]
        arguments = [*fixed[:3], "stream", *fixed[3:]]
        for number, has_offset, is_descriptor in pattern:
            if number < 0:
                arguments.append(constant())
                continue
            address = f"p{number} + {constant()}" if has_offset else f"p{number}"
            if is_descriptor:
                form = ", ".join(constant() for _ in range(3))
                address = f"Descriptor({address}, {form})"
            arguments.append(address)
        lines.append(f"{run}({', '.join(arguments)})")
    parameters = ", ".join(f"p{at}" for at in range(num_tensors))
    body = "\n".join(f"        {line}" for line in lines)
    source = (
        "def build(get_stream, index, empty, sizes, constants):\n"
        f"    [{', '.join(used)}] = constants\n"
        f"    def launch({parameters}):\n{body}\n"
        "    return launch\n"
    )
    scope: dict[str, Any] = {"Descriptor": Descriptor, "float32": torch.float32}
    exec(compile(source, f"<launches of {num_tensors} tensors>", "exec"), scope)
    build: Callable[..., Callable[..., None]] = scope["build"]
    return build


def readiness(device: torch.device, kernels: Sequence[Any]) -> Callable[[], bool]:
    """Return a function that says whether `straight_line` functions may be called now.

    The device of the launches has to be the current one, and no hook may want to know of them.

    Args:
        device: Where they run.
        kernels: Triton functions that they launch.
    """
    index = device.index or 0
    get_device = driver.active.get_current_device
    if device.type == "cuda":
        # Tensors of the call are there, so what torch.cuda.current_device initialises is too.
        get_device = torch._C._cuda_getDevice
    runtime = knobs.runtime
    hooks_of = operator.attrgetter("pre_run_hooks")

    def is_ready() -> bool:
        if get_device() != index:
            return False
        if is_set(runtime.launch_enter_hook) or is_set(runtime.launch_exit_hook):
            return False
        return not any(map(hooks_of, kernels))

    return is_ready


def is_set(hook: Any) -> bool:
    """Whether anybody listens: hooks are None, or a chain of calls that may be empty."""
    return hook is not None and bool(getattr(hook, "calls", True))


def allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return ``empty(sizes, strides, dtype)`` for the current device of the type of ``device``.

    torch's own for compiled graphs, which costs a third of ``torch.empty``.
    """
    guards = getattr(torch._C._dynamo, "guards", None)
    own: Callable[..., torch.Tensor] | None = getattr(guards, f"_empty_strided_{device.type}", None)
    return own or functools.partial(_empty, device)


def _empty(
    device: torch.device, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

"""Launch Triton kernels, and describe the launches of a call so that they can be repeated.

An ordinary launch costs the host about 100 us for sixty arguments: Triton binds them by name, looks
at every value and builds the key of the variant from all of that. A call whose metadata were seen
before needs none of it: same shapes, strides, dtypes, numbers and alignments mean the same variants
and the same arguments, addresses apart. So a launcher runs its kernels through `Launches`, which
keeps what Triton chose, and `Launches.bind` turns that into a `Plan` that takes addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mlacast.kernels.common.device import on_device_of
from mlacast.kernels.common.launch_code import (
    BoundStep,
    Constant,
    Descriptor,
    Pointer,
    allocator,
    is_set,
    readiness,
    straight_line,
)
from mlacast.kernels.common.targets import StoreTarget

# A compiled kernel of these versions is run with grid, stream, function, packed metadata, launch
# metadata, two hooks and the bound arguments. Others launch through Triton every time.
_KNOWN_TRITON = ("3.6", "3.7", "3.8", "3.9")


def _is_descriptor(value: Any) -> bool:
    """Whether a value is a tensor descriptor, which only some kernels have Triton's class for."""
    return hasattr(value, "block_shape") and isinstance(getattr(value, "base", None), torch.Tensor)


@dataclass(frozen=True)
class _Step:
    """One launch: the variant that Triton chose and what it was given."""

    kernel: Any
    compiled: Any
    grid: tuple[int, int, int]
    values: list[Any] | None


class Launches:
    """The launches of one call.

    Args:
        device: Device of the call's tensors.
        target: Where the call stores; its views become known.
        result: What an operator that returns a tensor returns; the last of the call's tensors.
    """

    def __init__(
        self,
        device: torch.device,
        target: StoreTarget | None = None,
        result: torch.Tensor | None = None,
    ) -> None:
        self.result = result
        self._device = device
        self._steps: list[_Step] = []
        self._scratch: list[torch.Tensor] = []
        self._bases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if target is not None:
            for name, base in target.bases.items():
                self.inside(base, target.tensors[name])

    def inside(self, base: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """Return ``view``, noting that it lies at a fixed distance from the start of ``base``."""
        self._bases[id(view)] = (base, view)
        return view

    def scratch(self, numel: int) -> torch.Tensor:
        """Allocate float32 scratch [numel] of this call; a repeated call gets its own."""
        tensor = torch.empty(numel, dtype=torch.float32, device=self._device)
        self._scratch.append(tensor)
        return tensor

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch ``kernel`` on the device of the call.

        Args:
            kernel: Triton or Gluon function.
            grid: One to three numbers of programs.
            *arguments: Its leading arguments, up to the first compile-time one.
            **constants: Its compile-time arguments and options such as num_warps.
        """
        with on_device_of(self._device):
            compiled = kernel[grid](*arguments, **constants)
        names = getattr(kernel, "arg_names", ())[len(arguments) :]
        # A default would have to be looked up: such a launch is not bound.
        is_spelt_out = all(name in constants for name in names)
        values = [*arguments, *(constants.get(name) for name in names)] if is_spelt_out else None
        x, y, z = (*grid, 1, 1)[:3]
        self._steps.append(_Step(kernel, compiled, (x, y, z), values))

    def bind(self, tensors: Sequence[torch.Tensor]) -> Plan | None:
        """Describe the launches as a function of the addresses of ``tensors``.

        Args:
            tensors: Every tensor of the call, each a different Python object.

        Returns:
            The plan; None where there can be none: under the interpreter, with another version of
            Triton, or if a kernel was given a tensor that is no part of ``tensors``.
        """
        if ".".join(triton.__version__.split(".")[:2]) not in _KNOWN_TRITON:
            return None
        sources = {id(tensor): at for at, tensor in enumerate([*tensors, *self._scratch])}
        steps: list[BoundStep] = []
        for step in self._steps:
            compiled = step.compiled
            is_ours = isinstance(step.kernel, JITFunction) and compiled is not None
            if not is_ours or step.values is None:
                return None
            if hasattr(compiled, "result"):
                compiled = compiled.result()
            arguments: list[Constant | Pointer] = []
            for value in step.values:
                is_descriptor = _is_descriptor(value)
                if not is_descriptor and not isinstance(value, torch.Tensor):
                    arguments.append(Constant(value))
                    continue
                tensor = value.base if is_descriptor else value
                base, _ = self._bases.get(id(tensor), (tensor, tensor))
                if id(base) not in sources:
                    return None
                form = None
                if is_descriptor:
                    form = (list(value.shape), list(value.strides), value.padding)
                if tensor.data_ptr() == 0 and base.data_ptr() != 0:
                    # Without elements, so without an address, however far from the base it is.
                    arguments.append(Constant(0))
                    continue
                offset = tensor.data_ptr() - base.data_ptr()
                arguments.append(Pointer(sources[id(base)], offset, form))
            steps.append(BoundStep(step.kernel, compiled, step.grid, tuple(arguments)))
        sizes = [scratch.numel() for scratch in self._scratch]
        return Plan(self._device, steps, len(tensors), sizes)


class Plan:
    """Launches of which only the addresses are open.

    Args:
        device: Where they run.
        steps: The launches.
        num_tensors: Tensors of the call.
        scratch_sizes: float32 elements of each scratch tensor.

    """

    def __init__(
        self,
        device: torch.device,
        steps: Sequence[BoundStep],
        num_tensors: int,
        scratch_sizes: Sequence[int],
    ) -> None:
        self._device = device
        self._steps = steps
        self._num_tensors = num_tensors
        self._scratch_sizes = scratch_sizes

    # Most calls of an engine whose shapes vary are never repeated: these are made when one is.

    @functools.cached_property
    def launch(self) -> Callable[..., None]:
        """A function of the addresses, each one argument, that launches on the current stream.

        It may only be called right after ``is_ready()``.
        """
        return straight_line(self._device, self._steps, self._num_tensors, self._scratch_sizes)

    @functools.cached_property
    def is_ready(self) -> Callable[[], bool]:
        """Whether the device of the launches is current and no hook listens."""
        return readiness(self._device, [step.kernel for step in self._steps])

    @functools.cached_property
    def empty(self) -> Callable[..., torch.Tensor]:
        """``empty(sizes, strides, dtype)`` on the current device of that type."""
        return allocator(self._device)

    def __call__(self, addresses: list[int]) -> None:
        """Launch everything again, on the current stream of the device.

        Args:
            addresses: Start of each tensor given to `Launches.bind`, in that order; each at the
                same distance from a multiple of 16 bytes as then.
        """
        if self.is_ready():
            self.launch(*addresses)
            return
        with on_device_of(self._device):
            self._run(driver.active.get_current_stream(self._device.index or 0), addresses)

    def _run(self, stream: int, addresses: list[int]) -> None:
        """Launch everything with the hooks that are set."""
        scratch = [
            torch.empty(size, dtype=torch.float32, device=self._device)
            for size in self._scratch_sizes
        ]
        starts = [*addresses, *(tensor.data_ptr() for tensor in scratch)]
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        hooked = is_set(enter) or is_set(leave)
        if not hooked:
            enter = leave = None
        for step in self._steps:
            compiled = step.compiled
            arguments = [_argument(argument, starts) for argument in step.arguments]
            for hook in step.kernel.pre_run_hooks:
                hook(*arguments)
            compiled.run(
                *step.grid,
                stream,
                compiled.function,
                compiled.packed_metadata,
                compiled.launch_metadata(step.grid, stream, *arguments) if hooked else None,
                enter,
                leave,
                *arguments,
            )


def _argument(argument: Constant | Pointer, starts: Sequence[int]) -> Any:
    """An argument of a launch, given where the tensors start."""
    if isinstance(argument, Constant):
        return argument.value
    address = starts[argument.number] + argument.offset
    return address if argument.form is None else Descriptor(address, *argument.form)

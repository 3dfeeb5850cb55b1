"""Launch Triton kernels, and describe the launches of a call so that they can be repeated.

An ordinary launch costs the host about 100 us for sixty arguments: Triton binds them by name, looks
at every value and builds the key of the variant from all of that. A call whose metadata were seen
before needs none of it: same shapes, strides, dtypes, numbers and alignments mean the same variants
and the same arguments, addresses apart. So a launcher runs its kernels through `Launches`, which
keeps what Triton chose, and `Launches.bind` turns that into a `Plan` that takes addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mlacast.kernels.common.device import on_device_of
from mlacast.kernels.common.targets import StoreTarget

# A compiled kernel of these versions is run with grid, stream, function, packed metadata, launch
# metadata, two hooks and the bound arguments. Others launch through Triton every time.
_KNOWN_TRITON = ("3.6", "3.7", "3.8", "3.9")


class _Base:
    """An address where Triton looks for the tensor of a descriptor."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """Return the address."""
        return self._address


class _Descriptor:
    """A tensor descriptor as Triton reads one at launch."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, address: int, shape: Any, strides: Any, padding: str) -> None:
        self.base = _Base(address)
        self.shape = shape
        self.strides = strides
        self.padding = padding


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
    """

    def __init__(self, device: torch.device, target: StoreTarget | None = None) -> None:
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
        constants: list[Any] = []
        pointers: dict[tuple[int, int], int] = {}
        descriptors: list[tuple[int, int, tuple[Any, ...]]] = []
        steps: list[tuple[Any, ...]] = []
        for step in self._steps:
            compiled = step.compiled
            is_ours = isinstance(step.kernel, JITFunction) and compiled is not None
            if not is_ours or step.values is None:
                return None
            if hasattr(compiled, "result"):
                compiled = compiled.result()
            places = []
            for value in step.values:
                is_descriptor = _is_descriptor(value)
                if not is_descriptor and not isinstance(value, torch.Tensor):
                    places.append(len(constants))
                    constants.append(value)
                    continue
                tensor = value.base if is_descriptor else value
                base, _ = self._bases.get(id(tensor), (tensor, tensor))
                if id(base) not in sources:
                    return None
                source = (sources[id(base)], tensor.data_ptr() - base.data_ptr())
                pointer = pointers.setdefault(source, len(pointers))
                if is_descriptor:
                    # A constant that every call replaces.
                    form = (list(value.shape), list(value.strides), value.padding)
                    descriptors.append((len(constants), pointer, form))
                    places.append(len(constants))
                    constants.append(None)
                else:
                    places.append(-1 - pointer)
            steps.append((step.kernel, compiled, step.grid, places))
        # Addresses stand behind the constants, in the order in which they were met.
        steps = [
            (
                kernel,
                compiled,
                grid,
                itemgetter(*(len(constants) - 1 - at if at < 0 else at for at in places)),
            )
            for kernel, compiled, grid, places in steps
        ]
        sizes = [scratch.numel() for scratch in self._scratch]
        return Plan(self._device, steps, sizes, constants, list(pointers), descriptors)


class Plan:
    """Launches of which only the addresses are open.

    Args:
        device: Where they run.
        steps: (Triton function, compiled kernel, grid, picks its arguments from the pool).
        scratch_sizes: float32 elements of each scratch tensor.
        constants: The pool's first part.
        pointers: Its second part: (number of the tensor or scratch, distance from its start).
        descriptors: (its place among the constants, number of its pointer, its shape, strides and
            padding); a descriptor itself would keep its tensor alive.
    """

    __slots__ = ("_constants", "_descriptors", "_device", "_pointers", "_scratch_sizes", "_steps")

    def __init__(
        self,
        device: torch.device,
        steps: Sequence[tuple[Any, ...]],
        scratch_sizes: Sequence[int],
        constants: list[Any],
        pointers: Sequence[tuple[int, int]],
        descriptors: Sequence[tuple[int, int, tuple[Any, ...]]],
    ) -> None:
        self._device = device
        self._steps = steps
        self._scratch_sizes = scratch_sizes
        self._constants = constants
        self._pointers = pointers
        self._descriptors = descriptors

    def __call__(self, addresses: list[int]) -> None:
        """Launch everything again, on the current stream of the device.

        Args:
            addresses: Start of each tensor given to `Launches.bind`, in that order; each at the
                same distance from a multiple of 16 bytes as then.
        """
        active, index = driver.active, self._device.index or 0
        if active.get_current_device() == index:
            self._run(active.get_current_stream(index), addresses)
        else:
            with on_device_of(self._device):
                self._run(active.get_current_stream(index), addresses)

    def _run(self, stream: int, addresses: list[int]) -> None:
        scratch = [
            torch.empty(size, dtype=torch.float32, device=self._device)
            for size in self._scratch_sizes
        ]
        if scratch:
            addresses = [*addresses, *[tensor.data_ptr() for tensor in scratch]]
        pool = [*self._constants, *[addresses[at] + offset for at, offset in self._pointers]]
        for place, pointer, form in self._descriptors:
            pool[place] = _Descriptor(pool[len(self._constants) + pointer], *form)
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        hooked = _is_set(enter) or _is_set(leave)
        if not hooked:
            enter = leave = None
        for kernel, compiled, grid, pick in self._steps:
            arguments = pick(pool)
            for hook in kernel.pre_run_hooks:
                hook(*arguments)
            compiled.run(
                *grid,
                stream,
                compiled.function,
                compiled.packed_metadata,
                compiled.launch_metadata(grid, stream, *arguments) if hooked else None,
                enter,
                leave,
                *arguments,
            )


def _is_set(hook: Any) -> bool:
    """Whether anybody listens: hooks are None, or a chain of calls that may be empty."""
    return hook is not None and bool(getattr(hook, "calls", True))

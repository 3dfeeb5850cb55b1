"""What the second and the third call of a signature launch, beside what Triton launches for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mlacast.ops import known_calls
from tests.kernels.fake_gpu import FakeGpu

Launched = list[tuple[int, list[Any]]]


def _observed(
    runs: list[tuple[Any, tuple[Any, ...]]], returned: Any, allocated: dict[int, str]
) -> Launched:
    """Variant and arguments of each launch: addresses for tensors, fresh memory by its role."""
    roles: dict[Any, str] = dict(allocated)
    results = returned if isinstance(returned, tuple) else (returned,)
    for at, result in enumerate(results):
        if isinstance(result, torch.Tensor) and result.data_ptr() in allocated:
            roles[result.data_ptr()] = f"result {at}"
    observed = []
    for kernel, arguments in runs:
        # The hooks and their metadata stand before the kernel's own arguments.
        own = arguments[:6] + arguments[9:]
        values = [_bare(value) for value in own]
        observed.append((kernel.function, [roles.get(value, value) for value in values]))
    return observed


def _bare(value: Any) -> Any:
    """An address for a tensor, and for a tensor descriptor what stands in it."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if hasattr(value, "padding"):
        return (value.base.data_ptr(), *value.shape, *value.strides, value.padding)
    return value


def refuse(*arguments: Any, **options: Any) -> None:
    """Take the place of what a known call does not need."""
    raise AssertionError("a known call needs neither Triton's binder nor the tables")


def _forms(returned: Any) -> list[Any]:
    results = returned if isinstance(returned, tuple) else (returned,)
    return [
        (tuple(part.shape), part.stride(), part.dtype) if isinstance(part, torch.Tensor) else part
        for part in results
    ]


def assert_repeated(
    call: Callable[..., Any],
    make: Callable[[], dict[str, Any]],
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_straight: bool = True,
) -> None:
    """Check that later calls launch and return what the first one of their signature does.

    Args:
        call: The function.
        make: Makes its arguments, with tensors of their own.
        gpu: Records the launches.
        monkeypatch: Watches what is allocated.
        is_straight: Whether the third call has to be made by a function of its own.
    """
    from mlacast.kernels.common import launch, launch_code

    empty_strided = launch_code.allocator(torch.device("cpu"))
    allocated: dict[int, str] = {}

    def recording(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def recorded(*sizes: Any, **options: Any) -> torch.Tensor:
            tensor = allocate(*sizes, **options)
            # Splits' maxima and sums lie behind their outputs.
            for at in range(0, tensor.nbytes, 4):
                allocated[tensor.data_ptr() + at] = f"byte {at} of {tensor.nbytes}"
            return tensor

        return recorded

    for module in (launch, launch_code):
        monkeypatch.setattr(module, "allocator", lambda device: recording(empty_strided))
    known_calls.OPERATORS.clear()
    known_calls.PUBLIC.clear()
    call(**make())
    again = make()
    for place, name in (
        (torch, "empty"),
        (torch, "zeros"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(place, name, recording(getattr(place, name)))
    forms: list[Any] = []

    def launched() -> Launched:
        gpu.runs.clear()
        returned = call(**again)
        forms.append(_forms(returned))
        return _observed(gpu.runs, returned, allocated)

    with monkeypatch.context() as patch:
        patch.setattr(launch.Launches, "launch", refuse)
        repeated = [launched()]
        if is_straight:
            patch.setattr(known_calls, "describe", refuse)
        repeated.append(launched())
    assert repeated[0], "something was launched"
    known_calls.OPERATORS.clear()
    known_calls.PUBLIC.clear()
    variants = len(gpu.compiled)
    assert [launched()] * 2 == repeated
    assert len(gpu.compiled) == variants
    assert forms == [forms[-1]] * 3

"""A call that was made before: its launches as a function of the tensors of a call of its like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from mlacast.ops.straight_calls import Pair, Plan, Straight, write_call


class Launched(Protocol):
    """What a launcher may return: its launches, to be bound to the tensors of the call."""

    result: torch.Tensor | None

    def bind(self, tensors: Sequence[torch.Tensor], /) -> Plan | None:
        """Return the plan, None if the launches cannot be repeated.

        Args:
            tensors: Those of the call, and the result if the operator returns one.
        """


class Repeated(NamedTuple):
    """A call of an operator that was repeated: the call, its arguments, the fresh ones of them."""

    known: KnownCall
    arguments: Sequence[Any]
    fresh: Sequence[torch.Tensor | None]


# A function of a tensor of the result, and that tensor.
After = tuple[Callable[[torch.Tensor], object], torch.Tensor]


class KnownCall:
    """A call that passed its checks.

    Args:
        plan: Its launches; None if it has to go through the operator.
        arguments: Arguments of the operator.
        outputs: Of the tensors among them, in order, those that may overlap another one.
        result: What the operator returns, if it does: an argument more of the launches.
    """

    __slots__ = (
        "_are_flat",
        "_pairs",
        "_positions",
        "_straight",
        "_was_written",
        "plan",
        "result_form",
    )

    def __init__(
        self,
        plan: Plan | None,
        arguments: Sequence[Any],
        outputs: Sequence[int] = (),
        result: torch.Tensor | None = None,
    ) -> None:
        self.plan = plan
        self.result_form: tuple[Any, ...] | None = None
        if result is not None:
            self.result_form = (result.shape, result.stride(), result.dtype, result.device)
            arguments = (*arguments, result)
        self._are_flat = not any(isinstance(value, (list, tuple)) for value in arguments)
        flat = flatten(arguments)
        self._positions = [at for at, value in enumerate(flat) if isinstance(value, torch.Tensor)]
        sizes = [_bytes_spanned(flat[at]) for at in self._positions]
        self._straight: Straight | None = None
        self._was_written = False
        self._pairs = [
            Pair(output, sizes[output], other, sizes[other])
            for output in outputs
            for other in range(len(sizes))
            if other not in outputs or other > output
            if sizes[output] and sizes[other]
        ]

    def new_result(self) -> tuple[torch.Tensor, ...]:
        """Allocate what the operator returns, nothing if it returns nothing."""
        if self.result_form is None:
            return ()
        shape, strides, dtype, device = self.result_form
        return (torch.empty_strided(shape, strides, dtype=dtype, device=device),)

    def repeat(self, arguments: Sequence[Any]) -> bool:
        """Launch with the addresses of ``arguments``, which have the signature of this call.

        Returns:
            False if nothing was launched: the call has no plan, or the address ranges of an output
            and another tensor intersect, which the operator looks into.
        """
        plan = self.plan
        if plan is None:
            return False
        flat = arguments if self._are_flat else flatten(arguments)
        addresses = [flat[at].data_ptr() for at in self._positions]
        for output, size, other, other_size in self._pairs:
            start, other_start = addresses[output], addresses[other]
            if start < other_start + other_size and other_start < start + size:
                return False
        plan(addresses)
        return True

    def written(
        self,
        values: Sequence[Any],
        repeated: Repeated,
        result: Any,
        after: Sequence[After],
        *,
        is_public: bool,
    ) -> Straight | None:
        """Return the function of ``values`` that makes this call, written when first asked for.

        Args:
            values: Arguments by which this call was found.
            repeated: What has just been repeated for it: itself, or the one call that it makes.
            result: What the caller gets.
            after: What is done with tensors of the result after the launches.
            is_public: Whether the operator stands behind this call and may be listened to.
        """
        if not self._was_written:
            self._was_written = True
            core, arguments, fresh = repeated
            if core.plan is not None:
                flat = arguments if core._are_flat else flatten(arguments)
                self._straight = write_call(
                    values,
                    core.plan,
                    [flat[at] for at in core._positions],
                    core._pairs,
                    [tensor for tensor in fresh if tensor is not None],
                    result,
                    after,
                    is_public=is_public,
                )
        return self._straight


def flatten(arguments: Sequence[Any]) -> list[Any]:
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

"""Error types and the one place that builds argument-error sentences.

Every message follows ``{op}: {argument} must {requirement}, got {actual}[; {remedy}]``. The checks
read only shapes, strides, dtypes and devices, so they trace under ``torch.compile`` and run on fake
tensors; checks of values live in ``mlacast.ops.value_checks`` because they synchronise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

FLOAT32_MAX = torch.finfo(torch.float32).max
# The least that has all of its bits.
FLOAT32_LEAST = torch.finfo(torch.float32).tiny
INT32_MAX = 2**31 - 1


class UnsupportedError(NotImplementedError):
    """A legal call that no (or not the named) backend covers.

    Attributes:
        op: Name of the operation.
        backend: The backend that was asked for, or None.
        missing: What the candidates lack, as names of features.
        arch: Device type or architecture the call runs on, for example "cpu" or "sm90".
    """

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        backend: str | None = None,
        missing: Sequence[str] = (),
        arch: str = "",
    ) -> None:
        super().__init__(message)
        self.op = op
        self.backend = backend
        self.missing = tuple(missing)
        self.arch = arch


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def _plain(sizes: Sequence[Any]) -> str:
    return "[" + ", ".join(str(size) for size in sizes) + "]"


def fail(op: str, argument: str, requirement: str, actual: object, remedy: str = "") -> NoReturn:
    """Raise ValueError with the house sentence."""
    tail = f"; {remedy}" if remedy else ""
    raise ValueError(f"{op}: {argument} must {requirement}, got {actual}{tail}")


def check_type(
    op: str, argument: str, value: object, kind: type | tuple[type, ...], wanted: str
) -> None:
    """Raise TypeError unless ``value`` is a ``kind``; a bool does not pass for a number."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    is_stray_bool = isinstance(value, bool) and bool not in kinds
    if is_stray_bool or not isinstance(value, kinds):
        raise TypeError(f"{op}: {argument} must be {wanted}, got {type(value).__name__}")


def check_finite(op: str, argument: str, number: Any, *, signed: bool = True) -> None:
    """Raise ValueError unless a number is finite in float32, which every backend calculates in."""
    least = -FLOAT32_MAX if signed else 0.0
    # An int of any size compares with a float, though it need not convert to one.
    if not least <= number <= FLOAT32_MAX:
        requirement = "be finite in float32" + ("" if signed else " and not negative")
        fail(op, argument, requirement, number)


def check_count(op: str, argument: str, value: Any, *, least: int = 0) -> None:
    """Raise ValueError unless an int is at least ``least`` and an int32, as kernels count."""
    if value < least:
        fail(op, argument, f"be at least {least}", value)
    if value > INT32_MAX:
        fail(op, argument, f"be at most {INT32_MAX}", value)


def check_choice(op: str, argument: str, value: object, choices: Sequence[object]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        fail(
            op, argument, "be one of " + ", ".join(repr(choice) for choice in choices), repr(value)
        )


def check_tensor(
    op: str,
    argument: str,
    value: object,
    dims: str | Sequence[str],
    sizes: dict[str, Any],
    *,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
    last_dim_contiguous: bool = False,
    contiguous: bool = False,
    remedy: str = "",
) -> None:
    """Check one tensor argument: type, rank and shape, dtype, device, strides, in that order.

    Args:
        op: Name that opens the message.
        argument: Name of the argument.
        value: What the caller passed.
        dims: Space-separated dimension names or numbers, ``"s_q h_q 512"``. A name met for the
            first time is bound in ``sizes``, later ones must agree. Several alternatives of
            different rank may be given as a sequence.
        sizes: Bindings shared by the checks of one call.
        dtype: The dtype, or the dtypes, allowed.
        device: Where the tensor has to be.
        last_dim_contiguous: Require stride 1 on the last dimension (ignored where its size is 1 or
            it is empty).
        contiguous: Require a contiguous tensor.
        remedy: Appended to a shape or dtype message.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {argument} must be a torch.Tensor, got {type(value).__name__}")
    alternatives = (dims,) if isinstance(dims, str) else tuple(dims)
    names = next((alt.split() for alt in alternatives if len(alt.split()) == value.dim()), None)
    wanted = " or ".join("[" + ", ".join(alt.split()) + "]" for alt in alternatives)
    if names is None:
        fail(op, argument, f"have shape {wanted}", _plain(value.shape), remedy)
    bound: dict[str, Any] = {}
    matches = True
    for name, size in zip(names, value.shape, strict=True):
        if name.isdigit():
            matches = matches and size == int(name)
        elif name in sizes:
            bound[name] = sizes[name]
            matches = matches and size == sizes[name]
        else:
            sizes[name] = size
    if not matches:
        known = ", ".join(f"{name}={size}" for name, size in bound.items())
        requirement = f"have shape {wanted}" + (f" with {known}" if known else "")
        fail(op, argument, requirement, _plain(value.shape), remedy)
    if dtype is not None:
        dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if value.dtype not in dtypes:
            names_of_dtypes = " or ".join(dtype_name(allowed) for allowed in dtypes)
            fail(op, argument, f"have dtype {names_of_dtypes}", dtype_name(value.dtype), remedy)
    if device is not None and value.device != device:
        fail(op, argument, f"be on {device} like the other arguments", value.device)
    if contiguous and not value.is_contiguous():
        fail(
            op,
            argument,
            "be contiguous",
            f"strides {_plain(value.stride())} for shape {_plain(value.shape)}",
        )
    if last_dim_contiguous and value.shape[-1] > 1 and value.numel() > 0 and value.stride(-1) != 1:
        fail(
            op, argument, "have stride 1 on its last dimension", f"strides {_plain(value.stride())}"
        )

"""What every number format accepts: one check for values, one for codes.

The checks look at Python types and dtypes only, so they trace under ``torch.compile`` and never
synchronise.
"""

from __future__ import annotations

import torch

from mlacast.errors import dtype_name, fail

__all__ = ["as_codes", "as_float32", "divide_by"]


def as_float32(op: str, argument: str, values: object) -> torch.Tensor:
    """Return ``values`` as float32, same shape, detached; float32 input is not copied.

    Args:
        op: Name that opens an error message.
        argument: Name of the argument.
        values: Tensor of any floating-point dtype and any shape. float64 is rounded to float32
            first.

    Raises:
        TypeError: ``values`` is not a tensor.
        ValueError: Its dtype is not floating point.
    """
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{op}: {argument} must be a torch.Tensor, got {type(values).__name__}")
    if not values.is_floating_point():
        fail(op, argument, "have a floating-point dtype", dtype_name(values.dtype))
    return values.detach().to(torch.float32)


def as_codes(
    op: str, argument: str, codes: object, native: torch.dtype | None = None
) -> torch.Tensor:
    """Return ``codes`` as uint8 of the same shape without changing a bit.

    Args:
        op: Name that opens an error message.
        argument: Name of the argument.
        codes: uint8 tensor of any shape, or one of the dtype ``native``.
        native: torch's own one-byte dtype of the format, accepted as an alternative to uint8.

    Raises:
        TypeError: ``codes`` is not a tensor.
        ValueError: It has another dtype.
    """
    if not isinstance(codes, torch.Tensor):
        raise TypeError(f"{op}: {argument} must be a torch.Tensor, got {type(codes).__name__}")
    if codes.dtype == torch.uint8:
        return codes
    if native is None or codes.dtype != native:
        wanted = "uint8" if native is None else f"uint8 or {dtype_name(native)}"
        fail(op, argument, f"have dtype {wanted}", dtype_name(codes.dtype))
    return codes.detach().view(torch.uint8)


def divide_by(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide float32 ``values`` of any shape by a constant with one IEEE rounding.

    On CUDA eager PyTorch turns division by a Python number into a multiplication by its reciprocal,
    which is not the same number for 448 or 6. A divisor that lives on the device is divided by.
    """
    return values / torch.full((), divisor, dtype=torch.float32, device=values.device)

"""What the RoPE and FP8 functions of MATE and FlashInfer share: defaults and argument checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlacast.errors import check_type, dtype_name, fail

_INDEX_DTYPES = (torch.int32, torch.int64)


def output_dtype(
    op: str,
    quantize_dtype: torch.dtype | None,
    outputs: Sequence[torch.Tensor | None],
    allowed: tuple[torch.dtype, ...],
) -> torch.dtype:
    """Return ``quantize_dtype``, else the dtype of the first given output, else e4m3."""
    given = next((out.dtype for out in outputs if isinstance(out, torch.Tensor)), allowed[0])
    dtype = given if quantize_dtype is None else quantize_dtype
    check_type(op, "quantize_dtype", dtype, torch.dtype, "a torch.dtype or None")
    if dtype not in allowed:
        names = " or ".join(dtype_name(one) for one in allowed)
        fail(op, "quantize_dtype", f"be {names}", dtype_name(dtype))
    return dtype


def check_table(op: str, cos_sin_cache: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Check dtype and contiguity of the table."""
    check_type(op, "cos_sin_cache", cos_sin_cache, torch.Tensor, "a torch.Tensor")
    if cos_sin_cache.dtype not in allowed:
        names = " or ".join(dtype_name(one) for one in allowed)
        fail(op, "cos_sin_cache", f"have dtype {names}", dtype_name(cos_sin_cache.dtype))
    if not cos_sin_cache.is_contiguous():
        fail(op, "cos_sin_cache", "be contiguous", f"strides {list(cos_sin_cache.stride())}")


def check_integers(op: str, argument: str, value: torch.Tensor) -> None:
    """Raise TypeError unless ``value`` is an int32 or int64 tensor, ValueError for its strides."""
    check_type(op, argument, value, torch.Tensor, "a torch.Tensor")
    if value.dtype not in _INDEX_DTYPES:
        raise TypeError(
            f"{op}: {argument} must have dtype int32 or int64, got {dtype_name(value.dtype)}"
        )
    if not value.is_contiguous():
        fail(op, argument, "be contiguous", f"strides {list(value.stride())}")


def check_float_inputs(
    op: str, inputs: dict[str, torch.Tensor | None], allowed: tuple[torch.dtype, ...]
) -> None:
    """Check that the parts of queries, keys and values are tensors of an allowed dtype."""
    for name, part in inputs.items():
        if part is None:
            continue
        check_type(op, name, part, torch.Tensor, "a torch.Tensor")
        if part.dtype not in allowed:
            names = " or ".join(dtype_name(one) for one in allowed)
            fail(op, name, f"have dtype {names}", dtype_name(part.dtype))


def check_host_scales(op: str, **scales: object) -> None:
    """Raise TypeError unless every scale is a number on the host."""
    for name, scale in scales.items():
        check_type(op, name, scale, (int, float), "a host scalar")

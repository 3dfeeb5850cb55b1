"""``quantize_output``: the quantising epilogue on its own."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.out_format import OutFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.errors import check_tensor, check_type
from mlacast.ops.known_calls import PUBLIC, call_operator
from mlacast.ops.output import features_of, from_arguments, prepare_output
from mlacast.ops.overlap import check_no_overlap
from mlacast.ops.query import check_backend

OP = "quantize_output"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize_output(
    x: torch.Tensor,
    format: OutFormat,
    *,
    out: QuantizedTensor | None = None,
    num_groups: int = 1,
    backend: str | None = None,
) -> QuantizedTensor:
    """Quantise rows of features into any output format.

    The same function of a float32 value as the epilogue of the fused operations, so for the same
    values the bytes are the same.

    Args:
        x: [T, K] bfloat16, float16 or float32, natural head order, last dimension contiguous.
        format: Format of the result.
        out: QuantizedTensor (or token range of one) with T tokens and K features in all, or None to
            allocate.
        num_groups: Groups of the allocated result, each K / num_groups features wide.
        backend: "reference", "triton", "hopper", or None for the best that covers the call.

    Returns:
        ``out``, or a new QuantizedTensor. Zero rows give an empty one.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract; nothing has been
            written.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call gives the same bits, on every device.

    Source: formulas in docs/formats.md.
    """
    values = (x, format, out, num_groups, backend)
    repeated: QuantizedTensor | None = PUBLIC.repeat(OP, values)
    if repeated is not None:
        return repeated
    known = PUBLIC.find(OP, values)
    if known is None:
        check_tensor(OP, "x", x, "T K", {}, dtype=_DTYPES, last_dim_contiguous=True)
        check_type(OP, "format", format, OutFormat, "an OutFormat such as mlacast.Mxfp8()")
        if out is not None:
            check_type(OP, "out", out, QuantizedTensor, "a QuantizedTensor or None")
        check_backend(OP, backend)
    shape = (x.shape[0], 1, x.shape[1])
    result, target = prepare_output(
        OP, out, format, num_groups, shape=shape, device=x.device, known=known
    )
    if isinstance(result, torch.Tensor):
        result = QuantizedTensor(result, None, format, 0, x.shape[0])
    arguments = (
        x,
        target.data,
        target.sf,
        target.out_format,
        target.scale,
        target.row_start,
        target.total_tokens,
        backend or "",
    )
    operator = torch.ops.mlacast.quantize_output
    call_operator(operator, OP, known, values, arguments, target.fresh, result)
    return result


def required_features(out_format: str) -> frozenset[str]:
    """Features that a backend needs for this call."""
    return features_of(out_format)


def run(
    x: torch.Tensor,
    out_data: torch.Tensor,
    out_sf: torch.Tensor | None,
    out_format: str,
    out_scale: torch.Tensor | None,
    row_start: int,
    total_tokens: int,
    backend: str,
) -> Any:
    """Eager body of ``torch.ops.mlacast.quantize_output``."""
    impl = select(
        OP, required_features(out_format), arch_of(x.device), requested_backend(OP, backend)
    )
    if x.shape[0] == 0:
        return None
    check_no_overlap(OP, [("out", out_data), ("out.sf", out_sf)], [("x", x)])
    return load(impl.target)(
        x, out=from_arguments(out_data, out_sf, out_format, out_scale, row_start, total_tokens)
    )

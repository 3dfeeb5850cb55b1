"""``grouped_out_project``: the grouped GEMM that consumes the quantised attention output."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.errors import check_tensor, check_type
from mlacast.ops.output import features_of, from_arguments, to_arguments
from mlacast.ops.query import check_backend

OP = "grouped_out_project"
_WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def grouped_out_project(
    out: QuantizedTensor, weight: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Project each group of features with its own matrix: ``bhr,hdr->bhd``.

    Reads the buffer as it is: one call over the whole step's buffer, whichever launches filled its
        rows.

    Args:
        out: [T, g, f] in any format. ``dequantize`` semantics: features in natural head order, so
            ``weight`` is never permuted, whatever the element order of the buffer.
        weight: [g, d_out, f] bfloat16, float16 or float32, last dimension contiguous.
        backend: "reference", "triton", "hopper", or None for the best that covers the call.

    Returns:
        [T, g, d_out] in the dtype of ``weight``, accumulated in float32. Zero tokens give an empty
        tensor.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call gives the same bits.

    Source: the grouped out-projection ("bhr,hdr->bhd") of DeepSeek-V4; DeepGEMM's ``fp8_einsum``.
    """
    check_type(OP, "out", out, QuantizedTensor, "a QuantizedTensor")
    sizes: dict[str, Any] = {"g": out.num_groups, "f": out.features}
    check_tensor(
        OP,
        "weight",
        weight,
        "g d_out f",
        sizes,
        dtype=_WEIGHT_DTYPES,
        device=out.data.device,
        last_dim_contiguous=True,
    )
    check_backend(OP, backend)
    source = to_arguments(out)
    projected: torch.Tensor = torch.ops.mlacast.grouped_out_project(
        source.data,
        source.sf,
        # Forward only: a parameter's result carries no graph that backward could not follow.
        weight.detach(),
        source.out_format,
        source.scale,
        source.row_start,
        source.total_tokens,
        backend or "",
    )
    return projected


def required_features(format: str) -> frozenset[str]:
    """Features that a backend needs for this call."""
    return features_of(format)


def run(
    data: torch.Tensor,
    sf: torch.Tensor | None,
    weight: torch.Tensor,
    format: str,
    scale: torch.Tensor | None,
    row_start: int,
    total_tokens: int,
    backend: str,
) -> torch.Tensor:
    """Eager body of ``torch.ops.mlacast.grouped_out_project``."""
    impl = select(
        OP, required_features(format), arch_of(data.device), requested_backend(OP, backend)
    )
    out = from_arguments(data, sf, format, scale, row_start, total_tokens)
    projected: torch.Tensor = load(impl.target)(out, weight)
    return projected

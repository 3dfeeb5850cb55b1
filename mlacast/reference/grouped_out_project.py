"""Reference of ``grouped_out_project``, the GEMM that consumes the quantised output."""

from __future__ import annotations

import torch

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.reference.project_weights import weight_values


def grouped_out_project(
    out: QuantizedTensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Multiply each group of features with its own matrix: ``bhr,hdr->bhd``.

    Args:
        out: [T, g, f] in any format.
        weight: [g, d_out, f], natural head order.
        weight_sf: Scales of e4m3 weights, as in ``mlacast.grouped_out_project``.
        compute_dtype: torch.float32, or torch.float64 on request.

    Returns:
        [T, g, d_out] in ``compute_dtype``.
    """
    values = out.dequantize().to(compute_dtype)
    numbers = weight_values(weight, weight_sf, compute_dtype)
    # einsum leaves the groups outermost in memory; callers get a contiguous tensor.
    return torch.einsum("bhr,hdr->bhd", values, numbers).contiguous()

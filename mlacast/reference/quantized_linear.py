"""Reference of ``quantized_linear``, one matrix for all features of a token."""

from __future__ import annotations

import torch

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.reference.project_weights import weight_values


def quantized_linear(
    out: QuantizedTensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Multiply every token with one matrix.

    Args:
        out: [T, g, f] in any format, K = g * f.
        weight: [d_out, K], natural head order.
        weight_sf: Scales of e4m3 weights, as in ``mlacast.quantized_linear``.
        compute_dtype: torch.float32, or torch.float64 on request.

    Returns:
        [T, d_out] in ``compute_dtype``.
    """
    values = out.dequantize().to(compute_dtype).flatten(1)
    return values @ weight_values(weight, weight_sf, compute_dtype).t()

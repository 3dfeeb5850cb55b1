"""``grouped_out_project``: the grouped GEMM that consumes the quantised attention output."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.ops.output import from_arguments
from mlacast.ops.project_call import call_project
from mlacast.ops.project_weights import project_features

OP = "grouped_out_project"


def grouped_out_project(
    out: QuantizedTensor,
    weight: torch.Tensor,
    *,
    weight_sf: torch.Tensor | None = None,
    weight_order: str = "head",
    backend: str | None = None,
) -> torch.Tensor:
    """Project each group of features with its own matrix: ``bhr,hdr->bhd``.

    Reads the buffer as it is: one call over the whole step's buffer, whichever launches filled its
        rows.

    Args:
        out: [T, g, f] in any format. ``dequantize`` semantics: features in natural head order, so
            ``weight`` is not permuted, whatever the element order of the buffer.
        weight: [g, d_out, f] bfloat16, float16 or float32, or float8_e4m3fn codes with
            ``weight_sf``; last dimension contiguous.
        weight_sf: Scales of e4m3 weights, value = code * scale: float32 [g, ceil(d_out / 128),
            ceil(f / 128)], one for each 128x128 block; or powers of two, one for each 32 features
            of a row: uint8 (2**(byte - 127)) or float8_e8m0fnu [g, d_out, f / 32], contiguous, or
            four bytes to an int32 word, [g, d_out, f / 128] with any strides (MN-major ones, as
            ``permute_wv_proj`` returns them, are read fastest).
        weight_order: "head": columns in natural head order. "buffer": columns, and scales per 32,
            in the order of the buffer, as ``permute_wv_proj`` leaves them; differs for
            ``Mxfp8("chunk32")`` only.
        backend: "reference", "triton", "hopper", or None for the best that covers the call.

    Returns:
        [T, g, d_out] in the dtype of ``weight``, bfloat16 for codes, accumulated in float32. Zero
        tokens give an empty tensor.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call gives the same bits.

    Source: the grouped out-projection ("bhr,hdr->bhd") of DeepSeek-V4; DeepGEMM's ``fp8_einsum``.
    """
    operator = torch.ops.mlacast.grouped_out_project
    return call_project(
        OP, operator, out, weight, weight_sf, weight_order, backend, is_grouped=True
    )


def required_features(
    out: QuantizedTensor, weight: torch.Tensor, weight_sf: torch.Tensor | None, weight_order: str
) -> frozenset[str]:
    """Features that a backend needs for this call."""
    return project_features(out, weight, weight_sf, weight_order)


def run(
    data: torch.Tensor,
    sf: torch.Tensor | None,
    weight: torch.Tensor,
    weight_sf: torch.Tensor | None,
    projected: torch.Tensor,
    format: str,
    scale: torch.Tensor | None,
    row_start: int,
    total_tokens: int,
    backend: str,
) -> Any:
    """Eager body of ``torch.ops.mlacast.grouped_out_project``."""
    out = from_arguments(data, sf, format, scale, row_start, total_tokens)
    needed = project_features(out, weight, weight_sf, "head")
    impl = select(OP, needed, arch_of(data.device), requested_backend(OP, backend))
    if projected.numel() == 0:
        return None
    return load(impl.target)(out, weight, weight_sf, projected=projected)

"""``quantized_linear``: a linear layer that consumes a quantised output."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.ops.output import from_arguments
from mlacast.ops.project_call import call_project
from mlacast.ops.project_weights import BLOCK, project_features

OP = "quantized_linear"


def quantized_linear(
    out: QuantizedTensor,
    weight: torch.Tensor,
    *,
    weight_sf: torch.Tensor | None = None,
    weight_order: str = "head",
    backend: str | None = None,
) -> torch.Tensor:
    """Multiply every token with one matrix: ``out.dequantize().flatten(1) @ weight.T``.

    Reads the buffer as it is. With K = g * f, groups are only how the buffer is laid out.

    Args:
        out: [T, g, f] in any format; features in natural head order, group after group.
        weight: [d_out, K] bfloat16, float16 or float32, or float8_e4m3fn codes with ``weight_sf``;
            last dimension contiguous.
        weight_sf: Scales of e4m3 weights, value = code * scale: float32 [ceil(d_out / 128),
            ceil(K / 128)], one for each 128x128 block; or powers of two, one for each 32 features
            of a row: uint8 (2**(byte - 127)) or float8_e8m0fnu [d_out, K / 32], contiguous, or four
            bytes to an int32 word, [d_out, K / 128] with any strides.
        weight_order: "head": columns in natural head order. "buffer": columns, and scales per 32,
            in the order of the buffer; differs for ``Mxfp8("chunk32")`` only.
        backend: "reference", "triton", "hopper", or None for the best that covers the call.

    Returns:
        [T, d_out] in the dtype of ``weight``, bfloat16 for codes, accumulated in float32. Zero
        tokens give an empty tensor.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call gives the same bits.

    Source: the output projection that follows a dense MLA layer.
    """
    operator = torch.ops.mlacast.quantized_linear
    return call_project(
        OP, operator, out, weight, weight_sf, weight_order, backend, is_grouped=False
    )


def required_features(
    out: QuantizedTensor, weight: torch.Tensor, weight_sf: torch.Tensor | None, weight_order: str
) -> frozenset[str]:
    """Features that a backend needs for this call."""
    needed = project_features(out, weight, weight_sf, weight_order)
    sf, words = out.sf, out.format.sf_words(out.features)
    if out.num_groups > 1:
        strided = out.data.stride(1) != out.data.shape[2]
        if sf is not None and out.format.sf_layout != "swizzled_128x4":
            strided = strided or sf.stride(1) != words * sf.stride(2)
        if strided:
            needed |= {"groups:apart"}
    if weight_sf is not None and out.num_groups > 1 and out.features % BLOCK:
        # A block of scales would reach into the next group.
        needed |= {"groups:partial_blocks"}
    return needed


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
    """Eager body of ``torch.ops.mlacast.quantized_linear``."""
    out = from_arguments(data, sf, format, scale, row_start, total_tokens)
    needed = required_features(out, weight, weight_sf, "head")
    impl = select(OP, needed, arch_of(data.device), requested_backend(OP, backend))
    if projected.numel() == 0:
        return None
    return load(impl.target)(out, weight, weight_sf, projected=projected)

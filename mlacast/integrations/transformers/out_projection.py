"""The output projections of attention layers, fed with the quantised output."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import mlacast
from mlacast.descriptors.quantized_tensor import QuantizedTensor

_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def reads_plain_weight(module: Any, kind: type[nn.Module]) -> bool:
    """Say whether the module's weight (and bias) alone defines what the module does.

    False for a quantised or adapter-wrapped replacement of a ``kind``, for a module whose forward
    was replaced (weights kept on another device until the call) and for one with forward hooks:
    those have to be called.
    """
    return (
        type(module) is kind
        and "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and module.weight.dtype in _PLAIN_DTYPES
        and not module.weight.is_meta
    )


def project_output(
    module: Any, out: QuantizedTensor, dtype: torch.dtype, *, backend: str | None = None
) -> torch.Tensor:
    """Apply ``o_a_proj`` per group and ``o_b_proj`` over the groups.

    Args:
        module: The attention module.
        out: [T, o_groups, h_q * 512 / o_groups] in any format.
        dtype: Dtype of the model's activations.
        backend: As in ``fuse``.

    Returns:
        [T, hidden]. A plain ``o_a_proj`` is consumed by ``grouped_out_project``; any other module
        in its place (FP8 or 4-bit weights, an adapter) is called on the dequantised values.
    """
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

    o_a_proj = module.o_a_proj
    if reads_plain_weight(o_a_proj, DeepseekV4GroupedLinear):
        weight = o_a_proj.weight.view(out.num_groups, -1, out.features)
        grouped = mlacast.grouped_out_project(out, weight, backend=backend)
    else:
        grouped = o_a_proj(out.dequantize().to(dtype))
    projected: torch.Tensor = module.o_b_proj(grouped.flatten(1))
    return projected


def project_dense_output(
    module: Any, out: QuantizedTensor, dtype: torch.dtype, *, backend: str | None = None
) -> torch.Tensor:
    """Apply ``o_proj`` of a DeepseekV3Attention or DeepseekV32Attention.

    Args:
        module: The attention module.
        out: [T, 1, N * 128] in any format.
        dtype: Dtype of the model's activations.
        backend: As in ``fuse``.

    Returns:
        [T, hidden] in ``dtype``. A plain ``o_proj`` is consumed by ``quantized_linear``; any other
        module in its place is called on the dequantised values.
    """
    o_proj = module.o_proj
    if not reads_plain_weight(o_proj, nn.Linear):
        called: torch.Tensor = o_proj(out.dequantize().flatten(1).to(dtype))
        return called
    projected = mlacast.quantized_linear(out, o_proj.weight, backend=backend)
    return (projected if o_proj.bias is None else projected + o_proj.bias).to(dtype)

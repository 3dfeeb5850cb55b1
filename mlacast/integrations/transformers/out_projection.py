"""The grouped output projection of an attention layer, fed with the quantised output."""

from __future__ import annotations

from typing import Any

import torch

import mlacast
from mlacast.descriptors.quantized_tensor import QuantizedTensor

_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def reads_plain_weight(o_a_proj: Any) -> bool:
    """Say whether the module's weight alone defines what the module does.

    False for a quantised or adapter-wrapped replacement, for a module whose forward was replaced
    (weights kept on another device until the call) and for one with forward hooks: those have to be
    called.
    """
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

    return (
        type(o_a_proj) is DeepseekV4GroupedLinear
        and "forward" not in vars(o_a_proj)
        and not o_a_proj._forward_hooks
        and not o_a_proj._forward_pre_hooks
        and o_a_proj.weight.dtype in _PLAIN_DTYPES
        and not o_a_proj.weight.is_meta
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
    o_a_proj = module.o_a_proj
    if reads_plain_weight(o_a_proj):
        weight = o_a_proj.weight.view(out.num_groups, -1, out.features)
        grouped = mlacast.grouped_out_project(out, weight, backend=backend)
    else:
        grouped = o_a_proj(out.dequantize().to(dtype))
    projected: torch.Tensor = module.o_b_proj(grouped.flatten(1))
    return projected

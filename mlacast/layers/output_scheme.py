"""Schemes of a quantised output, and the one place that tells them from tensors.

`detect_output_quant_key` looks at dtypes and at which scales are there; nothing else does. The two
schemes with an ``output_scale`` have it in opposite directions: the FP8 one is multiplied to get
values back, the NVFP4 one multiplies values before they are encoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlacast.errors import UnsupportedError, check_type, dtype_name, fail

OP = "detect_output_quant_key"
GROUP_SIZES = (128, 64)


@dataclass(frozen=True)
class QuantKey:
    """A scheme of a quantised output, without its layout.

    Attributes:
        scheme: "fp8_static" (one scale of the tensor, known before), "fp8_group" (a scale for each
            token and ``group_size`` columns) or "nvfp4" (one for each token and 16 columns).
        group_size: 128 or 64 for "fp8_group", 16 for "nvfp4", 0 for "fp8_static".
    """

    scheme: str
    group_size: int = 0


FP8_STATIC = QuantKey("fp8_static")
FP8_GROUP_128 = QuantKey("fp8_group", 128)
FP8_GROUP_64 = QuantKey("fp8_group", 64)
NVFP4 = QuantKey("nvfp4", 16)
QUANT_KEYS = (FP8_STATIC, FP8_GROUP_128, FP8_GROUP_64, NVFP4)


def detect_output_quant_key(
    output: Tensor,
    output_scale: Tensor | None,
    output_block_scale: Tensor | None,
    output_dim: int,
) -> QuantKey | None:
    """Tell the scheme of an output from its tensors.

    Args:
        output: [T, output_dim] in the dtype of the codes; NVFP4 has half the columns.
        output_scale: [1] float32 or None. FP8: value = code * scale. NVFP4: the multiplier 2688 /
            amax before encoding.
        output_block_scale: Scales of groups, or None.
        output_dim: Columns of the output before it is quantised.

    Returns:
        None without scales: the output is not quantised. Else the key.

    Raises:
        TypeError: ``output`` or a scale is not a tensor.
        ValueError: Scales that do not belong together or to the dtype of ``output``, or groups of
            another size than 128 and 64.
        UnsupportedError: Block scales beside 4-bit codes without ``output_scale`` (MXFP4).
    """
    check_type(OP, "output", output, Tensor, "a torch.Tensor")
    for name, scale in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
        if scale is not None:
            check_type(OP, name, scale, Tensor, "a torch.Tensor or None")
    is_fp8 = output.dtype == torch.float8_e4m3fn
    if output_block_scale is None:
        if output_scale is None:
            return None
        if not is_fp8:
            requirement = "have dtype float8_e4m3fn beside an output_scale alone"
            remedy = "NVFP4 codes come with output_block_scale too"
            fail(OP, "output", requirement, dtype_name(output.dtype), remedy)
        return FP8_STATIC
    if is_fp8:
        if output_scale is not None:
            fail(OP, "output_scale", "be None beside block scales of FP8 codes", "a tensor")
        groups = output_block_scale.shape[-1] if output_block_scale.dim() else 0
        size = output_dim // groups if groups and output_dim % groups == 0 else 0
        if size not in GROUP_SIZES:
            requirement = f"have {output_dim} / 128 or {output_dim} / 64 columns"
            remedy = "other formats go in as a QuantizedTensor"
            actual = f"shape {list(output_block_scale.shape)}"
            fail(OP, "output_block_scale", requirement, actual, remedy)
        return FP8_GROUP_128 if size == 128 else FP8_GROUP_64
    if output.dtype not in (torch.uint8, torch.float4_e2m1fn_x2):
        requirement = "have dtype float8_e4m3fn, uint8 or float4_e2m1fn_x2 beside block scales"
        fail(OP, "output", requirement, dtype_name(output.dtype))
    if output_scale is None:
        raise UnsupportedError(
            f"{OP}: 4-bit codes with block scales and without output_scale would be MXFP4, which "
            "no operation writes; NVFP4 needs output_scale",
            op=OP,
            missing=("mxfp4",),
        )
    return NVFP4

"""The calling convention of vLLM's MLA attention layer over ``mlacast.layers.MLAAttention``.

Nothing of vLLM is imported. See ``docs/conventions.md``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlacast.call_log import log_public_functions
from mlacast.errors import check_type
from mlacast.layers import MLAAttention, MLAMetadata
from mlacast.layers.output_scheme import QUANT_KEYS, QuantKey, detect_output_quant_key
from mlacast.ops.output import Output

__all__ = ["QuantKey", "detect_output_quant_key", "forward_impl", "supports_quant_output"]

OP = "forward_impl"


def supports_quant_output(quant_key: object) -> bool:
    """Say whether the layer writes a scheme, in every batch and layout.

    Args:
        quant_key: What `detect_output_quant_key` returned.

    Returns:
        True for each of its keys; False for None and anything else.
    """
    return isinstance(quant_key, QuantKey) and quant_key in QUANT_KEYS


def forward_impl(
    layer: MLAAttention,
    q: Tensor,
    k_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    attn_metadata: MLAMetadata | None,
    output: Output,
    output_scale: Tensor | None = None,
    output_block_scale: Tensor | None = None,
    quant_group_size: int | None = None,
    quant_scale_ue8m0: bool | None = None,
    quant_col_major: bool | None = None,
    quant_tma_aligned: bool | None = None,
) -> Output:
    """Attend one step and write ``output``, quantised in the kernels that make it.

    Args:
        layer: The layer of mlacast that stands in for vLLM's.
        q: [T, N, 192] bfloat16, rotated, decodes first.
        k_c_normed: [T, 512] bfloat16.
        k_pe: [T, 1, 64] bfloat16, rotated.
        kv_cache: Cache in the layer's format, which holds the new tokens already. Not read in a
            profiling run.
        attn_metadata: The step, or None in a profiling run, whose output is zeros.
        output: [T, N * 128] in the dtype of the codes ([T, N * 64] for NVFP4), or bfloat16 without
            scales.
        output_scale: FP8 of a static scale: value = code * scale. NVFP4: the multiplier 2688 / amax
            before encoding.
        output_block_scale: Scales of groups, written.
        quant_group_size: 128 or 64, for FP8 groups.
        quant_scale_ue8m0: Powers of two, in float32, for FP8 groups.
        quant_col_major: Stride 1 along tokens, for FP8 groups.
        quant_tma_aligned: Columns ceil4(T) apart, for FP8 groups.

    Returns:
        ``output``. Rows behind the tokens of the step are zeros, with scales.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract.
        UnsupportedError: No backend covers the call.
    """
    check_type(OP, "layer", layer, MLAAttention, "a mlacast.layers.MLAAttention")
    kinds, wanted = (MLAMetadata, type(None)), "a mlacast.layers.MLAMetadata or None"
    check_type(OP, "attn_metadata", attn_metadata, kinds, wanted)
    if attn_metadata is None:
        attn_metadata, kv_cache = _profiling_step(layer, q)
    arguments: tuple[Any, ...] = (
        output_scale,
        output_block_scale,
        quant_group_size,
        quant_scale_ue8m0,
        quant_col_major,
        quant_tma_aligned,
    )
    layer(q, k_c_normed, k_pe, kv_cache, attn_metadata, output, *arguments)
    return output


def _profiling_step(layer: MLAAttention, q: Tensor) -> tuple[MLAMetadata, Tensor]:
    """Return a step without requests, and a cache of no pages: there may be none yet."""
    check_type(OP, "q", q, Tensor, "a torch.Tensor")
    none = torch.empty((0, 0), dtype=torch.int32, device=q.device)
    kv_format = layer.kv_format
    width = 576 if kv_format.d_qk is None else None
    cache = kv_format.allocate(0, 1, d_qk=width, device=q.device)
    ranks = {"dcp_rank": layer.dcp_rank, "dcp_world_size": layer.dcp_world_size}
    return MLAMetadata.build([], [], none, 1, **ranks), cache


log_public_functions(__name__)

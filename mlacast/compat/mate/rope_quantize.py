"""``mla_rope_quantize_fp8`` with MATE's signature."""

from __future__ import annotations

import torch

from mlacast.compat._rope_quantize import (
    check_float_inputs,
    check_host_scales,
    check_integers,
    check_table,
    output_dtype,
)
from mlacast.errors import check_tensor, check_type
from mlacast.ops.repeatable import repeatable
from mlacast.ops.rope_quantize_fp8 import rotate_and_quantize

_OP = "mla_rope_quantize_fp8"


@repeatable("mate.mla_rope_quantize_fp8")
def mla_rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate the RoPE parts of an MLA query and key, and cast both parts to e4m3.

    Inputs and outputs may be slices of wider rows: only the last dimension has to be contiguous.

    Args:
        q_rope: [n, h, 64] bfloat16.
        k_rope: [n, 64] bfloat16.
        q_nope: [n, h, 512] bfloat16.
        k_nope: [n, 512] bfloat16.
        cos_sin_cache: [max_pos, 64] float32 or bfloat16, contiguous, 32 cosines then 32 sines.
        pos_ids: [n] int32 or int64, contiguous, rows of the table; clamped to it.
        is_neox: True pairs (i, i + 32), False pairs (2i, 2i + 1).
        quantize_dtype: torch.float8_e4m3fn, or None for the dtype of the first given output, else
            e4m3.
        quant_scale_q: Multiplies both parts of the query before the cast.
        quant_scale_kv: Multiplies both parts of the key.
        q_rope_out: float8_e4m3fn tensor like ``q_rope``, or None.
        k_rope_out: Like ``k_rope``, or None.
        q_nope_out: Like ``q_nope``, or None.
        k_nope_out: Like ``k_nope``, or None.
        enable_pdl: A hint for launches, without effect.

    Returns:
        (q_rope_out, k_rope_out, q_nope_out, k_nope_out), the given objects or new tensors with the
        memory format of their inputs. n = 0 gives empty ones.

    Raises:
        TypeError: An argument is of another Python type, ``pos_ids`` has another dtype, or a scale
            is a tensor.
        ValueError: A shape, dtype, stride or device breaks the contract; nothing has been written.
        UnsupportedError: No backend covers the call.
    """
    outputs = (q_rope_out, k_rope_out, q_nope_out, k_nope_out)
    check_table(_OP, cos_sin_cache, (torch.float32, torch.bfloat16))
    dtype = output_dtype(_OP, quantize_dtype, outputs, (torch.float8_e4m3fn,))
    check_integers(_OP, "pos_ids", pos_ids)
    check_host_scales(_OP, quant_scale_q=quant_scale_q, quant_scale_kv=quant_scale_kv)
    check_type(_OP, "is_neox", is_neox, bool, "a bool")
    inputs = {"q_rope": q_rope, "k_rope": k_rope, "q_nope": q_nope, "k_nope": k_nope}
    sizes: dict[str, int] = {}
    for (name, part), dims in zip(
        inputs.items(), ("n h 64", "n 64", "n h 512", "n 512"), strict=True
    ):
        check_tensor(_OP, name, part, dims, sizes)
    check_float_inputs(_OP, {**inputs}, (torch.bfloat16,))
    return rotate_and_quantize(
        _OP,
        (q_rope, k_rope, q_nope, k_nope),
        cos_sin_cache,
        pos_ids,
        outputs,
        pairing="half" if is_neox else "interleaved",
        dtype=dtype,
        scales={"quant_scale_q": quant_scale_q, "quant_scale_kv": quant_scale_kv},
        positions_name="pos_ids",
    )

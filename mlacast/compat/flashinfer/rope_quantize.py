"""``rope_quantize_fp8`` and ``mla_rope_quantize_fp8`` with FlashInfer's signatures."""

from __future__ import annotations

import torch

from mlacast.compat._rope_quantize import (
    check_float_inputs,
    check_host_scales,
    check_integers,
    check_table,
    output_dtype,
)
from mlacast.errors import UnsupportedError, check_choice, check_type
from mlacast.ops.repeatable import repeatable
from mlacast.ops.rope_quantize_fp8 import FP8_DTYPES, rotate_and_quantize

INPUT_DTYPES = (torch.bfloat16, torch.float16)


def mla_rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
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
    """Do what `rope_quantize_fp8` does, without the choice of a backend.

    Args:
        q_rope: As there, like everything below.
        k_rope: As there.
        q_nope: As there.
        k_nope: As there.
        cos_sin_cache: As there.
        pos_ids: As there.
        is_neox: As there.
        quantize_dtype: As there.
        quant_scale_q: As there.
        quant_scale_kv: As there.
        q_rope_out: As there.
        k_rope_out: As there.
        q_nope_out: As there.
        k_nope_out: As there.
        enable_pdl: As there.

    Returns:
        (q_rope_out, k_rope_out, q_nope_out, k_nope_out), as there.

    Raises:
        TypeError: An argument is not of the Python type there.
        ValueError: A shape, dtype, stride or device breaks the contract; nothing has been written.
        UnsupportedError: No backend of mlacast covers the call.
    """
    return rope_quantize_fp8(
        q_rope,
        k_rope,
        q_nope,
        k_nope,
        cos_sin_cache,
        pos_ids,
        is_neox,
        quantize_dtype,
        quant_scale_q,
        quant_scale_kv,
        q_rope_out,
        k_rope_out,
        q_nope_out,
        k_nope_out,
        enable_pdl,
    )


@repeatable("flashinfer.rope_quantize_fp8")
def rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
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
    backend: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions, then scale and cast everything to FP8.

    Args:
        q_rope: [n, h_q, r] bfloat16 or float16, the dtype of all inputs; last dimension contiguous
            here and below.
        k_rope: [n, r] (MLA) or [n, h_kv, r].
        q_nope: [n, h_q, d] or None.
        k_nope: [n, d] or [n, h_kv, d], or None.
        cos_sin_cache: [max_pos, r] float32, contiguous, r / 2 cosines then r / 2 sines.
        pos_ids: [n] int32 or int64, contiguous, rows of the table; clamped to it.
        is_neox: True pairs (i, i + r/2), False pairs (2i, 2i + 1).
        quantize_dtype: torch.float8_e4m3fn or torch.float8_e5m2; None for the dtype of the first
            given output, else e4m3.
        quant_scale_q: Multiplies both parts of the query before the cast.
        quant_scale_kv: Multiplies both parts of the key.
        q_rope_out: FP8 tensor like ``q_rope``, or None.
        k_rope_out: Like ``k_rope``, or None.
        q_nope_out: Like ``q_nope``, or None.
        k_nope_out: Like ``k_nope``, or None.
        enable_pdl: A hint for launches, without effect.
        backend: "cuda" or "cutile", checked as FlashInfer does and otherwise without effect: the
            results are the same. MLACAST_BACKEND chooses among the backends of mlacast.

    Returns:
        (q_rope_out, k_rope_out, q_nope_out, k_nope_out), the given objects or new tensors with the
        memory format of their inputs; parts that are None come back with a width of 0.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or the name of a backend breaks the contract;
            nothing has been written.
        UnsupportedError: "cutile" with ``is_neox`` or keys of several heads; or no backend of
            mlacast covers the call.
    """
    op = "rope_quantize_fp8"
    outputs = (q_rope_out, k_rope_out, q_nope_out, k_nope_out)
    check_table(op, cos_sin_cache, (torch.float32,))
    check_choice(op, "backend", backend, ("cuda", "cutile"))
    inputs = {"q_rope": q_rope, "k_rope": k_rope, "q_nope": q_nope, "k_nope": k_nope}
    check_float_inputs(op, inputs, INPUT_DTYPES)
    check_type(op, "is_neox", is_neox, bool, "a bool")
    check_type(op, "k_rope", k_rope, torch.Tensor, "a torch.Tensor")
    if backend == "cutile" and (is_neox or k_rope.dim() == 3):
        raise UnsupportedError(
            f"{op}: backend 'cutile' must have is_neox=False and k_rope [n, r], got "
            f"is_neox={is_neox} and k_rope {list(k_rope.shape)}",
            op=op,
            backend=backend,
        )
    check_integers(op, "pos_ids", pos_ids)
    check_host_scales(op, quant_scale_q=quant_scale_q, quant_scale_kv=quant_scale_kv)
    return rotate_and_quantize(
        op,
        (q_rope, k_rope, q_nope, k_nope),
        cos_sin_cache,
        pos_ids,
        outputs,
        pairing="half" if is_neox else "interleaved",
        dtype=output_dtype(op, quantize_dtype, outputs, FP8_DTYPES),
        scales={"quant_scale_q": quant_scale_q, "quant_scale_kv": quant_scale_kv},
        positions_name="pos_ids",
    )

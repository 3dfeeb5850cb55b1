"""FlashAttention's packed attention with quantised output, over ``dense_mla_prefill``.

The scheme follows from the scale arguments and the dtype of ``out``, as there. See
``docs/conventions.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlacast.call_log import log_public_functions
from mlacast.descriptors.out_format import Fp8Group, Fp8Tensor, Nvfp4
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.errors import UnsupportedError, check_tensor, check_type, dtype_name, fail
from mlacast.ops.dense_mla_prefill import dense_mla_prefill
from mlacast.ops.known_calls import more_than_launches
from mlacast.ops.repeatable import repeatable

__all__ = ["flash_attn_varlen_func"]

OP = "flash_attn_varlen_func"
D_V = 128
FP4_DTYPES = (torch.uint8, torch.float4_e2m1fn_x2)


@repeatable("flash_attn.flash_attn_varlen_func")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    output_scale: Tensor | None = None,
    output_scales: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend packed sequences; quantise the output if scales are given.

    Args:
        q: [T, h, 192] bfloat16.
        k: [T_k, h_kv, 192] bfloat16.
        v: [T_k, h_kv, 128] bfloat16.
        max_seqlen_q: The most query tokens of a sequence.
        cu_seqlens_q: [B + 1] int32, from 0.
        max_seqlen_k: The most keys of a sequence.
        cu_seqlens_k: [B + 1] int32, or None for the bounds of the queries.
        softmax_scale: Multiplies q.k; None means ``192 ** -0.5``.
        causal: Bottom-right aligned causal mask.
        return_softmax_lse: Return the sums as well.
        out: Buffer to fill, or None to allocate (not with ``output_scales``): [T, h, 128] bfloat16
            without scales, float8_e4m3fn with one of the two, [T, h, 64] uint8 or float4_e2m1fn_x2
            with both.
        output_scale: [1] float32. Alone, FP8 of a static scale: value = code * scale. With
            ``output_scales``, NVFP4: the multiplier 2688 / amax before encoding.
        output_scales: Written. Alone, FP8 of groups: [T, h, 128 / group] float32 for groups of 128,
            64 or 32; powers of two unless it is contiguous. With ``output_scale``: the swizzled
            [ceil128(T), h * 8] float8_e4m3fn.

    Returns:
        ``out``, or (out, lse [h, T] float32, natural log). Tokens without keys give zeros and -inf.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract.
        UnsupportedError: e5m2 codes, row-major NVFP4 scales, or no backend covers the call.
    """
    check_type(OP, "q", q, Tensor, "a torch.Tensor")
    check_type(OP, "return_softmax_lse", return_softmax_lse, bool, "a bool")
    if cu_seqlens_k is None:
        check_type(OP, "k", k, Tensor, "a torch.Tensor")
        if k.shape[0] != q.shape[0]:
            requirement = f"be given unless k has the {q.shape[0]} rows of q"
            fail(OP, "cu_seqlens_k", requirement, f"None for {k.shape[0]} rows")
        cu_seqlens_k = cu_seqlens_q
    if output_scale is not None and output_scales is None and out is None:
        out = torch.empty((*q.shape[:2], D_V), dtype=torch.float8_e4m3fn, device=q.device)
    result, lse = dense_mla_prefill(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        out=_buffer(q, out, output_scale, output_scales),
    )
    written = result if out is None else out
    assert isinstance(written, Tensor), "only a given buffer is quantised"
    return (written, lse) if return_softmax_lse else written


def _buffer(
    q: Tensor, out: Tensor | None, output_scale: Tensor | None, output_scales: Tensor | None
) -> Tensor | QuantizedTensor | None:
    """Return what the operation fills."""
    for name, scale in (("output_scale", output_scale), ("output_scales", output_scales)):
        if scale is not None:
            check_type(OP, name, scale, Tensor, "a torch.Tensor or None")
    if output_scale is None and output_scales is None:
        return out
    # Whether a buffer ends with its tensors is read off their storage, which no signature has.
    more_than_launches()
    check_type(OP, "out", out, Tensor, "a torch.Tensor beside output_scales")
    assert out is not None, "check_type has refused None"
    if out.dtype == torch.float8_e5m2:
        raise UnsupportedError(f"{OP}: out: e5m2 codes are not built", op=OP, missing=("e5m2",))
    sizes = {"T": q.shape[0], "h": q.shape[1]}
    if output_scale is not None and output_scales is not None:
        return _nvfp4(out, output_scale, output_scales, sizes)
    check_tensor(OP, "out", out, f"T h {D_V}", sizes, dtype=torch.float8_e4m3fn)
    if output_scale is not None:
        return QuantizedTensor(out, None, Fp8Tensor(output_scale))
    assert output_scales is not None, "one of the two is given"
    check_tensor(OP, "output_scales", output_scales, "T h scales", sizes, dtype=torch.float32)
    scales = output_scales.shape[2]
    if scales not in (1, 2, 4):
        fail(OP, "output_scales", "have 1, 2 or 4 scales for 128 columns", scales)
    sf = "float32" if output_scales.is_contiguous() else "float32_pow2"
    mn_major = output_scales.stride(0) == 1 and not output_scales.is_contiguous()
    layout = "mn_major" if mn_major else "row_major"
    return QuantizedTensor(out, output_scales, Fp8Group(D_V // scales, sf, layout))


def _nvfp4(
    out: Tensor, output_scale: Tensor, output_scales: Tensor, sizes: dict[str, int]
) -> QuantizedTensor:
    """Return the buffer of 4-bit codes and swizzled scales."""
    if out.dtype not in FP4_DTYPES:
        requirement = "have dtype uint8 or float4_e2m1fn_x2 with both scales"
        fail(OP, "out", requirement, dtype_name(out.dtype))
    check_tensor(OP, "out", out, f"T h {D_V // 2}", sizes)
    if output_scales.dim() != 2:
        raise UnsupportedError(
            f"{OP}: output_scales: NVFP4 scales are written swizzled only, pass "
            "[ceil128(T), h * 8]",
            op=OP,
            missing=("nvfp4:row_major",),
        )
    return QuantizedTensor(out.view(torch.uint8), output_scales, Nvfp4(output_scale))


log_public_functions(__name__)

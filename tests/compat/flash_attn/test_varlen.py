"""flash_attn_varlen_func: schemes from its scale arguments, to the byte."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.compat.flash_attn import flash_attn_varlen_func
from tests.oracles import FLOAT32_UNIT, same_bits
from tests.quantizers import (
    Quantized,
    quantize_fp8_group,
    quantize_fp8_tensor,
    quantize_nvfp4,
    swizzled_buffer,
)

T, H = 9, 4
LENGTHS = torch.tensor([0, 4, 4, 9], dtype=torch.int32)


def tensors(tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(tokens, H, 192).bfloat16()
    k = torch.randn(tokens, H // 2, 192).bfloat16()
    return q, k, torch.randn(tokens, H // 2, 128).bfloat16()


def call(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    return flash_attn_varlen_func(q, k, v, 5, LENGTHS, 5, LENGTHS, **named)


def float32(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    lengths = {"cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS}
    out: Tensor = mlacast.reference.dense_mla_prefill(q, k, v, causal=causal, **lengths)[0]
    return out


def test_signature() -> None:
    signature = inspect.signature(flash_attn_varlen_func)
    empty = inspect.Parameter.empty
    plain = [value.replace(annotation=empty) for value in signature.parameters.values()]
    assert str(inspect.Signature(plain)) == (
        "(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, "
        "softmax_scale=None, causal=False, return_softmax_lse=False, out=None, output_scale=None, "
        "output_scales=None)"
    )


@pytest.mark.parametrize("causal", [False, True])
def test_plain(causal: bool) -> None:
    q, k, v = tensors()
    out = call(q, k, v, causal=causal)
    wanted = torch.zeros(T, H, 128, dtype=torch.float64)
    for first, stop in ((0, 4), (4, 9)):
        for token in range(first, stop):
            last = token + 1 if causal else stop
            for head in range(H):
                keys = k[first:last, head // 2].double()
                weights = torch.softmax(keys @ q[token, head].double() / math.sqrt(192), 0)
                wanted[token, head] = weights @ v[first:last, head // 2].double()
    assert out.dtype == torch.bfloat16
    assert float((out.double() - wanted).abs().max()) < 2**-8 * float(wanted.abs().max())


def test_lse_and_scale() -> None:
    q, k, v = tensors()
    out, lse = call(q, k, v, softmax_scale=0.5, return_softmax_lse=True)
    assert lse.shape == (H, T)
    terms = 0.5 * k[4:, 1].double() * q[4, 3].double()
    exact = float(torch.logsumexp(terms.sum(1), 0))
    # Partial sums of terms of random sign are as large as the root of their squares, each of 192 is
    # rounded, and roundings add up at random; 4 is room for a bad draw. The logarithm, its five
    # exponentials and their sum are rounded once each, logits and products by the scale too.
    size = float(terms.norm(dim=1).max())
    allowed = FLOAT32_UNIT * (4 * math.sqrt(192) * size + 4 * abs(exact) + 5 + 8)
    assert abs(float(lse[3, 4]) - exact) <= allowed
    assert out.shape == (T, H, 128)


def test_bounds_of_keys_may_be_those_of_queries() -> None:
    q, k, v = tensors()
    alone = flash_attn_varlen_func(q, k, v, 5, LENGTHS, 5)
    assert same_bits(alone, call(q, k, v))
    with pytest.raises(ValueError, match="cu_seqlens_k must be given unless k has the 9 rows of q"):
        flash_attn_varlen_func(q, k[:8], v[:8], 5, LENGTHS, 5)


def test_static_scale_with_and_without_a_buffer() -> None:
    q, k, v = tensors()
    wanted = quantize_fp8_tensor(float32(q, k, v, True), 0.02).data
    scale = torch.tensor([0.02])
    fresh = call(q, k, v, causal=True, output_scale=scale)
    assert fresh.dtype == torch.float8_e4m3fn
    assert torch.equal(fresh.view(torch.uint8), wanted)
    out = torch.full((T, H, 128), 0x5A, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert call(q, k, v, causal=True, out=out, output_scale=scale) is out
    assert torch.equal(out.view(torch.uint8), wanted)


def group_scales(group: int, kind: str) -> Tensor:
    """Scales [T, H, 128 / group] as an engine allocates them, full of NaN."""
    words = 128 // group
    storage = torch.full((1000,), float("nan"))
    column = (T + 3) // 4 * 4
    strides = {
        "contiguous": (H * words, words, 1),
        "columns": (1, words * T, T),
        "aligned_columns": (1, words * column, column),
        "strided_rows": (H * words + 4, words, 1),
    }
    return storage.as_strided((T, H, words), strides[kind])


@pytest.mark.parametrize("kind", ["contiguous", "columns", "aligned_columns", "strided_rows"])
@pytest.mark.parametrize("group", [128, 64, 32])
def test_scales_of_groups_are_powers_of_two_unless_contiguous(group: int, kind: str) -> None:
    q, k, v = tensors()
    scales = group_scales(group, kind)
    out = torch.full((T, H, 128), 0x5A, dtype=torch.uint8)
    call(q, k, v, out=out.view(torch.float8_e4m3fn), output_scales=scales)
    sf = "float32" if kind == "contiguous" else "float32_pow2"
    assert_holds(out, scales, quantize_fp8_group(float32(q, k, v), group, sf))


def assert_holds(out: Tensor, scales: Tensor, wanted: Quantized) -> None:
    assert torch.equal(out, wanted.data)
    assert wanted.sf is not None
    assert torch.equal(scales, wanted.sf)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float4_e2m1fn_x2])
def test_both_scales_mean_nvfp4(dtype: torch.dtype) -> None:
    q, k, v = tensors()
    out = torch.full((T, H, 64), 0x5A, dtype=torch.uint8)
    scales = torch.full((128, H * 8), 0x7F, dtype=torch.uint8)
    call(
        q,
        k,
        v,
        out=out.view(dtype),
        output_scale=torch.tensor([700.0]),
        output_scales=scales.view(torch.float8_e4m3fn),
    )
    wanted = quantize_nvfp4(float32(q, k, v), 700.0)
    assert torch.equal(out, wanted.data)
    assert wanted.sf is not None
    assert torch.equal(scales, swizzled_buffer(wanted.sf))


E4M3 = torch.zeros(T, H, 128, dtype=torch.float8_e4m3fn)
FP4 = torch.zeros(T, H, 64, dtype=torch.uint8)
ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        ({"output_scales": torch.ones(T, H, 1)}, TypeError, "out must be a torch.Tensor beside"),
        ({"out": E4M3}, ValueError, "out must have dtype bfloat16"),
        ({"out": FP4, "output_scale": ONE}, ValueError, "out must have shape"),
        ({"out": E4M3.bfloat16(), "output_scale": ONE}, ValueError, "have dtype float8_e4m3fn"),
        (
            {"out": E4M3.to(torch.float8_e5m2), "output_scale": ONE},
            mlacast.UnsupportedError,
            "e5m2 codes are not built",
        ),
        ({"out": E4M3, "output_scale": 1.0}, TypeError, "output_scale must be a torch.Tensor"),
        (
            {"out": E4M3, "output_scales": torch.ones(T, H, 8)},
            ValueError,
            "have 1, 2 or 4 scales for 128 columns, got 8",
        ),
        ({"out": E4M3, "output_scales": torch.ones(T, H)}, ValueError, "output_scales must have"),
        (
            {"out": E4M3, "output_scale": ONE, "output_scales": E4M3[0]},
            ValueError,
            "uint8 or float4_e2m1fn_x2 with both scales",
        ),
        (
            {"out": FP4, "output_scale": ONE, "output_scales": E4M3[..., :8]},
            mlacast.UnsupportedError,
            "swizzled only",
        ),
    ],
)
def test_what_is_refused(named: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(*tensors(), **named)


def test_no_tokens() -> None:
    q, k, v = tensors(0)
    out, lse = flash_attn_varlen_func(q, k, v, 0, LENGTHS[:1], 0, return_softmax_lse=True)
    assert (out.shape, lse.shape) == ((0, H, 128), (H, 0))

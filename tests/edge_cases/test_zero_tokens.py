"""Zero query tokens, empty caches: correctly typed empty results, and the next call works.

BC-35, flashinfer-ai/flashinfer#4461 (also sgl-project/sglang#33871): idle ranks call with nothing
to do.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mlacast
from tests.format_cases import QUANTISED, FormatCase, buffer_bytes, case_id, poisoned_buffer
from tests.scenarios import CACHES, CacheCase, cache_id

NO_LENGTHS = torch.empty(0, dtype=torch.int32)


def _no_indices(topk: int) -> Tensor:
    return torch.empty(0, topk, dtype=torch.int32)


@pytest.mark.parametrize("topk", [0, 5])
@pytest.mark.parametrize("heads", [1, 3])
def test_prefill_without_tokens(heads: int, topk: int, backend: str) -> None:
    q, kv = torch.empty(0, heads, 512).bfloat16(), torch.randn(4, 512).bfloat16()
    out, max_logits, lse = mlacast.sparse_mla_prefill(
        q,
        kv,
        _no_indices(topk),
        sm_scale=1.0,
        topk_length=NO_LENGTHS,
        attn_sink=torch.zeros(heads),
        q_norm_eps=1e-6,
        rope=mlacast.Rope(torch.zeros(3, 64), NO_LENGTHS),
        backend=backend,
    )
    assert isinstance(out, Tensor)
    assert (out.shape, out.dtype) == ((0, heads, 512), torch.bfloat16)
    for tensor in (max_logits, lse):
        assert (tensor.shape, tensor.dtype) == ((0, heads), torch.float32)


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_every_output_format_without_tokens(case: FormatCase, backend: str) -> None:
    q, kv = torch.empty(0, 2, 512).bfloat16(), torch.randn(4, 512).bfloat16()
    out = mlacast.sparse_mla_prefill(
        q, kv, _no_indices(3), sm_scale=1.0, out_format=case.build(), num_groups=2, backend=backend
    )[0]
    assert isinstance(out, mlacast.QuantizedTensor)
    assert out.data.shape == (0, 2, 256 if case.kind == "Nvfp4" else 512)
    assert out.dequantize().shape == (0, 2, 512)
    # An empty range of a bigger buffer is left alone.
    buffer = poisoned_buffer(case, 6, 2, 512)
    before = buffer_bytes(buffer)
    mlacast.sparse_mla_prefill(
        q, kv, _no_indices(3), sm_scale=1.0, out=buffer[2:2], backend=backend
    )
    for left, right in zip(before, buffer_bytes(buffer), strict=True):
        assert (left is None and right is None) or torch.equal(left, right)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_decode_without_tokens_then_with_some(
    cache: CacheCase, num_splits: int | None, backend: str
) -> None:
    filled = cache.fill(num_pages=2, page_size=3, slots=range(6))

    def run(tokens: int) -> tuple[Tensor, Tensor]:
        out, lse = mlacast.sparse_mla_decode(
            torch.zeros(tokens, 2, cache.d_qk).bfloat16(),
            filled.cache,
            torch.zeros(tokens, 4, dtype=torch.int32),
            kv_format=mlacast.KvFormat.from_name(cache.name),
            sm_scale=1.0,
            num_splits=num_splits,
            backend=backend,
        )
        assert isinstance(out, Tensor)
        return out, lse

    out, lse = run(0)
    assert (out.shape, out.dtype) == ((0, 2, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((0, 2), torch.float32)
    out, lse = run(2)
    # Four times the same key with logit zero.
    assert torch.equal(out[0, 0].double(), filled.rows[0, :512])
    assert lse[0].tolist() == pytest.approx([math.log(4.0)] * 2, abs=1e-6)


@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_an_empty_cache_makes_every_row_empty(cache: CacheCase, backend: str) -> None:
    kv_format = mlacast.KvFormat.from_name(cache.name)
    width = None if kv_format.d_qk is not None else cache.d_qk
    out, lse = mlacast.sparse_mla_decode(
        torch.ones(2, 2, cache.d_qk).bfloat16(),
        kv_format.allocate(0, 4, d_qk=width),
        torch.tensor([[-1, 0], [-1, -1]], dtype=torch.int32),
        kv_format=kv_format,
        sm_scale=1.0,
        attn_sink=torch.zeros(2),
        backend=backend,
    )
    assert isinstance(out, Tensor)
    assert not out.any()
    assert bool((lse == -math.inf).all())


def test_prefill_over_no_keys(backend: str) -> None:
    out, max_logits, lse = mlacast.sparse_mla_prefill(
        torch.ones(2, 2, 512).bfloat16(),
        torch.empty(0, 512).bfloat16(),
        torch.tensor([[0, -1], [3, 2]], dtype=torch.int32),
        sm_scale=1.0,
        backend=backend,
    )
    assert isinstance(out, Tensor)
    assert not out.any()
    assert bool((lse == -math.inf).all()) and bool((max_logits == -math.inf).all())


@pytest.mark.parametrize(
    "shape", [(0, 1), (0, 2), (2, 0)], ids=["no_batch", "no_batch_two_queries", "no_queries"]
)
def test_dense_decode_without_tokens(shape: tuple[int, int], backend: str) -> None:
    batch, new_tokens = shape
    out, lse = mlacast.dense_mla_decode(
        torch.empty(batch, new_tokens, 2, 576).bfloat16(),
        torch.randn(2, 4, 1, 576).bfloat16(),
        torch.zeros(batch, 2, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32),
        kv_format=mlacast.KvFormat.BF16,
        sm_scale=1.0,
        backend=backend,
    )
    assert isinstance(out, Tensor)
    assert out.shape == (batch, new_tokens, 2, 512)
    assert lse.shape == (batch, new_tokens, 2)


def test_dense_decode_without_pages_or_lengths(backend: str) -> None:
    out, lse = mlacast.dense_mla_decode(
        torch.ones(2, 1, 2, 576).bfloat16(),
        torch.randn(2, 4, 1, 576).bfloat16(),
        torch.zeros(2, 0, dtype=torch.int32),
        torch.tensor([0, 3], dtype=torch.int32),
        kv_format=mlacast.KvFormat.BF16,
        sm_scale=1.0,
        backend=backend,
    )
    assert isinstance(out, Tensor)
    assert not out.any()
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("layout", ["ht", "th"])
def test_merge_without_tokens(layout: str, backend: str) -> None:
    lse_shape = (2, 0) if layout == "ht" else (0, 2)
    out, lse = mlacast.merge_attention_states(
        [torch.empty(0, 2, 512).bfloat16()] * 2,
        [torch.empty(lse_shape)] * 2,
        lse_layout=layout,
        backend=backend,
    )
    assert isinstance(out, Tensor)
    assert out.shape == (0, 2, 512)
    assert lse.shape == lse_shape


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_quantize_without_tokens(case: FormatCase, backend: str) -> None:
    out = mlacast.quantize_output(torch.empty(0, 1024), case.build(), num_groups=2, backend=backend)
    assert len(out) == 0
    assert out.dequantize().shape == (0, 2, 512)


def _rows(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


BF16_CACHE = mlacast.KvFormat.BF16
BOUNDS = torch.zeros(2, dtype=torch.int32)
WITHOUT_TOKENS: dict[str, Callable[[], object]] = {
    "sparse_mla_prefill": lambda: mlacast.sparse_mla_prefill(
        _rows(0, 2, 512), _rows(4, 512), _no_indices(3), sm_scale=1.0
    ),
    "sparse_mla_decode": lambda: mlacast.sparse_mla_decode(
        _rows(0, 2, 512), _rows(2, 4, 1, 512), _no_indices(3), kv_format=BF16_CACHE, sm_scale=1.0
    ),
    "dense_mla_decode": lambda: mlacast.dense_mla_decode(
        _rows(0, 1, 2, 512),
        _rows(2, 4, 1, 512),
        _no_indices(2),
        NO_LENGTHS,
        kv_format=BF16_CACHE,
        sm_scale=1.0,
    ),
    "dense_mla_prefill": lambda: mlacast.dense_mla_prefill(
        _rows(0, 2, 192),
        _rows(0, 2, 192),
        _rows(0, 2, 128),
        cu_seqlens_q=BOUNDS,
        cu_seqlens_k=BOUNDS,
        max_seqlen_q=0,
        max_seqlen_k=0,
    ),
    "merge_attention_states": lambda: mlacast.merge_attention_states(
        [_rows(0, 2, 512)] * 2, [torch.empty(2, 0)] * 2
    ),
    "v_up_project": lambda: mlacast.v_up_project(_rows(0, 2, 512), _rows(2, 512, 128)),
    "quantize_output": lambda: mlacast.quantize_output(_rows(0, 1024), mlacast.Mxfp8()),
    "kv_cache_append": lambda: mlacast.kv_cache_append(
        _rows(0, 512), NO_LENGTHS, _rows(2, 4, 1, 512), BF16_CACHE
    ),
    "rope_quantize_fp8": lambda: mlacast.rope_quantize_fp8(
        _rows(0, 2, 64), _rows(0, 64), None, None, torch.zeros(3, 64), NO_LENGTHS
    ),
    "grouped_out_project": lambda: mlacast.grouped_out_project(
        mlacast.QuantizedTensor.empty(0, 2, 512, mlacast.Mxfp8()), _rows(2, 8, 512)
    ),
    "quantized_linear": lambda: mlacast.quantized_linear(
        mlacast.QuantizedTensor.empty(0, 2, 512, mlacast.Mxfp8()), _rows(8, 1024)
    ),
}


@pytest.mark.parametrize("op", WITHOUT_TOKENS)
def test_no_kernel_is_asked_for_without_tokens(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of no blocks is an error of the device, for which a later call gets the blame."""

    def refuse(target: str) -> None:
        raise AssertionError(f"{target} would be launched")

    monkeypatch.setattr(importlib.import_module(f"mlacast.ops.{op}"), "load", refuse)
    WITHOUT_TOKENS[op]()

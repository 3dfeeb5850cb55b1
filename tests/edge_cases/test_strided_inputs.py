"""Real strides are honoured, strides of axes of size one are ignored.

BC-31, ROCm/aiter#3841 (also Dao-AILab/flash-attention#2670): head 0 was right and the other heads
read elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.oracles import same_bits

SM_SCALE = 0.02


def _assert_same(left: Any, right: Any) -> None:
    for one, other in zip(left, right, strict=True):
        assert same_bits(one, other)


def _prefill(q: Tensor, kv: Tensor, indices: Tensor, backend: str, **options: Any) -> Any:
    return mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=SM_SCALE, backend=backend, **options)


def _decode(q: Tensor, cache: Tensor, indices: Tensor, backend: str, **options: Any) -> Any:
    return mlacast.sparse_mla_decode(
        q,
        cache,
        indices,
        kv_format=mlacast.KvFormat.BF16,
        sm_scale=SM_SCALE,
        backend=backend,
        **options,
    )


def _kv_and_indices(s_q: int) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 512).bfloat16(), torch.randint(0, 8, (s_q, 64), dtype=torch.int32)


def test_a_transposed_query_equals_its_contiguous_copy(backend: str) -> None:
    q = oracles.exact_queries(4, 3, 512).transpose(0, 1)
    kv, indices = _kv_and_indices(3)
    before = q.clone()
    _assert_same(_prefill(q, kv, indices, backend), _prefill(q.contiguous(), kv, indices, backend))
    cache = kv.view(2, 4, 1, 512)
    _assert_same(
        _decode(q, cache, indices, backend), _decode(q.contiguous(), cache, indices, backend)
    )
    assert torch.equal(q, before)


@pytest.mark.parametrize("stride", [0, 7, 10**9])
@pytest.mark.parametrize("axis", ["token", "head"])
def test_the_stride_of_a_query_axis_of_size_one_is_ignored(
    axis: str, stride: int, backend: str
) -> None:
    flat = oracles.exact_queries(3 * 512)
    shape, strides = (
        ((1, 3, 512), (stride, 512, 1)) if axis == "token" else ((3, 1, 512), (512, stride, 1))
    )
    q = flat.as_strided(shape, strides)
    kv, indices = _kv_and_indices(shape[0])
    _assert_same(
        _prefill(q, kv, indices, backend), _prefill(flat.view(shape), kv, indices, backend)
    )
    cache = kv.view(2, 4, 1, 512)
    _assert_same(
        _decode(q, cache, indices, backend), _decode(flat.view(shape), cache, indices, backend)
    )


@pytest.mark.parametrize("stride", [0, 7, 10**9])
def test_the_stride_of_the_single_kv_head_is_ignored(stride: int, backend: str) -> None:
    q = oracles.exact_queries(2, 2, 512)
    kv, indices = _kv_and_indices(2)
    odd = kv.as_strided((8, 1, 512), (512, stride, 1))
    odd_indices = indices.as_strided((2, 1, 64), (64, stride, 1))
    expected = _prefill(q, kv, indices, backend)
    _assert_same(_prefill(q, odd, odd_indices, backend), expected)
    cache = kv.as_strided((2, 4, 1, 512), (4 * 512, 512, stride, 1))
    _assert_same(
        _decode(q, cache, indices, backend), _decode(q, kv.view(2, 4, 1, 512), indices, backend)
    )


@pytest.mark.parametrize("stride", [0, 7, 10**9])
def test_the_page_stride_of_a_single_page_is_ignored(stride: int, backend: str) -> None:
    q = oracles.exact_queries(2, 2, 512)
    kv, indices = _kv_and_indices(2)
    cache = kv.as_strided((1, 8, 1, 512), (stride, 512, 512, 1))
    _assert_same(
        _decode(q, cache, indices, backend), _decode(q, kv.view(1, 8, 1, 512), indices, backend)
    )


def test_pages_of_one_token_with_an_odd_token_stride(backend: str) -> None:
    q = oracles.exact_queries(2, 2, 512)
    kv, indices = _kv_and_indices(2)
    cache = kv.as_strided((8, 1, 1, 512), (512, 3, 5, 1))
    _assert_same(
        _decode(q, cache, indices, backend), _decode(q, kv.view(8, 1, 1, 512), indices, backend)
    )


def test_indices_sliced_from_a_wider_buffer(backend: str) -> None:
    q = oracles.exact_queries(3, 2, 512)
    kv, _ = _kv_and_indices(3)
    wide = torch.full((3, 80), 2**31 - 1, dtype=torch.int32)
    wide[:, :64] = torch.randint(0, 8, (3, 64), dtype=torch.int32)
    sliced, packed = wide[:, :64], wide[:, :64].contiguous()
    _assert_same(_prefill(q, kv, sliced, backend), _prefill(q, kv, packed, backend))
    cache = kv.view(2, 4, 1, 512)
    _assert_same(_decode(q, cache, sliced, backend), _decode(q, cache, packed, backend))


def test_kv_rows_sliced_from_wider_rows(backend: str) -> None:
    q = oracles.exact_queries(3, 2, 512)
    wide = torch.full((8, 640), float("nan")).bfloat16()
    wide[:, 64:576] = torch.randn(8, 512)
    indices = torch.randint(0, 8, (3, 16), dtype=torch.int32)
    kv = wide[:, 64:576]
    _assert_same(_prefill(q, kv, indices, backend), _prefill(q, kv.contiguous(), indices, backend))


@pytest.mark.parametrize("argument", ["attn_sink", "positions", "topk_length"])
def test_a_strided_vector_is_supported_or_refused(argument: str, backend: str) -> None:
    q = oracles.exact_queries(3, 2, 512)
    kv, indices = _kv_and_indices(3)
    table, positions = oracles.exact_rope_table(6), torch.tensor([[4, 0], [5, 0], [1, 0]])[:, 0]
    lengths = torch.tensor([[5, 99], [64, 99], [0, 99]], dtype=torch.int32)[:, 0]
    vector = {"attn_sink": torch.randn(2, 3)[:, 0], "positions": positions, "topk_length": lengths}[
        argument
    ]

    def run(given: Tensor) -> Any:
        if argument == "positions":
            return _prefill(q, kv, indices, backend, rope=mlacast.Rope(table, given))
        return _prefill(q, kv, indices, backend, **{argument: given})

    expected = run(vector.contiguous())
    try:
        result = run(vector)
    except ValueError as error:
        assert argument in str(error) and "stride" in str(error)
        return
    _assert_same(result, expected)


def test_a_query_expanded_over_the_heads(backend: str) -> None:
    """A stride of zero on an axis larger than one is a real stride."""
    q = oracles.exact_queries(3, 1, 512).expand(3, 4, 512)
    kv, indices = _kv_and_indices(3)
    _assert_same(_prefill(q, kv, indices, backend), _prefill(q.contiguous(), kv, indices, backend))


def test_a_strided_last_axis_is_supported_or_refused(backend: str) -> None:
    q = oracles.exact_queries(3, 2, 1024)[..., ::2]
    kv, indices = _kv_and_indices(3)
    expected = _prefill(q.contiguous(), kv, indices, backend)
    try:
        result = _prefill(q, kv, indices, backend)
    except ValueError as error:
        assert "sparse_mla_prefill: q must" in str(error) and "stride" in str(error)
        return
    _assert_same(result, expected)


@pytest.mark.parametrize("stride", [0, 7, 10**9])
@pytest.mark.parametrize("axis", ["request", "token"])
def test_the_strides_of_one_request_or_one_token_are_ignored_by_dense_decode(
    axis: str, stride: int, backend: str
) -> None:
    flat = oracles.exact_queries(3 * 2 * 512)
    shape, strides = (
        ((1, 3, 2, 512), (stride, 1024, 512, 1))
        if axis == "request"
        else ((3, 1, 2, 512), (1024, stride, 512, 1))
    )
    cache = torch.randn(4, 4, 1, 512).bfloat16()
    wide = torch.full((shape[0], 6), 2**31 - 1, dtype=torch.int32)
    wide[:, 1:4] = torch.randint(0, 4, (shape[0], 3), dtype=torch.int32)
    lengths = torch.tensor([[11, 0], [5, 0], [1, 0]], dtype=torch.int32)[: shape[0], 0]

    def run(q: Tensor, table: Tensor, seq_lens: Tensor) -> Any:
        return mlacast.dense_mla_decode(
            q,
            cache,
            table,
            seq_lens,
            kv_format=mlacast.KvFormat.BF16,
            sm_scale=SM_SCALE,
            backend=backend,
        )

    expected = run(flat.view(shape), wide[:, 1:4].contiguous(), lengths.contiguous())
    _assert_same(run(flat.as_strided(shape, strides), wide[:, 1:4], lengths), expected)


@pytest.mark.parametrize("stride", [0, 7, 10**9])
@pytest.mark.parametrize("axis", ["token", "head"])
def test_the_stride_of_an_axis_of_size_one_is_ignored_by_dense_prefill(
    axis: str, stride: int, backend: str
) -> None:
    flat = torch.randn(3 * 192).bfloat16()
    tokens, heads = (1, 3) if axis == "token" else (3, 1)
    strides = (stride, 192, 1) if axis == "token" else (192, stride, 1)
    shape = (tokens, heads, 192)
    bounds = torch.tensor([0, tokens], dtype=torch.int32)

    def run(q: Tensor) -> Any:
        return mlacast.dense_mla_prefill(
            q,
            q,
            q[..., :128],
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=tokens,
            max_seqlen_k=tokens,
            backend=backend,
        )

    _assert_same(run(flat.as_strided(shape, strides)), run(flat.view(shape)))

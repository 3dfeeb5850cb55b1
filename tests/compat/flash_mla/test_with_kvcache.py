"""``flash_mla_with_kvcache``: sparse decoding of packed caches, dense decoding of bf16 pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlacast.compat import flash_mla
from mlacast.errors import UnsupportedError
from tests.cache_writers import (
    V4,
    V32,
    V41,
    V41_FP4,
    V41_FP4_INLINE,
    V41_INLINE,
    float32_bytes,
)
from tests.compat.flash_mla.compare import assert_bf16_output, assert_same_bits, assert_within
from tests.compat.flash_mla.kvcache_cases import (
    DenseCase,
    KvCall,
    SparseCase,
    dense_call,
    sparse_call,
)

SPARSE = (
    SparseCase("656", (V32,)),
    SparseCase("656-s4-h64", (V32,), s_q=4, h_q=64, sink="mixed", lengths=True, b=3),
    SparseCase("656-h128", (V32,), h_q=128, b=1),
    SparseCase("656-page-5", (V32,), page_size=5, lengths=True, b=4, s_q=2),
    SparseCase("584", (V4,), s_q=4, h_q=64),
    SparseCase("584-twice", (V4, V4), s_q=4, lengths=True, sink="mixed", b=4),
    SparseCase("528", (V41,), h_q=128, lengths=True),
    SparseCase("528-288", (V41, V41_FP4), s_q=4, lengths=True, sink="finite", b=4),
    SparseCase("528-twice", (V41, V41), h_q=64),
)
INLINE = (
    SparseCase("inline-528", (V41_INLINE,), s_q=4, b=3, lengths=True),
    SparseCase("inline-528-288", (V41_INLINE, V41_FP4_INLINE), sink="mixed"),
)
DENSE = (
    DenseCase("one-token"),
    DenseCase("one-token-causal", causal=True),
    DenseCase("four-tokens", s_q=4),
    DenseCase("four-tokens-causal", s_q=4, causal=True, h_q=64),
    DenseCase("h128-causal", s_q=2, h_q=128, causal=True, lengths=(9,)),
    DenseCase("512-wide", d_qk=512, s_q=2, causal=True),
    DenseCase("page-64", page_size=64, lengths=(70, 1, 128), s_q=2),
    DenseCase("page-3", page_size=3, lengths=(7, 3, 1), s_q=3, causal=True),
    DenseCase("empty-requests", lengths=(0, 6, 0), s_q=2, causal=True),
    # Fewer keys than query tokens: the first ones see nothing.
    DenseCase("short-causal", lengths=(2, 1), s_q=4, causal=True),
)


def assert_matches_oracle(call: KvCall, returned: tuple[Tensor, Tensor]) -> None:
    out, lse = returned
    attended = call.attended()
    assert_bf16_output(out, attended)
    # Natural log, [b, h_q, s_q], +inf for a row without keys.
    assert_within(lse, attended.lse.transpose(1, 2), attended.lse_budget.transpose(1, 2), "lse")


@pytest.mark.parametrize("case", SPARSE, ids=lambda case: case.id)
def test_sparse(case: SparseCase) -> None:
    call = sparse_call(case)
    assert_matches_oracle(call, call.run())


@pytest.mark.parametrize("case", INLINE, ids=lambda case: case.id)
def test_sparse_with_inline_scales(case: SparseCase) -> None:
    flash_mla.set_v41_placement("inline")
    call = sparse_call(case)
    assert_matches_oracle(call, call.run())


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.id)
def test_dense(case: DenseCase) -> None:
    call = dense_call(case)
    assert_matches_oracle(call, call.run())


@pytest.mark.parametrize("call_of", [lambda: sparse_call(SPARSE[1]), lambda: dense_call(DENSE[3])])
def test_scale_defaults_to_the_query_width(call_of: Any) -> None:
    call = call_of()
    given = call.run(softmax_scale=call.arguments["q"].shape[-1] ** -0.5)
    for one, other in zip(call.run(softmax_scale=None), given, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(
    "call_of",
    [lambda: sparse_call(SPARSE[5]), lambda: dense_call(DENSE[3])],
    ids=["sparse", "dense"],
)
def test_out_is_filled_in_place(call_of: Any) -> None:
    call = call_of()
    expected = call.run()
    storage = torch.full((expected[0].numel() + 256,), 0x5A5A, dtype=torch.int16)
    out = storage[128:-128].view(torch.bfloat16).view(expected[0].shape)
    returned = call.run(out=out)
    assert returned[0] is out
    for one, other in zip(returned, expected, strict=True):
        assert_same_bits(one, other)
    out.view(torch.int16).fill_(0x5A5A)
    assert bool((storage == 0x5A5A).all())


def test_requests_of_out_may_lie_apart() -> None:
    call = sparse_call(SPARSE[5])
    expected = call.run()
    # Two rows of another purpose after the four tokens of each request.
    parent = torch.full((4, 6, 8, 512), 0x5A5A, dtype=torch.int16)
    out = parent.view(torch.bfloat16)[:, :4]
    returned = call.run(out=out)
    assert returned[0] is out
    assert_same_bits(out, expected[0])
    assert_same_bits(returned[1], expected[1])
    assert bool((parent[:, 4:] == 0x5A5A).all())


def test_stored_float32_scales_are_used_as_they_are() -> None:
    """656-byte record with all codes 1.0: the output is bf16 of the stored scale."""
    record = torch.zeros(656, dtype=torch.uint8)
    record[:512] = 0x38
    record[512:528] = torch.tensor(float32_bytes([0.3, 3.0, 0.7, 1 / 3]), dtype=torch.uint8)
    # The neighbour holds a NaN scale and is not referenced.
    cache = torch.full((1, 2, 1, 656), 0xFF, dtype=torch.uint8)
    cache[0, 0, 0] = record
    arguments = {
        "q": torch.zeros(1, 1, 8, 576).bfloat16(),
        "k_cache": cache,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "is_fp8_kvcache": True,
        "indices": torch.tensor([[[0, -1]]], dtype=torch.int32),
    }
    out, lse = KvCall(arguments, []).run()
    expected = torch.tensor([0.30078125, 3.0, 0.69921875, 0.333984375]).repeat_interleave(128)
    assert torch.equal(out.float(), expected.expand(1, 1, 8, -1))
    assert torch.equal(lse, torch.zeros(1, 8, 1))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_cache_bytes_under_any_one_byte_dtype(dtype: torch.dtype) -> None:
    call = sparse_call(SPARSE[7])
    views = {name: call.arguments[name].view(dtype) for name in ("k_cache", "extra_k_cache")}
    for one, other in zip(call.run(**views), call.run(), strict=True):
        assert_same_bits(one, other)


def test_zero_requests_and_zero_columns() -> None:
    call = sparse_call(SPARSE[0])
    out, lse = call.run(q=call.arguments["q"][:0], indices=call.arguments["indices"][:0])
    assert out.shape == (0, 1, 8, 512)
    assert lse.shape == (0, 8, 1)
    out, lse = call.run(indices=call.arguments["indices"][..., :0])
    assert bool((out == 0).all())
    assert bool((lse == float("inf")).all())


@pytest.mark.parametrize("width", [64, 256, 576])
@pytest.mark.parametrize(
    "call_of",
    [lambda: sparse_call(SPARSE[0]), lambda: dense_call(DENSE[0])],
    ids=["sparse", "dense"],
)
def test_other_value_width_is_refused(call_of: Any, width: int) -> None:
    with pytest.raises(ValueError, match=rf"(?s)(?=.*head_dim_v)(?=.*512)(?=.*{width})"):
        call_of().run(head_dim_v=width)


def bytes_cache(width: int, heads: int = 1) -> Tensor:
    return torch.zeros(6, 8, heads, width, dtype=torch.uint8)


BAD_SPARSE = (
    pytest.param({"k_cache": bytes_cache(288)}, r"k_cache must .*got .*288", id="288-as-main"),
    pytest.param({"k_cache": bytes_cache(640)}, r"k_cache must .*got .*640", id="unknown-bytes"),
    pytest.param(
        {"k_cache": bytes_cache(656)}, r"(q|k_cache) must .*got .*(512|656)", id="656-for-512"
    ),
    pytest.param(
        {"k_cache": bytes_cache(528, 2)}, r"k_cache must .*got .*6, 8, 2, 528", id="two-heads"
    ),
    pytest.param(
        {"k_cache": bytes_cache(584)}, r"extra_k_cache must .*(528|288)", id="584-beside-288"
    ),
    pytest.param(
        {"extra_indices_in_kvcache": None, "extra_topk_length": None},
        r"extra_indices_in_kvcache must .*None",
        id="extra-cache-alone",
    ),
    pytest.param(
        {"extra_k_cache": None, "extra_topk_length": None},
        r"extra_k_cache must .*None",
        id="extra-indices-alone",
    ),
    pytest.param(
        {"q": torch.zeros(4, 4, 8, 512)}, r"q must .*bfloat16.*float32", id="float32-query"
    ),
    pytest.param(
        {"q": torch.zeros(4, 8, 512).bfloat16()}, r"q must .*got .*4, 8, 512", id="flat-query"
    ),
    pytest.param(
        {"indices": torch.zeros(3, 4, 10, dtype=torch.int32)},
        r"indices must .*got .*3, 4, 10",
        id="indices-of-other-batch",
    ),
    pytest.param(
        {"indices": torch.zeros(4, 4, 10)}, r"indices must .*int32.*got float32", id="float-indices"
    ),
    pytest.param(
        {"topk_length": torch.zeros(16, dtype=torch.int32)},
        r"topk_length must .*got .*16",
        id="length-per-row",
    ),
    pytest.param({"attn_sink": torch.zeros(4)}, r"attn_sink must .*got .*4", id="short-sink"),
    pytest.param(
        {"out": torch.zeros(4, 4, 8, 256).bfloat16()}, r"out must .*got .*256", id="narrow-out"
    ),
    pytest.param(
        {"out": torch.zeros(4, 4, 8, 512)}, r"out must .*bfloat16.*float32", id="float-out"
    ),
)


@pytest.mark.parametrize(("changes", "match"), BAD_SPARSE)
def test_bad_sparse_argument_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        sparse_call(SPARSE[7]).run(**changes)


BAD_DENSE = (
    pytest.param({"block_table": None}, r"block_table must .*None", id="no-table"),
    pytest.param({"cache_seqlens": None}, r"cache_seqlens must .*None", id="no-lengths"),
    pytest.param(
        {"block_table": torch.zeros(2, 5, dtype=torch.int32)},
        r"block_table must .*got .*2, 5",
        id="table-of-other-batch",
    ),
    pytest.param(
        {"cache_seqlens": torch.zeros(2, dtype=torch.int32)},
        r"cache_seqlens must .*got .*2",
        id="lengths-of-other-batch",
    ),
    pytest.param(
        {"cache_seqlens": torch.zeros(3)},
        r"cache_seqlens must .*int32.*float32",
        id="float-lengths",
    ),
    pytest.param(
        {"k_cache": torch.zeros(9, 8, 1, 512).bfloat16()},
        r"(k_cache|q) must .*got .*5(12|76)",
        id="cache-512-for-576",
    ),
    pytest.param(
        {"k_cache": torch.zeros(9, 8, 1, 576)}, r"k_cache must .*got .*float32", id="float32-cache"
    ),
)


@pytest.mark.parametrize(("changes", "match"), BAD_DENSE)
def test_bad_dense_argument_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        dense_call(DENSE[3]).run(**changes)


# Each would change the result; none may be dropped without a word.
IGNORABLE = (
    pytest.param(lambda: sparse_call(SPARSE[0]), {"causal": True}, "causal", id="causal-sparse"),
    pytest.param(
        lambda: dense_call(DENSE[0]),
        {"extra_k_cache": bytes_cache(584)},
        "extra_k_cache|extra_indices_in_kvcache",
        id="extra-dense",
    ),
    pytest.param(
        lambda: dense_call(DENSE[0]),
        {"topk_length": torch.ones(3, dtype=torch.int32)},
        "topk_length",
        id="topk-length-dense",
    ),
    pytest.param(
        lambda: sparse_call(SPARSE[0]),
        {"num_splits": torch.zeros(3, dtype=torch.int32)},
        "num_splits",
        id="num-splits",
    ),
)


@pytest.mark.parametrize(("call_of", "changes", "match"), IGNORABLE)
def test_argument_that_would_be_ignored_is_refused(
    call_of: Any, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises((ValueError, TypeError, UnsupportedError), match=match):
        call_of().run(**changes)


def test_sink_of_a_dense_call_is_used_or_refused() -> None:
    call = dense_call(DENSE[0])
    call.arguments["attn_sink"] = torch.full((8,), 2.0)
    try:
        returned = call.run()
    except (ValueError, UnsupportedError) as error:
        assert "attn_sink" in str(error)
    else:
        assert_matches_oracle(call, returned)

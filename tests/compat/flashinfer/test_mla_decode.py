"""trtllm_batch_decode_with_kv_cache_mla: sparse, dense, ragged; lse, sinks, scales, buffers."""

from __future__ import annotations

import math

import pytest
import torch

from tests import oracles
from tests.compat.flashinfer.mla_calls import dense_call, sparse_call

SINK = torch.tensor([0.5, -math.inf, 3.0])


@pytest.mark.parametrize("page_size", [1, 8, 32])
@pytest.mark.parametrize("name", ["BF16", "FP8"])
def test_sparse_with_a_cache_of_the_querys_dtype(name: str, page_size: int) -> None:
    call = sparse_call(name, page_size=page_size)
    out, lse = call.run(return_lse=True)
    call.assert_right(out, lse)
    assert out.shape == (3, 2, 3, 512) and out.dtype == torch.bfloat16
    assert lse.shape == (6, 3) and lse.dtype == torch.float32
    four_dims = call.run(kv_cache=call.arguments["kv_cache"].unsqueeze(1))
    assert oracles.same_bits(four_dims, out)


@pytest.mark.parametrize("name", ["BF16", "FP8"])
def test_sparse_requests_of_length_0_are_empty_and_other_lengths_mask_nothing(name: str) -> None:
    """A length below K leaves all columns: ids that do not count are -1."""
    call = sparse_call(name, seq_lens=(0, 1, 3), topk=20)
    out, lse = call.run(return_lse=True)
    call.assert_right(out, lse)
    assert bool((lse[:2] == -math.inf).all())
    assert not out[0].any()


@pytest.mark.parametrize("shape", ["by_request", "flat", "none"])
def test_sparse_with_the_packed_cache(shape: str) -> None:
    lengths = torch.tensor([0, 20, 7, 1, 33, -1], dtype=torch.int32)
    call = sparse_call("V32", lengths=None if shape == "none" else lengths)
    seq_lens = {"none": None, "flat": lengths, "by_request": lengths.view(3, 2)}[shape]
    out, lse = call.run(seq_lens=seq_lens, return_lse=True)
    call.assert_right(out, lse)
    named = call.run(seq_lens=seq_lens, backend="sparse", kv_scale_format="arbitrary_fp32")
    assert oracles.same_bits(named, out)


def test_packed_with_one_token_takes_lengths_per_request() -> None:
    lengths = torch.tensor([0, 20, 7], dtype=torch.int32)
    call = sparse_call("V32", q_len=1, lengths=lengths)
    call.assert_right(*call.run(return_lse=True))


@pytest.mark.parametrize("name", ["BF16", "FP8"])
def test_heads_without_rope_count_columns(name: str) -> None:
    lengths = torch.tensor([1, 20, 7, 2, 33, 3], dtype=torch.int32)
    call = sparse_call(name, d_qk=512, lengths=lengths)
    call.assert_right(*call.run(return_lse=True))


@pytest.mark.parametrize("name", ["BF16", "FP8"])
@pytest.mark.parametrize("q_len", [1, 2, 5])
def test_dense_is_causal_from_the_last_token(name: str, q_len: int) -> None:
    call = dense_call(name, q_lens=(q_len,) * 4, seq_lens=(9, 2, 1, 0))
    out, lse = call.run(return_lse=True)
    call.assert_right(out, lse)
    assert lse.shape == (4 * q_len, 3)


@pytest.mark.parametrize("backend", ["auto", "trtllm-gen", "xqa", "cute-dsl"])
def test_dense_kernels_that_may_be_named(backend: str) -> None:
    call = dense_call(q_lens=(1, 1), seq_lens=(9, 3))
    call.assert_right(call.run(backend=backend))


@pytest.mark.parametrize("max_q_len", [None, 7])
@pytest.mark.parametrize("name", ["BF16", "FP8"])
def test_dense_ragged(name: str, max_q_len: int | None) -> None:
    call = dense_call(name, q_lens=(1, 0, 4, 2), seq_lens=(9, 5, 6, 1), ragged=True)
    out, lse = call.run(return_lse=True, max_q_len=max_q_len)
    call.assert_right(out, lse)
    assert out.shape == (7, 3, 512) and lse.shape == (7, 3)


def test_ragged_tokens_past_the_last_request_are_empty() -> None:
    call = dense_call(q_lens=(1, 2), seq_lens=(9, 5), ragged=True)
    padded = torch.cat((call.arguments["query"], torch.ones(2, 3, 576).bfloat16()))
    out, lse = call.run(query=padded, max_q_len=2, return_lse=True)
    call.assert_right(out[:3], lse[:3])
    assert not out[3:].any() and bool((lse[3:] == -math.inf).all())


@pytest.mark.parametrize("name", ["BF16", "V32"])
def test_sparse_ragged(name: str) -> None:
    lengths = torch.tensor([20, 3, 0, 20, 5, 1], dtype=torch.int32) if name == "V32" else None
    call = sparse_call(name, batch=3, q_len=2, lengths=lengths, seq_lens=(0, 4, 9))
    starts = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    out, lse = call.run(
        query=call.arguments["query"].flatten(0, 1),
        block_tables=call.arguments["block_tables"].flatten(0, 1),
        cum_seq_lens_q=starts,
        return_lse=True,
    )
    call.assert_right(out, lse)


@pytest.mark.parametrize("listed", [False, True], ids=["tensor", "list"])
@pytest.mark.parametrize("mode", ["sparse", "packed", "dense"])
def test_sinks_join_the_denominator_and_lse(mode: str, listed: bool) -> None:
    call = {
        "sparse": lambda: sparse_call(seq_lens=(0, 1, 3)),
        "packed": lambda: sparse_call("V32"),
        "dense": lambda: dense_call(seq_lens=(9, 2, 0)),
    }[mode]()
    out, lse = call.run(sinks=[SINK] if listed else SINK, return_lse=True)
    call.assert_right(out, lse, sink=SINK)


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_scales_on_the_device(mode: str) -> None:
    call = sparse_call("FP8") if mode == "sparse" else dense_call("FP8")
    scales = {"bmm1_scale": torch.tensor([0.0625]), "bmm2_scale": torch.tensor(-2.5)}
    out, lse = call.run(return_lse=True, **scales)
    call.assert_right(out, lse, scale=-2.5)
    numbers = call.run(bmm2_scale=-2.5)
    assert oracles.same_bits(out, numbers)


@pytest.mark.parametrize("mode", ["sparse", "dense"])
@pytest.mark.parametrize("shape", ["flat", "by_request"])
def test_buffers_are_written_and_returned(shape: str, mode: str) -> None:
    call = sparse_call() if mode == "sparse" else dense_call()
    out = torch.full((3, 2, 3, 512), 7.0, dtype=torch.bfloat16)
    lse = torch.full((6, 3) if shape == "flat" else (3, 2, 3), 7.0)
    result = call.run(out=out, lse=lse, return_lse=True)
    assert result[0] is out and result[1] is lse
    call.assert_right(out, lse)


def test_an_lse_that_is_not_returned_is_not_written() -> None:
    lse = torch.full((6, 3), 7.0)
    assert isinstance(sparse_call().run(lse=lse), torch.Tensor)
    assert bool((lse == 7.0).all())


@pytest.mark.parametrize("mode", ["sparse", "packed", "dense"])
def test_no_request(mode: str) -> None:
    caches = {"sparse": "BF16", "packed": "V32"}
    call = dense_call() if mode == "dense" else sparse_call(caches[mode])
    changes = {
        name: call.arguments[name][:0]
        for name in ("query", "block_tables", "seq_lens")
        if call.arguments[name] is not None
    }
    out, lse = call.run(return_lse=True, **changes)
    assert out.shape == (0, 2, 3, 512) and lse.shape == (0, 3)


def test_hints_change_nothing() -> None:
    call = dense_call()
    hinted = call.run(
        workspace_buffer=torch.empty(8, dtype=torch.uint8),
        qk_nope_head_dim=64,
        max_seq_len=1,
        skip_softmax_threshold_scale_factor=0.0,
        enable_pdl=True,
        is_var_seq=False,
        cute_dsl_impl="modular",
        multi_ctas_kv_counter_buffer=torch.zeros(8, dtype=torch.uint8),
        use_fp16_softmax=True,
    )
    assert oracles.same_bits(hinted, call.run())


def test_two_parts_merge_by_lse_of_base_2() -> None:
    """The keys of one list in two calls, merged by 2**lse, are the keys of one call."""
    call = sparse_call(seq_lens=(9, 9, 9), topk=20)
    ids = call.arguments["block_tables"]
    parts = [
        call.run(block_tables=part.contiguous(), sparse_mla_top_k=10, return_lse=True)
        for part in (ids[..., :10], ids[..., 10:])
    ]
    lses = torch.stack([lse for _, lse in parts]).double()
    outs = torch.stack([out.flatten(0, 1) for out, _ in parts]).double()
    shares = torch.exp2(lses - lses.amax(0))
    shares = (shares / shares.sum(0))[..., None]
    merged, size = (outs * shares).sum(0), (outs.abs() * shares).sum(0)
    # Each part is half a bf16 step off, and shares add up to one. Logarithms that are off by e
    # move a share by 2e. Parts have the bounds of the whole row, whose keys are theirs, but for
    # rounding of a largest score that is larger without its sign: twice them is enough.
    oracle = call.oracle
    lse_error = 2 * (oracle.logit_error + 2.0**-20 * (1 + oracle.lse.abs()))[..., None]
    allowed = (oracles.BF16_HALF_ULP + 2 * lse_error) * size + 2 * oracle.out_error[..., None]
    live = oracle.lse > -math.inf
    assert bool(((merged - oracle.out).abs() <= allowed)[live].all())

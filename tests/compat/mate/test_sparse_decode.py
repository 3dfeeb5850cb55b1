"""sparse_mla_fp8_decode: pages, ids, lengths, heads, query tokens, buffers, metadata."""

from __future__ import annotations

import math

import pytest
import torch

from mlacast.compat import mate
from mlacast.compat.mate.metadata import DecodeMetadata
from tests import oracles
from tests.compat.mate.calls import BMM1, Call, draw_call, run


@pytest.mark.parametrize("page_size", [1, 53, 61, 64])
def test_any_page_size_and_both_cache_ranks(page_size: int) -> None:
    call = draw_call((64, 40), page_size=page_size, pages=130 // page_size)
    out, lse = run(call, return_lse=True)
    call.assert_right(out, lse)
    four_dims = run(call, kv_cache=call.kv_cache.unsqueeze(1))
    assert oracles.same_bits(four_dims, out)


@pytest.mark.parametrize("column", [False, True], ids=["B", "B1"])
def test_lengths_bound_the_leading_columns(column: bool) -> None:
    """0, 1, one in the middle, exactly K, more than K, and negative."""
    call = draw_call((0, 1, 37, 64, 65, 100_000, -5), q_len=2)
    seq_lens = call.seq_lens[:, None] if column else call.seq_lens
    out, lse = run(call, seq_lens=seq_lens, return_lse=True)
    call.assert_right(out, lse)
    assert not out[0].any() and not out[6].any()


def test_a_list_of_invalid_ids_is_an_empty_row() -> None:
    call = draw_call((64, 64))
    ids = call.block_tables.clone()
    ids[0] = torch.tensor([-1, call.kv_cache.shape[0] * 53, 2**31 - 1, -(2**31)]).repeat(16)
    out, lse = run(call, block_tables=ids, return_lse=True)
    assert not out[0].any()
    assert bool((lse[0] == math.inf).all())
    expected, _ = run(call, return_lse=True)
    assert oracles.same_bits(out[1], expected[1])


def test_repeated_ids_count_each_time() -> None:
    call = draw_call((2,), heads=1)
    ids = call.block_tables.clone()
    ids[0, 0, :2] = 5
    cache = torch.zeros(call.kv_cache.shape).to(torch.float8_e4m3fn)
    _, lse = run(call, block_tables=ids, kv_cache=cache, return_lse=True)
    # Logits and the sum are exact; the logarithm is off by an ulp of float32, 6e-8.
    assert float(lse) == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("heads", [1, 2, 7, 16, 33, 63, 64, 128, 192])
def test_head_counts(heads: int) -> None:
    call = draw_call((20, 0), heads=heads, page_size=8)
    call.assert_right(*run(call, return_lse=True))


@pytest.mark.parametrize("q_len", range(1, 9))
def test_query_tokens_of_a_request(q_len: int) -> None:
    call = draw_call((3, 9, 0), q_len=q_len, heads=2, page_size=8)
    call.assert_right(*run(call, return_lse=True))


@pytest.mark.parametrize("topk", [64, 128, 192])
def test_widths_of_the_list(topk: int) -> None:
    call = draw_call((topk, 5), topk=topk, heads=1)
    call.assert_right(*run(call, return_lse=True))


def test_no_request_and_no_page() -> None:
    empty = draw_call((), page_size=8)
    out, lse = run(empty, return_lse=True)
    assert out.shape == (0, 1, 3, 512) and lse.shape == (0, 3)
    call = draw_call((64,), page_size=8)
    out, lse = run(call, kv_cache=call.kv_cache[:0], return_lse=True)
    assert not out.any() and bool((lse == math.inf).all())


@pytest.mark.parametrize("shape", ["flat", "by_request"])
def test_buffers_are_written_and_returned(shape: str) -> None:
    call = draw_call((30, 0), q_len=2)
    out = torch.full((2, 2, 3, 512), 7.0, dtype=torch.bfloat16)
    size = (4, 3) if shape == "flat" else (2, 2, 3)
    lse = torch.full(size, 7.0)
    result = run(call, out=out, lse=lse, return_lse=True)
    assert result[0] is out and result[1] is lse
    call.assert_right(out, lse)


def test_lse_is_written_without_being_returned() -> None:
    call = draw_call((30, 0))
    lse = torch.full((2, 3), 7.0)
    out = run(call, lse=lse)
    assert isinstance(out, torch.Tensor)
    call.assert_right(out, lse)


def test_a_new_lse_is_flat() -> None:
    call = draw_call((30, 0), q_len=2)
    out, lse = run(call, return_lse=True)
    assert lse.shape == (4, 3) and lse.dtype == torch.float32
    assert out.shape == (2, 2, 3, 512) and out.dtype == torch.bfloat16
    assert isinstance(run(call), torch.Tensor)


def test_lse_contains_the_first_scale_and_not_the_second() -> None:
    call = draw_call((30,))
    _, lse = run(call, return_lse=True)
    _, same = run(call, bmm2_scale=-3.0, return_lse=True)
    _, other = run(call, bmm1_scale=2 * BMM1, return_lse=True)
    assert oracles.same_bits(lse, same)
    assert not torch.allclose(lse, other)


def test_integer_scales_are_numbers() -> None:
    call = draw_call((30,))
    assert oracles.same_bits(
        run(call, bmm1_scale=1, bmm2_scale=2), run(call, bmm1_scale=1.0, bmm2_scale=2.0)
    )


def _metadata(call: Call) -> DecodeMetadata:
    return mate.get_batch_decode_metadata_mla(call.query, call.seq_lens, call.block_tables.shape[2])


def test_repeats_and_metadata_do_not_change_a_bit() -> None:
    call = draw_call((128, 0, 70, 1), topk=128, q_len=2)
    first = run(call, return_lse=True)
    metadata = _metadata(call)
    for changes in ({}, {"metadata": metadata}, {"metadata": metadata}):
        again = run(call, return_lse=True, **changes)
        assert oracles.same_bits(first[0], again[0])
        assert oracles.same_bits(first[1], again[1])


def test_metadata_serve_other_tables_and_scales() -> None:
    call, other = draw_call((40, 3)), draw_call((40, 3))
    metadata = _metadata(call)
    out, lse = run(other, metadata=metadata, return_lse=True)
    other.assert_right(out, lse)


def test_hints_change_nothing() -> None:
    call = draw_call((40, 3))
    plain = run(call)
    hinted = run(
        call,
        workspace_buffer=torch.empty(8, dtype=torch.uint8),
        qk_nope_head_dim=192,
        max_seq_len=1,
        skip_softmax_threshold_scale_factor=0.0,
        enable_pdl=True,
        backend="trtllm-gen",
        is_var_seq=False,
        cute_dsl_impl="modular",
        kv_scale_format="pow2_fp32",
        multi_ctas_kv_counter_buffer=torch.zeros(8, dtype=torch.uint8),
    )
    assert oracles.same_bits(plain, hinted)


def test_lengths_beyond_the_list_stay_legal_under_validation(validate: None) -> None:
    call = draw_call((64, 3))
    ids = call.block_tables.clamp(-1, call.kv_cache.shape[0] * 53 - 1)
    run(call, block_tables=ids, seq_lens=torch.tensor([9000, 3], dtype=torch.int32))


def test_validation_finds_lengths_that_changed(validate: None) -> None:
    call = draw_call((40, 3))
    ids = call.block_tables.clamp(-1, call.kv_cache.shape[0] * 53 - 1)
    metadata = _metadata(call)
    run(call, block_tables=ids, metadata=metadata)
    call.seq_lens[1] = 4
    with pytest.raises(ValueError, match=r"metadata must be prepared .*\(4 at \[1\]\), got 3; pre"):
        run(call, block_tables=ids, metadata=metadata)

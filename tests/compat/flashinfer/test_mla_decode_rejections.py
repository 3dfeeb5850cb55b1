"""Wrong calls of trtllm_batch_decode_with_kv_cache_mla: type of error and sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests.compat.flashinfer.mla_calls import Call, dense_call, sparse_call

UNSUPPORTED = mlacast.UnsupportedError
INT32 = torch.int32


@dataclass(frozen=True)
class Wrong:
    """One mistake.

    Attributes:
        id: Readable name.
        mode: "sparse", "packed", "dense", "ragged" (dense) or "no_rope".
        changes: Arguments that are replaced by values, or by functions of the good value.
        message: Regular expression of the sentence after the function's name.
        error: Exception type.
    """

    id: str
    mode: str
    changes: dict[str, Any]
    message: str
    error: type[Exception] = field(default=ValueError)


def _good(mode: str) -> Call:
    if mode == "dense":
        return dense_call(q_lens=(2, 2), seq_lens=(9, 3))
    if mode == "ragged":
        return dense_call(q_lens=(1, 2), seq_lens=(9, 3), ragged=True)
    if mode == "no_rope":
        lengths = torch.tensor([1, 2, 3, 4], dtype=INT32)
        return sparse_call(d_qk=512, batch=2, lengths=lengths, seq_lens=(9, 3))
    return sparse_call("V32" if mode == "packed" else "BF16", batch=2, seq_lens=(9, 3))


def _strided(tensor: Tensor) -> Tensor:
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
    return wide[..., ::2]


def _starts(*values: int) -> dict[str, Any]:
    return {"cum_seq_lens_q": torch.tensor(values, dtype=INT32)}


def of(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Mark a function of the good value."""
    return change


FP8 = torch.float8_e4m3fn
OUT = torch.zeros(2, 2, 3, 512, dtype=torch.bfloat16)
DCP = {"enable_dcp": True, "cp_world": 2, "cp_rank": 1, "return_lse": True}
WRONG = (
    Wrong(
        "backend", "dense", {"backend": "fa3"}, "backend must be one of .*'fa3', which is not sup"
    ),
    Wrong(
        "query_list", "dense", {"query": [1]}, "query must be a torch.Tensor, got list", TypeError
    ),
    Wrong("cache_none", "dense", {"kv_cache": None}, "kv_cache must be a torch.Tensor", TypeError),
    Wrong(
        "table_none", "dense", {"block_tables": None}, "block_tables must be a torch.", TypeError
    ),
    Wrong(
        "cache_meta", "dense", {"kv_cache": of(lambda c: c.to("meta"))}, "kv_cache must be on cpu"
    ),
    Wrong(
        "table_meta",
        "dense",
        {"block_tables": of(lambda c: c.to("meta"))},
        "block_tables must be on",
    ),
    Wrong(
        "query_float", "dense", {"query": of(lambda q: q.float())}, "query must have dtype bfloat"
    ),
    Wrong(
        "query_three_dims",
        "dense",
        {"query": of(lambda q: q[0])},
        r"query must have shape \[B, Q, H, D\], got \[2, 3, 576\]; three dimensions go with cum",
    ),
    Wrong(
        "query_four_dims",
        "ragged",
        {"query": of(lambda q: q[None])},
        r"query must have shape \[total_q, H, D\], got",
    ),
    Wrong(
        "query_width",
        "dense",
        {"query": of(lambda q: q[..., :512])},
        "query must have shape .* with D=576, got .*512",
    ),
    Wrong(
        "query_strided", "dense", {"query": of(_strided)}, "query must have stride 1 on its last"
    ),
    Wrong(
        "heads_129",
        "dense",
        {"query": torch.zeros(2, 2, 129, 576, dtype=torch.bfloat16)},
        "query must have 1 to 128 heads, got 129",
    ),
    Wrong("topk_negative", "sparse", {"sparse_mla_top_k": -1}, "sparse_mla_top_k must not be neg"),
    Wrong(
        "topk_float",
        "sparse",
        {"sparse_mla_top_k": 8.0},
        "sparse_mla_top_k must be an i",
        TypeError,
    ),
    Wrong(
        "lora_256",
        "dense",
        {"kv_lora_rank": 256},
        r"\(kv_lora_rank, qk_rope_head_dim\) must be \(512, 64\) or \(512, 0\), got \(256, 64\)",
    ),
    Wrong("rope_32", "dense", {"qk_rope_head_dim": 32}, r"\(kv_lora_rank.* got \(512, 32\)"),
    Wrong(
        "no_rope_dense",
        "dense",
        {"qk_rope_head_dim": 0},
        "sparse_mla_top_k must be positive for qk_rope_head_dim=0",
    ),
    Wrong(
        "no_rope_without_lengths",
        "no_rope",
        {"sparse_mla_top_k_lens": None},
        "sparse_mla_top_k_lens must be given for qk_rope_head_dim=0",
    ),
    Wrong(
        "no_rope_with_lengths_per_request",
        "no_rope",
        {"sparse_mla_top_k_lens": torch.ones(2, dtype=INT32)},
        r"sparse_mla_top_k_lens must have shape \[T\] with T=4, got \[2\]",
    ),
    Wrong(
        "lengths_with_rope",
        "sparse",
        {"sparse_mla_top_k_lens": torch.ones(4, dtype=INT32)},
        "sparse_mla_top_k_lens must be None for qk_rope_head_dim=64",
    ),
    Wrong(
        "scale_float64",
        "dense",
        {"bmm1_scale": torch.ones(1).double()},
        "bmm1_scale must have dtype",
        TypeError,
    ),
    Wrong(
        "scale_bf16",
        "sparse",
        {"bmm2_scale": torch.ones(1).bfloat16()},
        "bmm2_scale must have dtype",
        TypeError,
    ),
    Wrong("scale_text", "dense", {"bmm2_scale": "1"}, "bmm2_scale must be a number or", TypeError),
    Wrong("scale_nan", "dense", {"bmm2_scale": float("nan")}, "bmm2_scale must be finite"),
    Wrong(
        "scale_of_two", "dense", {"bmm1_scale": torch.ones(2)}, "bmm1_scale must have one element"
    ),
    Wrong(
        "scale_tensor_packed", "packed", {"bmm1_scale": torch.ones(1)}, "bmm1_scale must be a num"
    ),
    Wrong(
        "scale2_tensor_packed", "packed", {"bmm2_scale": torch.ones(1)}, "bmm2_scale must be a n"
    ),
    Wrong(
        "scale_tensor_cute",
        "dense",
        {"backend": "cute-dsl", "bmm1_scale": torch.ones(1)},
        "bmm1_scale must be a number, got a torch.Tensor",
    ),
    Wrong("scale2_packed", "packed", {"bmm2_scale": 2.0}, "bmm2_scale must be 1 with the 656-byte"),
    Wrong(
        "skip_softmax_sparse",
        "sparse",
        {"skip_softmax_threshold_scale_factor": 0.5},
        "skip_softmax_threshold_scale_factor must be None with sparse_mla_top_k",
    ),
    Wrong(
        "skip_softmax_dense",
        "dense",
        {"skip_softmax_threshold_scale_factor": 0.5},
        "skip_softmax_threshold_scale_factor must be None or 0",
        UNSUPPORTED,
    ),
    Wrong(
        "two_tables",
        "dense",
        {"uses_shared_paged_kv_idx": False},
        "uses_shared_paged_kv_idx must be True",
        UNSUPPORTED,
    ),
    Wrong("kv_scale_format", "packed", {"kv_scale_format": "ue8m0"}, "kv_scale_format must be one"),
    Wrong(
        "counters_of_another_kernel",
        "dense",
        {"backend": "xqa", "multi_ctas_kv_counter_buffer": torch.zeros(8)},
        "multi_ctas_kv_counter_buffer must be None for backend 'xqa'",
    ),
    Wrong(
        "table_of_pages_in_sparse_mode",
        "sparse",
        {"block_tables": of(lambda t: t[:, 0])},
        r"block_tables must have shape \[B, Q, K\], got \[2, 20\]; with sparse_mla_top_k",
    ),
    Wrong(
        "table_of_another_width",
        "sparse",
        {"block_tables": of(lambda t: t[..., :16])},
        r"block_tables must have shape \[B, Q, K\] with B=2, Q=2, K=20, got \[2, 2, 16\]",
    ),
    Wrong(
        "table_of_tokens_in_dense_mode",
        "dense",
        {"block_tables": of(lambda t: t[:, None])},
        r"block_tables must have shape \[B, max_pages\], got .*; without sparse_mla_top_k",
    ),
    Wrong(
        "table_int64", "dense", {"block_tables": of(lambda t: t.long())}, "block_tables must have d"
    ),
    Wrong("no_lengths_dense", "dense", {"seq_lens": None}, "seq_lens must be given, got None"),
    Wrong("no_lengths_sparse", "sparse", {"seq_lens": None}, "seq_lens must be given, got None"),
    Wrong(
        "lengths_int64", "dense", {"seq_lens": of(lambda t: t.long())}, "seq_lens must have dtype"
    ),
    Wrong(
        "lengths_of_one", "dense", {"seq_lens": of(lambda t: t[:1])}, r"seq_lens must have shape"
    ),
    Wrong(
        "lengths_meta", "dense", {"seq_lens": of(lambda t: t.to("meta"))}, "seq_lens must be on cp"
    ),
    Wrong(
        "lengths_per_request_packed",
        "packed",
        {"seq_lens": torch.ones(2, dtype=INT32)},
        r"seq_lens must have shape \[2, 2\] or \[4\] with the 656-byte cache, got \[2\]",
    ),
    Wrong(
        "lengths_int64_packed",
        "packed",
        {"seq_lens": torch.ones(4).long()},
        "seq_lens must have dtype int32",
    ),
    Wrong("cache_2d", "dense", {"kv_cache": of(lambda c: c[0])}, "kv_cache must have shape"),
    Wrong(
        "cache_width",
        "dense",
        {"kv_cache": of(lambda c: c[..., :512])},
        r"kv_cache must .*576\], got",
    ),
    Wrong(
        "cache_two_heads",
        "dense",
        {"kv_cache": torch.zeros(3, 2, 4, 576).bfloat16()},
        "kv_cache must have shape .*got",
    ),
    Wrong(
        "mixed_dtypes",
        "dense",
        {"query": of(lambda q: q.to(FP8))},
        "backend must take these inputs, got 'auto' .*trtllm-gen needs query and kv_cache of one d",
    ),
    Wrong(
        "auto_lists_every_reason",
        "sparse",
        {"query": of(lambda q: q.to(FP8))},
        "backend must.*trtllm-gen needs.*; sparse needs a bfloat16 query.*xqa has no.*cute-dsl has",
    ),
    Wrong(
        "packed_of_another_width",
        "sparse",
        {"backend": "sparse"},
        "backend must take these inputs, got 'sparse' .*needs a uint8 kv_cache with last dimension",
    ),
    Wrong(
        "dense_with_the_sparse_kernel",
        "dense",
        {"backend": "sparse"},
        "backend must take these inputs, got 'sparse' .*needs sparse_mla_top_k > 0",
    ),
    Wrong("xqa_sparse", "sparse", {"backend": "xqa"}, "backend must .*'xqa' .*has no sparse mode"),
    Wrong("cute_sparse", "sparse", {"backend": "cute-dsl"}, "backend must .*has no sparse mode"),
    Wrong("xqa_two_tokens", "dense", {"backend": "xqa"}, "query must have one token per request"),
    Wrong(
        "xqa_sinks",
        "dense",
        {
            "backend": "xqa",
            "query": of(lambda q: q[:, :1]),
            "sinks": torch.zeros(3),
            "out": None,
            "lse": None,
        },
        "sinks must be None for 'xqa'",
    ),
    Wrong(
        "xqa_mixed_dtypes",
        "dense",
        {"backend": "xqa", "query": of(lambda q: q.to(FP8))},
        "backend must .*'xqa' .*needs query and kv_cache of one dtype",
    ),
    Wrong(
        "xqa_lse",
        "dense",
        {
            "backend": "xqa",
            "query": of(lambda q: q[:, :1]),
            "return_lse": True,
            "out": None,
            "lse": None,
        },
        "return_lse must be False for 'xqa'",
        UNSUPPORTED,
    ),
    Wrong(
        "ragged_lse_of_trtllm_gen",
        "ragged",
        {"backend": "trtllm-gen", "return_lse": True, "out": None, "lse": None},
        "return_lse must be False for a ragged query of 'trtllm-gen'",
        UNSUPPORTED,
    ),
    Wrong(
        "sinks_listed_twice", "dense", {"sinks": [OUT, OUT]}, "sinks must be a tensor or a list of"
    ),
    Wrong("sinks_of_two_heads", "dense", {"sinks": torch.zeros(2)}, r"sinks must have shape \[H\]"),
    Wrong(
        "sinks_bf16", "dense", {"sinks": torch.zeros(3).bfloat16()}, "sinks must have dtype float32"
    ),
    Wrong("sinks_number", "dense", {"sinks": 0.0}, "sinks must be a torch.Tensor", TypeError),
    Wrong(
        "longest_alone", "dense", {"max_q_len": 2}, "max_q_len must be None without cum_seq_lens_q"
    ),
    Wrong("longest_zero", "ragged", {"max_q_len": 0}, "max_q_len must be at least 1, got 0"),
    Wrong(
        "longest_float", "ragged", {"max_q_len": 1.0}, "max_q_len must be an int or None", TypeError
    ),
    Wrong("starts_at_1", "ragged", _starts(1, 1, 3), "cum_seq_lens_q must start with 0, got 1"),
    Wrong(
        "starts_end", "ragged", _starts(0, 1, 2), "cum_seq_lens_q must end with the 3 query tokens"
    ),
    Wrong("starts_order", "ragged", _starts(0, 4, 3), "cum_seq_lens_q must not decrease"),
    Wrong(
        "starts_size", "ragged", _starts(0, 1, 2, 3), "cum_seq_lens_q must have 3 elements for 2 r"
    ),
    Wrong(
        "starts_int64",
        "ragged",
        {"cum_seq_lens_q": torch.tensor([0, 1, 3])},
        "cum_seq_lens_q must have dtype int32",
    ),
    Wrong("out_list", "dense", {"out": [1]}, "out must be a torch.Tensor or None", TypeError),
    Wrong("out_shape", "dense", {"out": OUT[:1]}, r"out must have shape \[2, 2, 3, 512\], got"),
    Wrong("out_dtype", "dense", {"out": OUT.half()}, "out must have dtype bfloat16, got float16"),
    Wrong("out_strided", "dense", {"out": _strided(OUT)}, "out must be contiguous"),
    Wrong("out_meta", "dense", {"out": OUT.to("meta")}, "out must be on cpu like query, got meta"),
    Wrong(
        "lse_shape",
        "dense",
        {"lse": torch.zeros(3, 4)},
        r"lse must have shape \[4, 3\] or \[2, 2, 3\], got \[3, 4\]",
    ),
    Wrong("lse_dtype", "dense", {"lse": torch.zeros(4, 3).double()}, "lse must have dtype float32"),
    Wrong("lse_strided", "dense", {"lse": torch.zeros(4, 6)[:, ::2]}, "lse must be contiguous"),
    Wrong("return_lse", "dense", {"return_lse": 1}, "return_lse must be a bool", TypeError),
    Wrong("dcp_is_text", "dense", {"enable_dcp": "no"}, "enable_dcp must be a bool", TypeError),
    Wrong("rank_is_text", "dense", {"cp_rank": "0"}, "cp_rank must be an int", TypeError),
    Wrong("world_is_text", "dense", {"cp_world": "1"}, "cp_world must be an int", TypeError),
    Wrong("no_world", "dense", {**DCP, "cp_world": 0}, "cp_world must be at least 1, got 0"),
    Wrong("rank_2_of_2", "dense", {**DCP, "cp_rank": 2}, r"cp_rank must be in \[0, 2\), got 2"),
    Wrong("rank_negative", "dense", {**DCP, "cp_rank": -1}, r"cp_rank must be in \[0, 2\), got -1"),
    Wrong(
        "dcp_without_lse", "dense", {**DCP, "return_lse": False}, "return_lse must be True with e"
    ),
    Wrong(
        "dcp_sinks", "dense", {**DCP, "sinks": torch.zeros(3)}, "sinks must be None with enable_d"
    ),
    Wrong("dcp_ragged", "ragged", DCP, "cum_seq_lens_q must be None with enable_dcp"),
    Wrong("dcp", "dense", DCP, "enable_dcp must be False", UNSUPPORTED),
    Wrong("world_without_dcp", "dense", {"cp_world": 2}, "cp_world must be 1 without enable_dcp"),
    Wrong(
        "lengths_without_dcp",
        "dense",
        {"causal_seqlens_kv_global": torch.ones(2)},
        "causal_seqlens_kv_global must be None without enable_dcp",
    ),
)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.id)
def test_wrong_calls_write_nothing(wrong: Wrong) -> None:
    call = _good(wrong.mode)
    lead = call.arguments["query"].shape[:-2]
    out = torch.full((*lead, 3, 512), 7.0, dtype=torch.bfloat16)
    lse = torch.full((lead.numel(), 3), 7.0)
    changes: dict[str, Any] = {"out": out, "lse": lse}
    for name, value in wrong.changes.items():
        changes[name] = value(call.arguments[name]) if callable(value) else value
    name = "trtllm_batch_decode_with_kv_cache_mla"
    with pytest.raises(wrong.error, match=f"{name}: {wrong.message}"):
        call.run(**changes)
    assert bool((out == 7.0).all()) and bool((lse == 7.0).all())


@pytest.mark.parametrize("mode", ["sparse", "packed", "dense", "ragged", "no_rope"])
def test_the_calls_that_the_mistakes_are_put_into_are_accepted(mode: str) -> None:
    _good(mode).run(return_lse=True)


def test_with_the_longest_request_given_the_starts_are_not_read() -> None:
    """No sync: an end that is wrong goes unnoticed, and stays inside of memory."""
    _good("ragged").run(max_q_len=9, **_starts(0, 1, 50))

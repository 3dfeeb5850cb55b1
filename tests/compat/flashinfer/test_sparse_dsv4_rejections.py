"""Wrong calls of trtllm_batch_decode_sparse_mla_dsv4: type of error and sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests.compat.flashinfer.dsv4_calls import Call, joint_call, separate_call

UNSUPPORTED = mlacast.UnsupportedError
FP8, INT32 = torch.float8_e4m3fn, torch.int32


@dataclass(frozen=True)
class Wrong:
    """One mistake.

    Attributes:
        id: Readable name.
        mode: "joint" (pools of the query's dtype), "separate" (584 bytes), "ragged" or "fp8_out".
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
    call = separate_call() if mode == "separate" else joint_call()
    if mode == "ragged":
        starts = torch.tensor([0, 1, 4], dtype=INT32)
        call.arguments.update(
            query=call.arguments["query"].flatten(0, 1), cum_seq_lens_q=starts, max_q_len=3
        )
    if mode == "fp8_out":
        call.arguments.update(
            out_scales=torch.zeros(1, 8, 4, dtype=INT32), cos_sin_cache=torch.ones(9, 64)
        )
    return call


def _strided(tensor: Tensor) -> Tensor:
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
    return wide[..., ::2]


ONE, LENS = torch.ones(1), torch.ones(4, dtype=INT32)
WRONG = (
    Wrong("backend", "joint", {"backend": "xqa"}, "backend must be one of .*'xqa', which is not"),
    Wrong(
        "backend_sparse", "joint", {"backend": "sparse"}, "backend must take .*needs uint8 pools"
    ),
    Wrong(
        "backend_gen",
        "separate",
        {"backend": "trtllm-gen"},
        "backend must take .*the query's dtype",
    ),
    Wrong("hca_kernel", "joint", {"backend": "cute-dsl"}, "backend must .*HCA is not", UNSUPPORTED),
    Wrong("hca_ids", "joint", {"hca_swa_indices": LENS}, "hca_swa_indices must .*HCA", UNSUPPORTED),
    Wrong("hca_lens", "joint", {"hca_seq_lens": LENS}, "hca_seq_lens must .*HCA", UNSUPPORTED),
    Wrong(
        "hca_pages",
        "joint",
        {"hca_compressed_block_tables": LENS},
        "hca_compressed_block_tables must .*HCA is not built",
        UNSUPPORTED,
    ),
    Wrong("hca_not_causal", "joint", {"hca_is_causal": False}, "hca_is_causal must", UNSUPPORTED),
    Wrong(
        "hca_format",
        "joint",
        {"hca_sparse_indices_format": "pages"},
        "hca_sparse_indices_format must .*HCA",
        UNSUPPORTED,
    ),
    Wrong(
        "hca_of_another_kernel",
        "joint",
        {"backend": "trtllm-gen", "hca_seq_lens": LENS},
        "hca_seq_lens must be left out for 'trtllm-gen'",
    ),
    Wrong(
        "query_list", "joint", {"query": [1]}, "query must be a torch.Tensor, got list", TypeError
    ),
    Wrong(
        "query_3d", "joint", {"query": lambda q: q[0]}, r"query must have shape \[B, Q, H, 512\]"
    ),
    Wrong(
        "query_4d", "ragged", {"query": lambda q: q[None]}, r"query must have shape \[T, H, 512\]"
    ),
    Wrong("query_448", "joint", {"query": lambda q: q[..., :448]}, "query must have shape .*448"),
    Wrong(
        "query_float", "joint", {"query": lambda q: q.float()}, "query must have dtype bfloat16 or"
    ),
    Wrong("query_strided", "joint", {"query": _strided}, "query must have stride 1"),
    Wrong("heads_7", "joint", {"query": lambda q: q[:, :, :7]}, "query must have 8, 16, .*got 7"),
    Wrong(
        "query_other", "joint", {"query": lambda q: q.bfloat16()}, "swa_kv_cache must have the q"
    ),
    Wrong(
        "query_codes", "separate", {"query": lambda q: q.to(FP8)}, "query must have dtype bfloat16"
    ),
    Wrong(
        "pool_none", "joint", {"swa_kv_cache": None}, "swa_kv_cache must be a torch.T", TypeError
    ),
    Wrong(
        "pool_meta",
        "joint",
        {"swa_kv_cache": lambda c: c.to("meta")},
        "swa_kv_cache must be on cpu",
    ),
    Wrong(
        "layout", "joint", {"kv_layout": "HDN"}, "kv_layout must be one of 'HND', 'NHD', got 'HDN'"
    ),
    Wrong(
        "pool_nhd", "joint", {"kv_layout": "NHD"}, r"swa_kv_cache must .*page_size, 1, 512\], got"
    ),
    Wrong(
        "pool_3d_nhd",
        "joint",
        {"kv_layout": "NHD", "swa_kv_cache": lambda c: c.squeeze(1)},
        r"swa_kv_cache must have shape \[pages, page_size, 1, 512\], got",
    ),
    Wrong(
        "pool_width", "joint", {"swa_kv_cache": lambda c: c[..., :448]}, "swa_kv_cache must .*448"
    ),
    Wrong(
        "pool_656",
        "separate",
        {"swa_kv_cache": torch.zeros(2, 1, 8, 656, dtype=torch.uint8)},
        r"swa_kv_cache must have shape .*584\], got .*656",
    ),
    Wrong(
        "tokens_apart",
        "joint",
        {"swa_kv_cache": lambda c: c.repeat(1, 1, 2, 1)[:, :, ::2]},
        "swa_kv_cache must have the tokens of a page packed",
    ),
    Wrong(
        "no_compressed", "joint", {"compressed_kv_cache": None}, "compressed_kv_cache must be given"
    ),
    Wrong(
        "no_compressed_for_extra",
        "separate",
        {"compressed_kv_cache": None},
        "compressed_kv_cache must be given with extra_sparse_indices",
    ),
    Wrong(
        "compressed_of_another_dtype",
        "joint",
        {"compressed_kv_cache": lambda c: c.bfloat16()},
        "compressed_kv_cache must have dtype float8_e4m3fn, got bfloat16",
    ),
    Wrong("no_ids", "joint", {"sparse_indices": None}, "sparse_indices must be given, got None"),
    Wrong(
        "ids_int64",
        "joint",
        {"sparse_indices": lambda t: t.long()},
        "sparse_indices must have dtyp",
    ),
    Wrong(
        "ids_3d",
        "joint",
        {"sparse_indices": lambda t: t[None]},
        r"sparse_indices must have shape \[T",
    ),
    Wrong(
        "ids_meta",
        "joint",
        {"sparse_indices": lambda t: t.to("meta")},
        "sparse_indices must be on cpu",
    ),
    Wrong(
        "ids_of_fewer_tokens",
        "joint",
        {"sparse_indices": lambda t: t[:2]},
        r"sparse_indices must have shape \[T, W\] with T=4, got \[2, 160\]",
    ),
    Wrong(
        "ids_127",
        "joint",
        {"sparse_indices": lambda t: t[:, :127]},
        "sparse_indices must have at least 128 columns, a multiple of 4, got 127",
    ),
    Wrong(
        "ids_130",
        "joint",
        {"sparse_indices": lambda t: t[:, :130]},
        "sparse_indices must have at least 128 columns, a multiple of 4, got 130",
    ),
    Wrong(
        "no_lens", "joint", {"sparse_topk_lens": None}, "sparse_topk_lens must be given, got None"
    ),
    Wrong(
        "lens_long", "joint", {"sparse_topk_lens": LENS.long()}, "sparse_topk_lens must have dtype"
    ),
    Wrong("no_seq_lens", "joint", {"seq_lens": None}, "seq_lens must be given, got None"),
    Wrong(
        "seq_lens_3", "joint", {"seq_lens": LENS[:3]}, r"seq_lens must have shape \[B\] with B=2"
    ),
    Wrong("no_seq_lens_fp8", "fp8_out", {"seq_lens": None}, "seq_lens must be given, got None"),
    Wrong(
        "swa_lens", "joint", {"swa_topk_lens": LENS}, "swa_topk_lens must be None for 'trtllm-gen'"
    ),
    Wrong(
        "extra_ids",
        "joint",
        {"extra_sparse_indices": LENS[:, None]},
        "extra_sparse_indices must be None for 'trtllm-gen'",
    ),
    Wrong(
        "extra_lens",
        "joint",
        {"extra_sparse_topk_lens": LENS},
        "extra_sparse_topk_lens must be None for 'trtllm-gen'",
    ),
    Wrong(
        "joint_lens_of_584",
        "separate",
        {"sparse_topk_lens": LENS},
        "sparse_topk_lens must be None for",
    ),
    Wrong(
        "no_swa_lens", "separate", {"swa_topk_lens": None}, "swa_topk_lens must be given, got None"
    ),
    Wrong(
        "extra_without_lens",
        "separate",
        {"extra_sparse_topk_lens": None},
        "extra_sparse_topk_lens must be given, or neither",
    ),
    Wrong(
        "extra_without_ids",
        "separate",
        {"extra_sparse_indices": None},
        "extra_sparse_indices must be given, or neither",
    ),
    Wrong(
        "scale_double", "joint", {"bmm1_scale": ONE.double()}, "bmm1_scale must have d", TypeError
    ),
    Wrong("scale_text", "joint", {"bmm2_scale": "1"}, "bmm2_scale must be a number or", TypeError),
    Wrong("scale_infinite", "joint", {"bmm1_scale": float("inf")}, "bmm1_scale must be finite"),
    Wrong(
        "scale_tensor", "separate", {"bmm1_scale": ONE}, "bmm1_scale must be a number, got a torch"
    ),
    Wrong(
        "scale2_tensor", "separate", {"bmm2_scale": ONE}, "bmm2_scale must be a number, got a torch"
    ),
    Wrong("scale2", "separate", {"bmm2_scale": 0.5}, "bmm2_scale must be 1 with 584-byte pools"),
    Wrong("sinks_two", "joint", {"sinks": [ONE, ONE]}, "sinks must be a tensor or a list of one"),
    Wrong(
        "sinks_heads", "joint", {"sinks": ONE}, r"sinks must have shape \[H\] with H=8, got \[1\]"
    ),
    Wrong(
        "longest_alone", "joint", {"max_q_len": 2}, "max_q_len must be None without cum_seq_lens_q"
    ),
    Wrong(
        "no_longest", "ragged", {"max_q_len": None}, "max_q_len must be given with cum_seq_lens_q"
    ),
    Wrong(
        "starts_size",
        "ragged",
        {"cum_seq_lens_q": torch.tensor([0, 4], dtype=INT32)},
        "cum_seq_lens_q must have 3 elements for 2 requests, got 2",
    ),
    Wrong(
        "table_alone", "joint", {"cos_sin_cache": torch.ones(9, 64)}, "cos_sin_cache must be None w"
    ),
    Wrong(
        "no_table",
        "fp8_out",
        {"cos_sin_cache": None},
        "cos_sin_cache must be given with out_scales",
    ),
    Wrong(
        "table_bf16",
        "fp8_out",
        {"cos_sin_cache": torch.ones(9, 64).bfloat16()},
        "cos_sin_cache must have dtype float32, got bfloat16",
    ),
    Wrong(
        "table_32", "fp8_out", {"cos_sin_cache": torch.ones(9, 32)}, "cos_sin_cache must have shape"
    ),
    Wrong(
        "scales_short",
        "fp8_out",
        {"out_scales": torch.zeros(1, 8, 8, dtype=INT32)},
        r"out_scales must have shape \[1, 8, 4\], got \[1, 8, 8\]",
    ),
    Wrong(
        "scales_float",
        "fp8_out",
        {"out_scales": torch.zeros(1, 8, 4)},
        "out_scales must have dtype",
    ),
    Wrong(
        "out_bf16",
        "fp8_out",
        {"out": torch.zeros(1, 4, 8, 512).bfloat16()},
        "out must have dtype float8_e4m3fn, got bfloat16",
    ),
    Wrong(
        "out_token_major",
        "fp8_out",
        {"out": torch.zeros(4, 1, 8, 512).to(FP8)},
        r"out must have shape \[1, 4, 8, 512\], got \[4, 1, 8, 512\]",
    ),
    Wrong(
        "out_codes", "joint", {"out": torch.zeros(2, 2, 8, 512).to(FP8)}, "out must have dtype bf"
    ),
    Wrong("out_shape", "joint", {"out": torch.zeros(4, 8, 512).bfloat16()}, "out must have shape"),
    Wrong(
        "out_strided",
        "joint",
        {"out": _strided(torch.zeros(2, 2, 8, 512).bfloat16())},
        "out must be contiguous",
    ),
)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.id)
def test_wrong_calls_write_nothing(wrong: Wrong) -> None:
    call = _good(wrong.mode)
    if wrong.mode == "fp8_out":
        out = torch.full((1, 4, 8, 512), 7.0).to(FP8)
    else:
        out = torch.full(call.arguments["query"].shape, 7.0, dtype=torch.bfloat16)
    changes: dict[str, Any] = {"out": out}
    for name, value in wrong.changes.items():
        changes[name] = value(call.arguments[name]) if callable(value) else value
    name = "trtllm_batch_decode_sparse_mla_dsv4"
    with pytest.raises(wrong.error, match=f"{name}: {wrong.message}"):
        call.run(**changes)
    assert bool((out.float() == 7.0).all())


@pytest.mark.parametrize("mode", ["joint", "separate", "ragged", "fp8_out"])
def test_the_calls_that_the_mistakes_are_put_into_are_accepted(mode: str) -> None:
    _good(mode).run()

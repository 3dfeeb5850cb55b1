"""Every argument error of the attention ops: the sentence names argument, requirement and value,
and nothing is written.
"""

from __future__ import annotations

import pytest
import torch

import mlacast
from tests.format_cases import MXFP8_HEAD, NVFP4, poisoned_buffer
from tests.ops.rejections import (
    Arguments,
    Rejection,
    assert_rejected,
    good_decode,
    good_dense,
    good_prefill,
    last_dim_strided,
    meta,
    of,
    poisoned,
    rejection_id,
    wrong_arguments,
)

QUERY = (
    Rejection("q_is_a_list", {"q": [1.0]}, "q", "must be a torch.Tensor", "list", TypeError),
    Rejection("q_is_none", {"q": None}, "q", "must be a torch.Tensor", "NoneType", TypeError),
    Rejection("q_is_float64", {"q": of(lambda q: q.double())}, "q", "bfloat16", "float64"),
    Rejection("q_is_int32", {"q": of(lambda q: q.int())}, "q", "bfloat16", "int32"),
    Rejection("q_has_two_dims", {"q": of(lambda q: q[0])}, "q", r"shape \[s_q, h", r"\[2, 512\]"),
    Rejection("q_is_elsewhere", {"q": of(meta)}, "", "must be on"),
    Rejection(
        "sm_scale_is_none", {"sm_scale": None}, "sm_scale", "must be a", "NoneType", TypeError
    ),
    Rejection("sm_scale_past_float32", {"sm_scale": -1e39}, "sm_scale", "finite in float32", "-1e"),
    Rejection("sm_scale_past_float64", {"sm_scale": 10**400}, "sm_scale", "finite in float32"),
    Rejection("eps_past_float32", {"q_norm_eps": 10**400}, "q_norm_eps", "finite in float32"),
    Rejection("sm_scale_is_true", {"sm_scale": True}, "sm_scale", "must be a", "bool", TypeError),
    Rejection("sink_of_three_heads", {"attn_sink": torch.zeros(3)}, "attn_sink", "h.*=2", r"\[3\]"),
    Rejection(
        "sink_in_bf16", {"attn_sink": torch.zeros(2).bfloat16()}, "attn_sink", "float32", "bfloat16"
    ),
    Rejection(
        "sink_is_a_float", {"attn_sink": 0.0}, "attn_sink", "torch.Tensor", "float", TypeError
    ),
    Rejection(
        "sink_elsewhere",
        {"attn_sink": torch.zeros(2, device="meta")},
        "attn_sink",
        "on cpu",
        "meta",
    ),
)
INDEX = (
    Rejection(
        "indices_of_other_rows", {"indices": of(lambda i: i[:2])}, "indices", "s_q=3", r"\[2, 4\]"
    ),
    Rejection(
        "indices_in_int16", {"indices": of(lambda i: i.short())}, "indices", "int32", "int16"
    ),
    Rejection(
        "indices_in_float", {"indices": of(lambda i: i.float())}, "indices", "int32", "float32"
    ),
    Rejection("indices_in_one_dim", {"indices": of(lambda i: i[0])}, "indices", "shape", r"\[4\]"),
    Rejection("indices_elsewhere", {"indices": of(meta)}, "indices", "on cpu", "meta"),
    Rejection(
        "lengths_too_few", {"topk_length": of(lambda t: t[:2])}, "topk_length", "s_q=3", r"\[2\]"
    ),
    Rejection(
        "lengths_in_float",
        {"topk_length": of(lambda t: t.float())},
        "topk_length",
        "int32",
        "float32",
    ),
    Rejection("lengths_elsewhere", {"topk_length": of(meta)}, "topk_length", "on cpu", "meta"),
    Rejection(
        "lengths_in_a_list",
        {"topk_length": [4, 2, 0]},
        "topk_length",
        "torch.Tensor",
        "list",
        TypeError,
    ),
)
PROLOGUE = (
    Rejection("unknown_q_order", {"q_order": "tail"}, "q_order", "'head'.*'chunk16'", "'tail'"),
    Rejection(
        "rope_is_a_tensor", {"rope": torch.zeros(5, 64)}, "rope", "Rope", "Tensor", TypeError
    ),
    Rejection(
        "eps_is_a_string", {"q_norm_eps": "1e-6"}, "q_norm_eps", "must be a", "str", TypeError
    ),
    Rejection(
        "rope_positions_of_other_rows",
        {"rope": mlacast.Rope(torch.zeros(5, 64), torch.zeros(4, dtype=torch.int32))},
        "rope.positions",
        "s_q=3",
        r"\[4\]",
    ),
    Rejection(
        "rope_elsewhere",
        {
            "rope": mlacast.Rope(
                torch.zeros(5, 64, device="meta"), torch.zeros(3, dtype=torch.int32, device="meta")
            )
        },
        "rope",
        "on cpu",
        "meta",
    ),
)
OUTPUT = (
    Rejection("out_of_fewer_rows", {"out": poisoned(2, 2, 512)}, "out", "shape", r"\[2, 2, 512\]"),
    Rejection("out_of_more_rows", {"out": poisoned(4, 2, 512)}, "out", "shape", r"\[4, 2, 512\]"),
    Rejection(
        "out_of_another_width", {"out": poisoned(3, 2, 448)}, "out", "shape", r"\[3, 2, 448\]"
    ),
    Rejection(
        "out_in_fp16",
        {"out": poisoned(3, 2, 512, dtype=torch.float16)},
        "out",
        "bfloat16",
        "float16",
    ),
    Rejection(
        "out_strided", {"out": last_dim_strided(poisoned(3, 2, 512))}, "out", "stride", "stride"
    ),
    Rejection(
        "out_elsewhere",
        {"out": torch.empty(3, 2, 512, dtype=torch.bfloat16, device="meta")},
        "out",
        "on cpu",
        "meta",
    ),
    Rejection("out_is_a_list", {"out": [poisoned(3, 2, 512)]}, "out", "must be", "list", TypeError),
    Rejection(
        "buffer_of_fewer_rows", {"out": poisoned_buffer(MXFP8_HEAD, 2, 1, 1024)}, "out", "3", "2"
    ),
    Rejection(
        "buffer_of_fewer_features",
        {"out": poisoned_buffer(NVFP4, 3, 1, 512)},
        "out",
        "1024|h_q|heads",
        "512",
    ),
    Rejection(
        "plain_tensor_for_a_quantised_format",
        {"out": poisoned(3, 2, 512), "out_format": mlacast.Mxfp8()},
        "out",
        "QuantizedTensor",
        error=(TypeError, ValueError),  # type: ignore[arg-type]
    ),
    Rejection(
        "buffer_of_another_format",
        {"out": poisoned_buffer(MXFP8_HEAD, 3, 1, 1024), "out_format": mlacast.Nvfp4(1.0)},
        "out_format",
        "Mxfp8",
        "Nvfp4",
    ),
    Rejection(
        "out_format_is_a_name",
        {"out": None, "out_format": "mxfp8"},
        "out_format",
        "OutFormat",
        "str",
        TypeError,
    ),
    Rejection(
        "groups_do_not_divide_the_heads",
        {"out": None, "out_format": mlacast.Mxfp8(), "num_groups": 3},
        "num_groups",
        "divide",
        "3",
    ),
    Rejection(
        "no_groups",
        {"out": None, "out_format": mlacast.Mxfp8(), "num_groups": 0},
        "num_groups",
        "",
        "0",
    ),
    Rejection(
        "unknown_backend",
        {"backend": "cuda"},
        "backend",
        "'reference'.*'triton'.*'hopper'",
        "'cuda'",
    ),
)
PREFILL = (
    *QUERY,
    Rejection(
        "sm_scale_is_a_tensor",
        {"sm_scale": torch.ones(1)},
        "sm_scale",
        "must be a",
        "Tensor",
        TypeError,
    ),
    *INDEX,
    *PROLOGUE,
    *OUTPUT,
    Rejection("q_of_width_500", {"q": of(lambda q: q[..., :500])}, "q", "512", "500"),
    Rejection(
        "kv_of_another_width", {"kv": torch.zeros(6, 576).bfloat16()}, "kv", "512", r"\[6, 576\]"
    ),
    Rejection("kv_in_float32", {"kv": of(lambda kv: kv.float())}, "kv", "bfloat16", "float32"),
    Rejection(
        "kv_of_two_kv_heads",
        {"kv": torch.zeros(6, 2, 512).bfloat16()},
        "kv",
        "1, ",
        r"\[6, 2, 512\]",
    ),
    Rejection("kv_elsewhere", {"kv": of(meta)}, "kv", "on cpu", "meta"),
    Rejection(
        "indices_of_two_kv_heads",
        {"indices": torch.zeros(3, 2, 4, dtype=torch.int32)},
        "indices",
        "shape",
        r"\[3, 2, 4\]",
    ),
)
DECODE = (
    *QUERY,
    *INDEX,
    *PROLOGUE[:2],
    *OUTPUT,
    Rejection(
        "kv_format_is_a_name", {"kv_format": "V4"}, "kv_format", "KvFormat", "str", TypeError
    ),
    Rejection(
        "cache_in_float32", {"k_cache": torch.zeros(2, 4, 1, 584)}, "k_cache", "uint8", "float32"
    ),
    Rejection(
        "cache_of_528_bytes",
        {"k_cache": torch.zeros(2, 4, 1, 528, dtype=torch.uint8)},
        "k_cache",
        "584.*V4",
        "528",
    ),
    Rejection("cache_elsewhere", {"k_cache": of(meta)}, "k_cache", "on cpu", "meta"),
    Rejection("cache_is_none", {"k_cache": None}, "k_cache", "torch.Tensor", "NoneType", TypeError),
    Rejection(
        "q_of_576_on_v4",
        {"q": torch.zeros(3, 2, 576).bfloat16(), "rope": None},
        "",
        "(q|k_cache) must .*576",
        "512",
    ),
    Rejection(
        "extra_cache_alone",
        {},
        "extra_indices",
        "",
        drop=("extra_indices", "extra_topk_length", "extra_kv_format"),
    ),
    Rejection(
        "extra_indices_alone",
        {},
        "extra_k_cache",
        "",
        drop=("extra_k_cache", "extra_topk_length", "extra_kv_format"),
    ),
    Rejection(
        "extra_format_left_out", {"extra_kv_format": None}, "extra_kv_format", "given", "None"
    ),
    Rejection(
        "extra_length_alone",
        {},
        "",
        "extra_k_cache",
        drop=("extra_k_cache", "extra_indices", "extra_kv_format"),
    ),
    Rejection(
        "extra_format_alone",
        {},
        "",
        "extra_k_cache",
        drop=("extra_k_cache", "extra_indices", "extra_topk_length"),
    ),
    Rejection(
        "extra_indices_of_other_rows",
        {"extra_indices": of(lambda i: i[:1])},
        "extra_indices",
        "s_q=3",
        r"\[1, 5\]",
    ),
    Rejection(
        "extra_lengths_of_other_rows",
        {"extra_topk_length": of(lambda t: t[:1])},
        "extra_topk_length",
        "s_q=3",
        r"\[1\]",
    ),
    Rejection(
        "extra_cache_elsewhere", {"extra_k_cache": of(meta)}, "extra_k_cache", "on cpu", "meta"
    ),
    Rejection(
        "extra_cache_of_other_bytes",
        {"extra_kv_format": mlacast.KvFormat.V41},
        "extra_k_cache",
        "528.*V41",
        "584",
    ),
    Rejection("no_splits", {"num_splits": 0}, "num_splits", "", "0"),
    Rejection("splits_as_float", {"num_splits": 2.0}, "num_splits", "int", "float", TypeError),
    Rejection(
        "schedule_is_an_int", {"schedule": 4}, "schedule", "SparseDecodeSchedule", "int", TypeError
    ),
)
DENSE = (
    Rejection("q_in_three_dims", {"q": of(lambda q: q[0])}, "q", "shape", r"\[1, 2, 576\]"),
    Rejection("q_in_float32", {"q": of(lambda q: q.float())}, "q", "bfloat16", "float32"),
    Rejection(
        "cache_in_float32", {"k_cache": of(lambda c: c.float())}, "k_cache", "bfloat16", "float32"
    ),
    Rejection(
        "cache_of_another_width",
        {"k_cache": of(lambda c: c[..., :512].contiguous())},
        "",
        "576|512",
        "512|576",
    ),
    Rejection("cache_elsewhere", {"k_cache": of(meta)}, "k_cache", "on cpu", "meta"),
    Rejection(
        "table_of_one_request", {"page_table": of(lambda t: t[:1])}, "page_table", "=2", r"\[1, 2\]"
    ),
    Rejection(
        "table_in_float", {"page_table": of(lambda t: t.float())}, "page_table", "int32", "float32"
    ),
    Rejection("lens_of_one_request", {"seq_lens": of(lambda t: t[:1])}, "seq_lens", "=2", r"\[1\]"),
    Rejection(
        "lens_missing", {"seq_lens": None}, "seq_lens", "torch.Tensor", "NoneType", TypeError
    ),
    Rejection("lens_elsewhere", {"seq_lens": of(meta)}, "seq_lens", "on cpu", "meta"),
    Rejection("sink_of_three_heads", {"attn_sink": torch.zeros(3)}, "attn_sink", "=2", r"\[3\]"),
    Rejection(
        "out_of_fewer_rows", {"out": poisoned(1, 1, 2, 512)}, "out", "shape", r"\[1, 1, 2, 512\]"
    ),
    Rejection(
        "out_in_fp16",
        {"out": poisoned(2, 1, 2, 512, dtype=torch.float16)},
        "out",
        "bfloat16",
        "float16",
    ),
    Rejection(
        "unknown_backend",
        {"backend": "cuda"},
        "backend",
        "'reference'.*'triton'.*'hopper'",
        "'cuda'",
    ),
)


@pytest.mark.parametrize("rejection", PREFILL, ids=rejection_id)
def test_prefill(rejection: Rejection) -> None:
    assert_rejected("sparse_mla_prefill", wrong_arguments(good_prefill(), rejection), rejection)


@pytest.mark.parametrize("rejection", DECODE, ids=rejection_id)
def test_decode(rejection: Rejection) -> None:
    assert_rejected("sparse_mla_decode", wrong_arguments(good_decode(), rejection), rejection)


@pytest.mark.parametrize("rejection", DENSE, ids=rejection_id)
def test_dense(rejection: Rejection) -> None:
    assert_rejected("dense_mla_decode", wrong_arguments(good_dense(), rejection), rejection)


@pytest.mark.parametrize(
    "make", [good_prefill, good_decode, good_dense], ids=["prefill", "decode", "dense"]
)
def test_the_calls_that_the_mistakes_are_put_into_are_accepted(make: object) -> None:
    """Otherwise every refusal above might have another cause."""
    op = {
        good_prefill: "sparse_mla_prefill",
        good_decode: "sparse_mla_decode",
        good_dense: "dense_mla_decode",
    }
    arguments: Arguments = make()  # type: ignore[operator]
    result = getattr(mlacast, op[make])(**arguments)  # type: ignore[index]
    assert result[0] is arguments["out"]

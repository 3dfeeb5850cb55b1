"""Every argument error of the core ops: the sentence names argument, requirement and value, and
nothing is written.
"""

from __future__ import annotations

import pytest
import torch

import mlacast
from mlacast import UnsupportedError
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


def test_norm_is_not_defined_for_576() -> None:
    out = poisoned(3, 2, 512)
    arguments = {
        "q": torch.zeros(3, 2, 576).bfloat16(),
        "indices": torch.zeros(3, 4, dtype=torch.int32),
        "sm_scale": 1.0,
        "q_norm_eps": 1e-6,
        "out": out,
    }
    rejection = Rejection("", {}, "q_norm_eps", "512|576", error=UnsupportedError)
    assert_rejected(
        "sparse_mla_prefill", arguments | {"kv": torch.zeros(6, 576).bfloat16()}, rejection
    )
    cache = {"k_cache": mlacast.KvFormat.V32.allocate(2, 4), "kv_format": mlacast.KvFormat.V32}
    assert_rejected("sparse_mla_decode", arguments | cache, rejection)


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_a_named_backend_never_falls_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors neither GPU backend applies; asked for by name or by environment, that is an
    error.
    """
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = good_prefill()
    expected = UnsupportedError if name == "hopper" else (UnsupportedError, ImportError)
    with pytest.raises(expected, match=rf"sparse_mla_prefill: .*{name}") as caught:
        mlacast.sparse_mla_prefill(**arguments, backend=name)
    if isinstance(caught.value, UnsupportedError):
        assert (caught.value.op, caught.value.backend) == ("sparse_mla_prefill", name)
    monkeypatch.setenv("MLACAST_BACKEND", name)
    with pytest.raises(expected, match=rf"sparse_mla_prefill: .*{name}"):
        mlacast.sparse_mla_prefill(**arguments)
    assert bool((arguments["out"].view(torch.uint8) == 0x5A).all())
    # The argument wins over the environment.
    mlacast.sparse_mla_prefill(**arguments, backend="reference")


def test_the_reference_may_be_named_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLACAST_BACKEND", "reference")
    arguments = good_prefill()
    assert mlacast.sparse_mla_prefill(**arguments)[0] is arguments["out"]


def test_an_unknown_backend_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLACAST_BACKEND", "cuda")
    with pytest.raises(
        ValueError, match=r"MLACAST_BACKEND.*'reference'.*'triton'.*'hopper'.*got 'cuda'"
    ):
        mlacast.sparse_mla_prefill(**good_prefill())


def test_more_than_128_heads_are_refused() -> None:
    arguments = {
        "q": torch.zeros(1, 129, 512).bfloat16(),
        "kv": torch.zeros(2, 512).bfloat16(),
        "indices": torch.zeros(1, 1, dtype=torch.int32),
        "sm_scale": 1.0,
    }
    rejection = Rejection("", {}, "q", "128", "129", error=(ValueError, UnsupportedError))  # type: ignore[arg-type]
    assert_rejected("sparse_mla_prefill", arguments, rejection)


MERGE = (
    Rejection("no_parts", {"outs": [], "lses": []}, "", "(outs|lses) must .*at least one", "0"),
    Rejection("fewer_lses", {"lses": [torch.zeros(2, 3)]}, "lses", "", "1"),
    Rejection(
        "parts_of_different_shape",
        {"outs": [torch.zeros(3, 2, 512), torch.zeros(3, 1, 512)]},
        "outs",
        "",
        r"\[3, 1, 512\]",
    ),
    Rejection("lse_of_the_other_layout", {"lse_layout": "th"}, "lses", "shape", r"\[2, 3\]"),
    Rejection("unknown_layout", {"lse_layout": "bt"}, "lse_layout", "'ht'.*'th'", "'bt'"),
    Rejection(
        "lse_in_bf16", {"lses": [torch.zeros(2, 3).bfloat16()] * 2}, "lses", "float32", "bfloat16"
    ),
    Rejection(
        "lse_elsewhere",
        {"lses": [torch.zeros(2, 3), torch.zeros(2, 3, device="meta")]},
        "lses",
        "on cpu",
        "meta",
    ),
    Rejection(
        "part_in_int32", {"outs": [torch.zeros(3, 2, 512).int()] * 2}, "outs", "dtype", "int32"
    ),
    Rejection("out_of_fewer_rows", {"out": poisoned(2, 2, 512)}, "out", "shape", r"\[2, 2, 512\]"),
)


def _alone(features: int, out_format: mlacast.OutFormat) -> Arguments:
    """Quantise rows of ``features`` elements into a buffer that the call would allocate."""
    return {"x": torch.zeros(3, features), "format": out_format, "num_groups": 1, "out": None}


QUANTIZE = (
    Rejection("x_is_a_list", {"x": [1.0]}, "x", "torch.Tensor", "list", TypeError),
    Rejection("x_in_three_dims", {"x": torch.zeros(3, 2, 512)}, "x", "shape", r"\[3, 2, 512\]"),
    Rejection("x_in_int32", {"x": torch.zeros(3, 1024).int()}, "x", "dtype", "int32"),
    Rejection("format_is_a_name", {"format": "mxfp8"}, "format", "OutFormat", "str", TypeError),
    Rejection("three_groups", {"num_groups": 3, "out": None}, "num_groups", "divide", "3"),
    Rejection(
        "chunks_of_part_of_a_head",
        _alone(640, mlacast.Mxfp8(order="chunk32")),
        "",
        "512",
        "640",
    ),
    Rejection("groups_of_128_in_320", _alone(320, mlacast.Fp8Group(128)), "", "128", "320"),
    Rejection("blocks_of_16_in_520", _alone(520, mlacast.Nvfp4(1.0)), "", "16", "520"),
    Rejection(
        "out_is_a_tensor", {"out": poisoned(3, 1024)}, "out", "QuantizedTensor", "Tensor", TypeError
    ),
    Rejection(
        "buffer_of_fewer_rows", {"out": poisoned_buffer(MXFP8_HEAD, 2, 2, 512)}, "out", "3", "2"
    ),
    Rejection(
        "unknown_backend",
        {"backend": "cuda"},
        "backend",
        "'reference'.*'triton'.*'hopper'",
        "'cuda'",
    ),
)
APPEND = (
    Rejection(
        "latent_of_another_width",
        {"latent": torch.zeros(3, 576).bfloat16()},
        "latent",
        "512",
        r"\[3, 576\]",
    ),
    Rejection("latent_in_int32", {"latent": torch.zeros(3, 512).int()}, "latent", "dtype", "int32"),
    Rejection(
        "slots_of_other_rows",
        {"slots": torch.zeros(2, dtype=torch.int64)},
        "",
        "(slots|latent) must have shape",
        r"\[[23]",
    ),
    Rejection("slots_in_float", {"slots": torch.zeros(3)}, "slots", "int", "float32"),
    Rejection(
        "cache_of_528_bytes",
        {"cache": poisoned(2, 4, 1, 528, dtype=torch.uint8)},
        "cache",
        "584.*V4",
        "528",
    ),
    Rejection(
        "cache_of_two_kv_heads",
        {"cache": poisoned(2, 4, 2, 584, dtype=torch.uint8)},
        "cache",
        "1",
        r"2",
    ),
    Rejection("format_is_a_name", {"kv_format": "V4"}, "kv_format", "KvFormat", "str", TypeError),
    Rejection("slots_elsewhere", {"slots": of(meta)}, "slots", "on cpu", "meta"),
)
GATHER = (
    Rejection(
        "slots_in_two_dims",
        {"slots": torch.zeros(2, 2, dtype=torch.int64)},
        "slots",
        "shape",
        r"\[2, 2\]",
    ),
    Rejection("slots_in_float", {"slots": torch.zeros(3)}, "slots", "int", "float32"),
    Rejection(
        "cache_of_528_bytes",
        {"cache": poisoned(2, 4, 1, 528, dtype=torch.uint8)},
        "cache",
        "584.*V4",
        "528",
    ),
    Rejection("slots_elsewhere", {"slots": of(meta)}, "slots", "on cpu", "meta"),
)
PROJECT = (
    Rejection(
        "out_is_a_tensor",
        {"out": torch.zeros(3, 2, 512)},
        "out",
        "QuantizedTensor",
        "Tensor",
        TypeError,
    ),
    Rejection(
        "weight_of_one_group", {"weight": torch.zeros(1, 8, 512)}, "weight", "2", r"\[1, 8, 512\]"
    ),
    Rejection(
        "weight_of_other_features",
        {"weight": torch.zeros(2, 8, 500)},
        "weight",
        "512",
        r"\[2, 8, 500\]",
    ),
    Rejection(
        "weight_in_int32", {"weight": torch.zeros(2, 8, 512).int()}, "weight", "dtype", "int32"
    ),
    Rejection(
        "weight_elsewhere",
        {"weight": torch.zeros(2, 8, 512, device="meta")},
        "weight",
        "on cpu",
        "meta",
    ),
)


@pytest.mark.parametrize("rejection", MERGE, ids=rejection_id)
def test_merge(rejection: Rejection) -> None:
    good = {
        "outs": [torch.zeros(3, 2, 512), torch.zeros(3, 2, 512)],
        "lses": [torch.zeros(2, 3), torch.zeros(2, 3)],
        "lse_layout": "ht",
        "out": poisoned(3, 2, 512),
    }
    assert_rejected("merge_attention_states", wrong_arguments(good, rejection), rejection)


@pytest.mark.parametrize("rejection", QUANTIZE, ids=rejection_id)
def test_quantize(rejection: Rejection) -> None:
    good = {
        "x": torch.zeros(3, 1024),
        "format": MXFP8_HEAD.build(),
        "num_groups": 2,
        "out": poisoned_buffer(MXFP8_HEAD, 3, 2, 512),
    }
    assert_rejected("quantize_output", wrong_arguments(good, rejection), rejection)


@pytest.mark.parametrize("rejection", APPEND, ids=rejection_id)
def test_append(rejection: Rejection) -> None:
    good = {
        "latent": torch.zeros(3, 512).bfloat16(),
        "slots": torch.arange(3),
        "cache": poisoned(2, 4, 1, 584, dtype=torch.uint8),
        "kv_format": mlacast.KvFormat.V4,
    }
    assert_rejected("kv_cache_append", wrong_arguments(good, rejection), rejection)


@pytest.mark.parametrize("rejection", GATHER, ids=rejection_id)
def test_gather(rejection: Rejection) -> None:
    good = {
        "cache": poisoned(2, 4, 1, 584, dtype=torch.uint8),
        "slots": torch.arange(3),
        "kv_format": mlacast.KvFormat.V4,
    }
    assert_rejected("kv_cache_gather", wrong_arguments(good, rejection), rejection)


@pytest.mark.parametrize("rejection", PROJECT, ids=rejection_id)
def test_project(rejection: Rejection) -> None:
    good = {"out": poisoned_buffer(MXFP8_HEAD, 3, 2, 512), "weight": torch.zeros(2, 8, 512)}
    assert_rejected("grouped_out_project", wrong_arguments(good, rejection), rejection)


@pytest.mark.parametrize(
    ("shape", "strides", "match"),
    [
        ((5, 2, 4), None, "sf"),
        ((4, 2, 5), None, "sf"),
        ((5, 1, 4), None, "sf"),
        ((5, 2, 4), (8, 4, 1), "stride"),
    ],
    ids=["rows_for_mn_major", "words", "groups", "row_major_strides"],
)
def test_scale_buffers_of_the_wrong_shape_are_refused(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, match: str
) -> None:
    """Mxfp8 over [5, 2, 512]: words [5, 2, 4] with strides (1, 4*8, 8) for five tokens padded to
    eight.
    """
    data = torch.zeros(5, 2, 512, dtype=torch.float8_e4m3fn)
    if strides is None:
        rows = shape[0] if shape != (5, 2, 4) else 6
        sf = torch.zeros(shape[1], shape[2], 8, dtype=torch.int32).permute(2, 0, 1)[:rows]
    else:
        sf = torch.zeros(shape, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=rf"QuantizedTensor: sf must .*{match if strides else ''}.*got"
    ):
        mlacast.QuantizedTensor(data, sf, mlacast.Mxfp8())


def test_a_swizzled_buffer_that_is_too_small_is_refused() -> None:
    data = torch.zeros(129, 1, 256, dtype=torch.uint8)
    for sf in (
        torch.zeros(128, 32, dtype=torch.float8_e4m3fn),
        torch.zeros(129, 32, dtype=torch.float8_e4m3fn),
        torch.zeros(256, 32, dtype=torch.float32),
    ):
        with pytest.raises(ValueError, match="QuantizedTensor: sf must"):
            mlacast.QuantizedTensor(data, sf, mlacast.Nvfp4(1.0))

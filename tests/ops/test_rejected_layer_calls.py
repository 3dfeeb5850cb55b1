"""Every argument error of the operations of a dense MLA layer; nothing is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import mlacast
from tests.format_cases import MXFP8_HEAD, NVFP4, poisoned_buffer
from tests.ops.rejections import (
    Arguments,
    Rejection,
    assert_rejected,
    good_dense_prefill,
    good_v_up,
    last_dim_strided,
    meta,
    of,
    poisoned,
    rejection_id,
    wrong_arguments,
)

BOUNDS = "cu_seqlens_q"
OUTPUT = (
    Rejection("out_of_fewer_rows", {"out": poisoned(4, 4, 128)}, "out", "shape", r"\[4, 4, 128\]"),
    Rejection("out_of_512", {"out": poisoned(5, 4, 512)}, "out", "shape", r"\[5, 4, 512\]"),
    Rejection(
        "out_in_fp16",
        {"out": poisoned(5, 4, 128, dtype=torch.float16)},
        "out",
        "bfloat16",
        "float16",
    ),
    Rejection("out_elsewhere", {"out": of(meta)}, "out", "on cpu", "meta"),
    Rejection(
        "buffer_of_fewer_rows", {"out": poisoned_buffer(MXFP8_HEAD, 4, 1, 512)}, "out", "5", "4"
    ),
    Rejection(
        "buffer_of_more_features", {"out": poisoned_buffer(NVFP4, 5, 1, 1024)}, "out", "512", "1024"
    ),
    Rejection(
        "groups_that_hold_no_scale_block",
        {"out": None, "out_format": mlacast.Fp8Group(128), "num_groups": 8},
        "features",
        "128",
        "64",
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
    *OUTPUT,
    Rejection("q_is_a_list", {"q": [1.0]}, "q", "must be a torch.Tensor", "list", TypeError),
    Rejection("q_in_float32", {"q": of(lambda q: q.float())}, "q", "bfloat16", "float32"),
    Rejection("q_of_576", {"q": poisoned(5, 4, 576)}, "q", r"\[T, h, 192\]", r"\[5, 4, 576\]"),
    Rejection("q_strided", {"q": of(last_dim_strided)}, "q", "stride 1", "strides"),
    Rejection("q_without_heads", {"q": poisoned(5, 0, 192)}, "q", "at least one head", "0"),
    Rejection("k_of_fewer_rows", {"k": of(lambda k: k[:3])}, "v", "T_k=3", r"\[6, 2, 128\]"),
    Rejection("k_of_128", {"k": of(lambda k: k[..., :128])}, "k", "192", r"\[6, 2, 128\]"),
    Rejection("k_elsewhere", {"k": of(meta)}, "k", "on cpu", "meta"),
    Rejection("k_in_fp16", {"k": of(lambda k: k.half())}, "k", "bfloat16", "float16"),
    Rejection(
        "three_key_heads",
        {"k": poisoned(6, 3, 192), "v": poisoned(6, 3, 128)},
        "k",
        "divides h=4",
        "3",
    ),
    Rejection(
        "no_key_heads",
        {"k": poisoned(6, 0, 192), "v": poisoned(6, 0, 128)},
        "k",
        "divides h=4",
        "0",
    ),
    Rejection("v_of_other_heads", {"v": of(lambda v: v[:, :1])}, "v", "h_kv=2", r"\[6, 1, 128\]"),
    Rejection("v_padded_to_192", {"v": poisoned(6, 2, 192)}, "v", "128", r"\[6, 2, 192\]"),
    Rejection("v_strided", {"v": of(last_dim_strided)}, "v", "stride 1", "strides"),
    Rejection("v_elsewhere", {"v": of(meta)}, "v", "on cpu", "meta"),
    Rejection("bounds_in_int64", {BOUNDS: of(lambda c: c.long())}, BOUNDS, "int32", "int64"),
    Rejection("bounds_missing", {BOUNDS: None}, BOUNDS, "torch.Tensor", "NoneType", TypeError),
    Rejection("bounds_as_list", {BOUNDS: [0, 5]}, BOUNDS, "torch.Tensor", "list", TypeError),
    Rejection(
        "bounds_in_two_dims", {BOUNDS: of(lambda c: c[None])}, BOUNDS, r"\[B\+1\]", r"\[1, 3"
    ),
    Rejection("bounds_elsewhere", {BOUNDS: of(meta)}, BOUNDS, "on cpu", "meta"),
    Rejection("bounds_strided", {BOUNDS: of(last_dim_strided)}, BOUNDS, "contiguous", "strides"),
    Rejection(
        "no_bounds",
        {BOUNDS: of(lambda c: c[:0]), "cu_seqlens_k": of(lambda c: c[:0])},
        BOUNDS,
        "at least one element",
        "0",
    ),
    Rejection(
        "bounds_of_fewer_sequences",
        {"cu_seqlens_k": of(lambda c: c[:2])},
        "cu_seqlens_k",
        r"B\+1=3",
        r"\[2\]",
    ),
    Rejection(
        "longest_as_tensor",
        {"max_seqlen_q": torch.tensor(3)},
        "max_seqlen_q",
        "an int",
        "Tensor",
        TypeError,
    ),
    Rejection(
        "longest_as_float", {"max_seqlen_k": 4.0}, "max_seqlen_k", "an int", "float", TypeError
    ),
    Rejection("longest_of_64_bits", {"max_seqlen_k": 2**63}, "max_seqlen_k", "at most", "2"),
    Rejection("scale_past_float32", {"softmax_scale": 1e39}, "softmax_scale", "float32", "1e"),
    Rejection("scale_past_float64", {"softmax_scale": 10**400}, "softmax_scale", "float32", "1"),
    Rejection("longest_negative", {"max_seqlen_q": -1}, "max_seqlen_q", "at least 0", "-1"),
    Rejection("scale_infinite", {"softmax_scale": float("inf")}, "softmax_scale", "finite", "inf"),
    Rejection(
        "scale_as_tensor",
        {"softmax_scale": torch.ones(1)},
        "softmax_scale",
        "a number or None",
        "Tensor",
        TypeError,
    ),
    Rejection("causal_as_int", {"causal": 1}, "causal", "a bool", "int", TypeError),
)
WEIGHT = "w_uv"
V_UP = (
    *OUTPUT,
    Rejection(
        "latent_is_a_list", {"latent_out": [1.0]}, "latent_out", "torch.Tensor", "list", TypeError
    ),
    Rejection(
        "latent_in_float32",
        {"latent_out": of(lambda x: x.float())},
        "latent_out",
        "bfloat16",
        "float32",
    ),
    Rejection(
        "latent_of_576", {"latent_out": poisoned(5, 4, 576)}, "latent_out", "512", r"\[5, 4, 576\]"
    ),
    Rejection(
        "latent_strided", {"latent_out": of(last_dim_strided)}, "latent_out", "stride 1", "strides"
    ),
    Rejection(
        "no_heads",
        {"latent_out": poisoned(5, 0, 512), WEIGHT: poisoned(0, 512, 128)},
        "latent_out",
        "at least one head",
        "0",
    ),
    Rejection(
        "weight_of_fewer_heads", {WEIGHT: of(lambda w: w[:3])}, WEIGHT, "h=4", r"\[3, 512, 128\]"
    ),
    Rejection(
        "weight_transposed", {WEIGHT: poisoned(4, 128, 512)}, WEIGHT, "512, 128", r"\[4, 128, 512\]"
    ),
    Rejection("weight_in_fp16", {WEIGHT: of(lambda w: w.half())}, WEIGHT, "bfloat16", "float16"),
    Rejection("weight_elsewhere", {WEIGHT: of(meta)}, WEIGHT, "on cpu", "meta"),
    Rejection("weight_strided", {WEIGHT: of(last_dim_strided)}, WEIGHT, "stride 1", "strides"),
)


@pytest.mark.parametrize("rejection", PREFILL, ids=rejection_id)
def test_dense_prefill(rejection: Rejection) -> None:
    arguments = wrong_arguments(good_dense_prefill(), rejection)
    assert_rejected("dense_mla_prefill", arguments, rejection)


@pytest.mark.parametrize("rejection", V_UP, ids=rejection_id)
def test_v_up(rejection: Rejection) -> None:
    assert_rejected("v_up_project", wrong_arguments(good_v_up(), rejection), rejection)


@pytest.mark.parametrize("make", [good_dense_prefill, good_v_up])
def test_the_calls_that_the_mistakes_are_put_into_are_accepted(
    make: Callable[[], Arguments],
) -> None:
    """Otherwise every refusal above might have another cause."""
    arguments = make()
    if make is good_dense_prefill:
        assert mlacast.dense_mla_prefill(**arguments)[0] is arguments["out"]
    else:
        assert mlacast.v_up_project(**arguments) is arguments["out"]


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        ("dense_mla_prefill", "q"),
        ("dense_mla_prefill", "k"),
        ("dense_mla_prefill", "v"),
        ("v_up_project", "latent_out"),
        ("v_up_project", "w_uv"),
    ],
)
def test_an_output_over_an_input_is_refused(op: str, argument: str) -> None:
    arguments = good_dense_prefill() if op == "dense_mla_prefill" else good_v_up()
    memory = poisoned(max(arguments[argument].numel(), 5 * 4 * 128))
    before = memory.clone()
    arguments[argument] = memory[: arguments[argument].numel()].view(arguments[argument].shape)
    arguments["out"] = memory[: 5 * 4 * 128].view(5, 4, 128)
    with pytest.raises(ValueError, match=rf"{op}: out must not share memory with {argument}\b"):
        getattr(mlacast, op)(**arguments)
    assert torch.equal(memory, before)


BAD_BOUNDS = (
    Rejection("not_from_zero", {BOUNDS: torch.tensor([1, 3, 5])}, BOUNDS, "ascend", r"\[1, 3, 5\]"),
    Rejection("descending", {BOUNDS: torch.tensor([0, 4, 3])}, BOUNDS, "ascend", r"\[0, 4, 3\]"),
    Rejection("past_the_end", {BOUNDS: torch.tensor([0, 3, 6])}, BOUNDS, "most 5", r"\[0, 3, 6\]"),
    Rejection(
        "keys_past_the_end",
        {"cu_seqlens_k": torch.tensor([0, 3, 7])},
        "cu_seqlens_k",
        "most 6",
        r"\[0, 3, 7\]",
    ),
    Rejection("longer_than_said", {"max_seqlen_q": 2}, "max_seqlen_q", "at least 3", "2"),
    Rejection("more_keys_than_said", {"max_seqlen_k": 3}, "max_seqlen_k", "at least 4", "3"),
)


@pytest.mark.parametrize("rejection", BAD_BOUNDS, ids=rejection_id)
def test_validation_reports_bad_bounds(rejection: Rejection, validate: None) -> None:
    change = {
        name: value.int() if isinstance(value, torch.Tensor) else value
        for name, value in rejection.change.items()
    }
    arguments = good_dense_prefill() | change
    assert_rejected("dense_mla_prefill", arguments, rejection)


def test_validation_accepts_good_bounds(validate: None) -> None:
    for change in ({}, {BOUNDS: torch.tensor([0, 0, 3], dtype=torch.int32)}):
        arguments = good_dense_prefill() | change
        assert mlacast.dense_mla_prefill(**arguments)[0] is arguments["out"]

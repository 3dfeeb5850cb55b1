"""Argument errors of the operations on caches and outputs, and of buffers made by hand."""

from __future__ import annotations

import pytest
import torch

import mlacast
from tests.format_cases import MXFP8_HEAD, poisoned_buffer
from tests.ops.rejections import (
    Arguments,
    Rejection,
    assert_rejected,
    meta,
    of,
    poisoned,
    rejection_id,
    wrong_arguments,
)

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

"""Refused calls of ``grouped_out_project`` and ``quantized_linear`` about weights and scales."""

from __future__ import annotations

import pytest
import torch

from tests.format_cases import MXFP8_HEAD, FormatCase, poisoned_buffer
from tests.ops.rejections import (
    Rejection,
    assert_rejected,
    last_dim_strided,
    meta,
    of,
    rejection_id,
    wrong_arguments,
)

CODES = torch.float8_e4m3fn


def good(is_grouped: bool) -> dict[str, object]:
    """Two groups of 512 features, 8 columns, a float32 scale per block."""
    lead = (2,) if is_grouped else ()
    columns = 512 if is_grouped else 1024
    return {
        "out": poisoned_buffer(MXFP8_HEAD, 3, 2, 512),
        "weight": torch.zeros(*lead, 8, columns).to(CODES),
        "weight_sf": torch.ones(*lead, 1, columns // 128),
    }


WRONG = (
    Rejection("out_is_a_tensor", {"out": torch.zeros(3, 2, 512)}, "out", "Quanti", "T", TypeError),
    Rejection(
        "weight_in_int32", {"weight": of(lambda w: w.float().int())}, "weight", "dtype", "int32"
    ),
    Rejection("weight_strided", {"weight": of(last_dim_strided)}, "weight", "stride 1", "strides"),
    Rejection("weight_elsewhere", {"weight": of(meta)}, "weight", "on cpu", "meta"),
    Rejection("scales_missing", {"weight_sf": None}, "weight_sf", "given", "None"),
    Rejection("scales_of_numbers", {"weight": of(lambda w: w.float())}, "weight_sf", "None", "a t"),
    Rejection("scale_is_a_number", {"weight_sf": 1.0}, "weight_sf", "Tensor", "float", TypeError),
    Rejection(
        "scales_in_float16", {"weight_sf": of(lambda s: s.half())}, "weight_sf", "dtype", "float16"
    ),
    Rejection("scales_elsewhere", {"weight_sf": of(meta)}, "weight_sf", "on cpu", "meta"),
    Rejection(
        "a_block_too_few", {"weight_sf": of(lambda s: s[..., :-1])}, "weight_sf", "shape", r"\d"
    ),
    Rejection(
        "bytes_of_blocks",
        {"weight_sf": of(lambda s: s.to(torch.uint8))},
        "weight_sf",
        r"shape .*8, (16|32)\]",
        r"\[(2, )?1, ",
    ),
    Rejection(
        "words_of_blocks",
        {"weight_sf": of(lambda s: s.int())},
        "weight_sf",
        r"shape .*8, (4|8)\]",
        r"\[(2, )?1, ",
    ),
    Rejection("order_unknown", {"weight_order": "chunk32"}, "weight_order", "one of", "chunk32"),
    Rejection("backend_unknown", {"backend": "cuda"}, "backend", "one of", "cuda"),
)


@pytest.mark.parametrize("op", ["grouped_out_project", "quantized_linear"])
@pytest.mark.parametrize("rejection", WRONG, ids=rejection_id)
def test_wrong_weights(op: str, rejection: Rejection) -> None:
    arguments = wrong_arguments(good(op == "grouped_out_project"), rejection)
    assert_rejected(op, arguments, rejection)


def test_strided_bytes_are_refused() -> None:
    arguments = good(True)
    arguments["weight_sf"] = torch.zeros(2, 8, 32, dtype=torch.uint8)[..., ::2]
    wrong = Rejection("", {}, "weight_sf", "contiguous", "strides")
    assert_rejected("grouped_out_project", arguments, wrong)


@pytest.mark.parametrize(("dtype", "step"), [(torch.uint8, 32), (torch.int32, 128)], ids=str)
def test_features_that_no_scale_divides(dtype: torch.dtype, step: int) -> None:
    case = FormatCase("Fp8Tensor", scale=0.1)
    arguments = {
        "out": poisoned_buffer(case, 3, 2, step // 2),
        "weight": torch.zeros(2, 8, step // 2).to(CODES),
        "weight_sf": torch.zeros(2, 8, 1, dtype=dtype),
    }
    wrong = Rejection("", {}, "weight_sf", f"multiple of {step}", f"{step // 2} features")
    assert_rejected("grouped_out_project", arguments, wrong)


def test_linear_weights_have_all_groups_in_a_row() -> None:
    arguments = good(False) | {"weight": torch.zeros(8, 512), "weight_sf": None}
    wrong = Rejection("", {}, "weight", "K=1024", r"\[8, 512\]")
    assert_rejected("quantized_linear", arguments, wrong)

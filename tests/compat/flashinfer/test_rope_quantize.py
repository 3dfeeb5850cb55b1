"""mlacast.compat.flashinfer.rope_quantize_fp8 and its MLA alias."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlacast.compat.flashinfer import mla_rope_quantize_fp8, rope_quantize_fp8
from tests.compat.flash_mla.test_signatures import described, parameters_of
from tests.rope_quantize_cases import (
    CASES,
    E4M3,
    E5M2,
    RopeQuantizeCase,
    case_id,
    draw,
    expected,
)

BF16 = torch.bfloat16
SHARED = (
    "q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox=True, quantize_dtype=None, "
    "quant_scale_q=1.0, quant_scale_kv=1.0, q_rope_out=None, k_rope_out=None, q_nope_out=None, "
    "k_nope_out=None, enable_pdl=False"
)
COVERED = [case for case in CASES if case.inputs != torch.float32 and case.table == torch.float32]


def test_signatures() -> None:
    assert described(mla_rope_quantize_fp8) == parameters_of(SHARED)
    assert described(rope_quantize_fp8) == parameters_of(SHARED + ', backend="cuda"')


@pytest.mark.parametrize("function", [rope_quantize_fp8, mla_rope_quantize_fp8])
@pytest.mark.parametrize("case", COVERED, ids=case_id)
def test_bytes(case: RopeQuantizeCase, function: Any) -> None:
    inputs, nope = draw(case), case.nope
    out = function(
        inputs.q[..., nope:],
        inputs.k[..., nope:],
        inputs.q[..., :nope],
        inputs.k[..., :nope],
        inputs.table,
        inputs.positions,
        case.pairing == "half",
        case.dtype,
        0.5,
        2.0,
    )
    q_bytes, k_bytes = expected(case, inputs, 0.5, 2.0)
    assert torch.equal(torch.cat((out[2], out[0]), -1).view(torch.uint8), q_bytes)
    assert torch.equal(torch.cat((out[3], out[1]), -1).view(torch.uint8), k_bytes)


def _good() -> dict[str, Any]:
    return {
        "q_rope": torch.zeros(3, 2, 64, dtype=BF16),
        "k_rope": torch.zeros(3, 64, dtype=BF16),
        "q_nope": None,
        "k_nope": torch.zeros(3, 128, dtype=BF16),
        "cos_sin_cache": torch.zeros(5, 64),
        "pos_ids": torch.zeros(3, dtype=torch.int32),
    }


def test_absent_parts_and_dtypes() -> None:
    out = rope_quantize_fp8(**_good())
    assert out[2].shape == (3, 2, 0)
    assert {part.dtype for part in out} == {E4M3}
    given = torch.empty(3, 64, dtype=E5M2)
    out = rope_quantize_fp8(**_good(), k_rope_out=given)
    assert out[1] is given
    assert {part.dtype for part in out} == {E5M2}


def test_cutile_is_accepted_where_flashinfer_has_it() -> None:
    rope_quantize_fp8(**_good(), is_neox=False, backend="cutile")
    keys = torch.zeros(3, 1, 64, dtype=BF16)
    for change in ({"is_neox": True}, {"is_neox": False, "k_rope": keys, "k_nope": None}):
        with pytest.raises(NotImplementedError, match="'cutile' must have is_neox=False"):
            rope_quantize_fp8(**{**_good(), **change}, backend="cutile")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cos_sin_cache": torch.zeros(5, 64, dtype=BF16)}, ValueError, "float32, got bfloat16"),
        ({"backend": "triton"}, ValueError, "'cuda', 'cutile', got 'triton'"),
        ({"quantize_dtype": BF16}, ValueError, "float8_e4m3fn or float8_e5m2, got bfloat16"),
        ({"q_rope": torch.zeros(3, 2, 64)}, ValueError, "q_rope must have dtype .*got float32"),
        ({"k_rope": torch.zeros(3, 64).half()}, ValueError, "k_rope .*bfloat16, got float16"),
        ({"k_rope": None}, TypeError, "k_rope must be a torch.Tensor"),
        ({"pos_ids": torch.zeros(3)}, TypeError, "pos_ids must have dtype int32 or int64"),
        ({"pos_ids": torch.zeros(6, dtype=torch.int32)[::2]}, ValueError, "pos_ids .*contiguous"),
        ({"quant_scale_q": torch.ones(1)}, TypeError, "quant_scale_q must be a host scalar"),
        ({"cos_sin_cache": torch.zeros(5, 128)[:, ::2]}, ValueError, "cos_sin_cache .*contiguous"),
        ({"k_nope": torch.zeros(3, 1, 128, dtype=BF16)}, ValueError, "k_nope must have shape"),
        (
            {"q_rope_out": torch.empty(3, 2, 64, dtype=E4M3), "quantize_dtype": E5M2},
            ValueError,
            "q_rope_out must have dtype float8_e5m2, got float8_e4m3fn",
        ),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"rope_quantize_fp8: .*{message}"):
        rope_quantize_fp8(**{**_good(), **change})

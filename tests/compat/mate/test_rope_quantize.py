"""mlacast.compat.mate.mla_rope_quantize_fp8: signature, bytes, dtype rules and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlacast.compat.mate import mla_rope_quantize_fp8
from tests.compat.flash_mla.test_signatures import described, parameters_of
from tests.rope_quantize_cases import E4M3, E5M2, RopeQuantizeCase, draw, expected

BF16 = torch.bfloat16


def test_signature() -> None:
    pinned = (
        "q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox=True, "
        "quantize_dtype=None, quant_scale_q=1.0, quant_scale_kv=1.0, q_rope_out=None, "
        "k_rope_out=None, q_nope_out=None, k_nope_out=None, enable_pdl=False"
    )
    assert described(mla_rope_quantize_fp8) == parameters_of(pinned)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("table", [torch.float32, BF16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_bytes(is_neox: bool, table: torch.dtype, index: torch.dtype) -> None:
    pairing = "half" if is_neox else "interleaved"
    case = RopeQuantizeCase(pairing=pairing, table=table, index=index)
    inputs = draw(case)
    whole = torch.empty(7, 3, 576, dtype=E4M3)
    out = mla_rope_quantize_fp8(
        inputs.q[..., 512:],
        inputs.k[..., 512:],
        inputs.q[..., :512],
        inputs.k[..., :512],
        inputs.table,
        inputs.positions,
        is_neox,
        None,
        0.25,
        3.0,
        q_rope_out=whole[..., 512:],
        q_nope_out=whole[..., :512],
        enable_pdl=True,
    )
    q_bytes, k_bytes = expected(case, inputs, 0.25, 3.0)
    assert torch.equal(whole.view(torch.uint8), q_bytes)
    assert torch.equal(torch.cat((out[3], out[1]), -1).view(torch.uint8), k_bytes)


def _good() -> dict[str, Any]:
    return {
        "q_rope": torch.zeros(3, 2, 64, dtype=BF16),
        "k_rope": torch.zeros(3, 64, dtype=BF16),
        "q_nope": torch.zeros(3, 2, 512, dtype=BF16),
        "k_nope": torch.zeros(3, 512, dtype=BF16),
        "cos_sin_cache": torch.zeros(5, 64),
        "pos_ids": torch.zeros(3, dtype=torch.int32),
    }


def test_given_buffers_come_back_and_no_tokens_are_fine() -> None:
    arguments = _good()
    buffer = torch.empty(3, 64, dtype=E4M3)
    assert mla_rope_quantize_fp8(**arguments, k_rope_out=buffer)[1] is buffer
    empty = {
        name: value if name == "cos_sin_cache" else value[:0] for name, value in arguments.items()
    }
    assert [out.shape[0] for out in mla_rope_quantize_fp8(**empty)] == [0] * 4
    transposed = {**arguments, "q_rope": torch.zeros(2, 3, 64, dtype=BF16).transpose(0, 1)}
    assert mla_rope_quantize_fp8(**transposed)[0].stride() == (64, 192, 1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cos_sin_cache": torch.zeros(5, 64).half()}, ValueError, "float32 or bfloat16.*float16"),
        ({"quantize_dtype": E5M2}, ValueError, "quantize_dtype must be float8_e4m3fn.*e5m2"),
        (
            {"q_nope_out": torch.empty(3, 2, 512, dtype=E5M2)},
            ValueError,
            "quantize_dtype must be float8_e4m3fn.*e5m2",
        ),
        ({"pos_ids": torch.zeros(3)}, TypeError, "pos_ids must have dtype int32 or int64.*float32"),
        ({"pos_ids": [0, 1, 2]}, TypeError, "pos_ids must be a torch.Tensor, got list"),
        ({"quant_scale_q": torch.ones(1)}, TypeError, "quant_scale_q must be a host scalar"),
        ({"quant_scale_kv": torch.ones(1)}, TypeError, "quant_scale_kv must be a host scalar"),
        ({"q_rope": torch.zeros(3, 2, 32, dtype=BF16)}, ValueError, r"q_rope .*\[3, 2, 32\]"),
        ({"k_nope": torch.zeros(3, 256, dtype=BF16)}, ValueError, r"k_nope .*\[3, 256\]"),
        ({"k_rope": torch.zeros(2, 64, dtype=BF16)}, ValueError, r"k_rope .*n=3, got \[2, 64\]"),
        ({"q_rope": torch.zeros(3, 2, 64)}, ValueError, "q_rope must have dtype bfloat16"),
        ({"pos_ids": torch.zeros(4, dtype=torch.int32)}, ValueError, r"pos_ids .*n=3, got \[4\]"),
        ({"cos_sin_cache": torch.zeros(64, 5).t()}, ValueError, "cos_sin_cache .*contiguous"),
        (
            {"k_rope_out": torch.empty(3, 32, dtype=E4M3)},
            ValueError,
            r"k_rope_out .*\[3, 64\], got \[3, 32\]",
        ),
        ({"k_rope": [0]}, TypeError, "k_rope must be a torch.Tensor, got list"),
        ({"q_nope": _good()["q_nope"].to("meta")}, ValueError, "q_nope must be on cpu.*got meta"),
        ({"pos_ids": torch.zeros(6, dtype=torch.int32)[::2]}, ValueError, "pos_ids .*contiguous"),
        (
            {"q_rope": torch.zeros(3, 2, 128, dtype=BF16)[..., ::2]},
            ValueError,
            "q_rope must have stride 1 on its last",
        ),
        (
            {"q_nope_out": torch.empty(3, 2, 512, dtype=E4M3, device="meta")},
            ValueError,
            "q_nope_out must be on cpu.*got meta",
        ),
        (
            {"k_nope_out": torch.empty(3, 1024, dtype=E4M3)[:, ::2]},
            ValueError,
            "k_nope_out must have stride 1 on its last",
        ),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"mla_rope_quantize_fp8: .*{message}"):
        mla_rope_quantize_fp8(**{**_good(), **change})


def test_positions_outside_the_table_are_those_of_its_ends() -> None:
    """MATE leaves them undefined; here nothing outside the table is read."""
    arguments = {**_good(), "cos_sin_cache": torch.randn(5, 64)}
    arguments["q_rope"] = torch.randn(3, 2, 64).bfloat16()
    codes = [
        mla_rope_quantize_fp8(**{**arguments, "pos_ids": torch.tensor(positions)})[0]
        for positions in ([-7, 2, 2**40], [0, 2, 4])
    ]
    assert torch.equal(codes[0].view(torch.uint8), codes[1].view(torch.uint8))


def test_first_given_output_decides_the_dtype() -> None:
    """The first in the order of the results, not the first that fits."""
    outputs: dict[str, Any] = {
        "q_rope_out": torch.empty(3, 2, 64, dtype=E4M3),
        "k_nope_out": torch.empty(3, 512, dtype=E5M2),
    }
    with pytest.raises(ValueError, match="k_nope_out must have dtype float8_e4m3fn, got .*e5m2"):
        mla_rope_quantize_fp8(**_good(), **outputs)

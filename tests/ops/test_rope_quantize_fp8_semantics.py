"""rope_quantize_fp8 against steps in double precision, byte for byte, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests.ops.rejections import (
    Arguments,
    Rejection,
    last_dim_strided,
    meta,
    of,
    poisoned,
    rejection_id,
    wrong_arguments,
)
from tests.rope_quantize_cases import (
    CASES,
    E4M3,
    E5M2,
    RopeQuantizeCase,
    case_id,
    draw,
    expected,
)

Q_SCALE, K_SCALE = 1.7, 0.3


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_bytes_equal_the_contract(case: RopeQuantizeCase, backend: str) -> None:
    """Inputs are slices of wider rows; outputs are allocated."""
    inputs = draw(case)
    q, k, nope = inputs.q, inputs.k, case.nope
    result = mlacast.rope_quantize_fp8(
        q[..., nope:],
        k[..., nope:],
        q[..., :nope] if nope else None,
        k[..., :nope] if nope else None,
        inputs.table,
        inputs.positions,
        pairing=case.pairing,
        dtype=case.dtype,
        q_scale=Q_SCALE,
        k_scale=K_SCALE,
        backend=backend,
    )
    assert [out.dtype for out in result] == [case.dtype] * 4
    assert result[2].shape == (*q.shape[:-1], nope)
    q_bytes, k_bytes = expected(case, inputs, Q_SCALE, K_SCALE)
    for out, wanted in zip(
        result,
        (q_bytes[..., nope:], k_bytes[..., nope:], q_bytes[..., :nope], k_bytes[..., :nope]),
        strict=True,
    ):
        assert torch.equal(_bytes(out), wanted)


@pytest.mark.parametrize("rope_first", [False, True])
def test_outputs_may_be_slices_of_wider_rows(rope_first: bool, backend: str) -> None:
    """The given objects come back, and what lies between the slices keeps its bytes."""
    case = RopeQuantizeCase(pairing="interleaved")
    inputs = draw(case)
    q_bytes, k_bytes = expected(case, inputs, 1.0, 1.0)
    rows, keys = poisoned(9, 3, 600, dtype=torch.uint8), poisoned(9, 600, dtype=torch.uint8)
    rope, nope = (slice(0, 64), slice(64, 576)) if rope_first else (slice(512, 576), slice(0, 512))
    q_out, k_out = rows.view(E4M3)[1:8], keys.view(E4M3)[1:8]
    outputs = (q_out[..., rope], k_out[..., rope], q_out[..., nope], k_out[..., nope])
    names = ("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out")
    options: dict[str, Any] = dict(zip(names, outputs, strict=True))
    result = mlacast.rope_quantize_fp8(
        inputs.q[..., 512:],
        inputs.k[..., 512:],
        inputs.q[..., :512],
        inputs.k[..., :512],
        inputs.table,
        inputs.positions,
        **options,
        backend=backend,
    )
    assert all(got is given for got, given in zip(result, outputs, strict=True))
    for buffer, wanted in ((rows, q_bytes), (keys, k_bytes)):
        assert torch.equal(buffer[1:8][..., nope], wanted[..., :512])
        assert torch.equal(buffer[1:8][..., rope], wanted[..., 512:])
        buffer[1:8, ..., :576] = 0x5A
        assert bool((buffer == 0x5A).all())


def test_allocated_outputs_keep_the_memory_format(backend: str) -> None:
    q = torch.randn(3, 5, 64).bfloat16().transpose(0, 1)
    k = torch.randn(5, 64).bfloat16()
    table, positions = torch.zeros(4, 64), torch.zeros(5, dtype=torch.int32)
    result = mlacast.rope_quantize_fp8(q, k, None, None, table, positions, backend=backend)
    assert result[0].stride() == q.stride()
    assert result[2].shape == (5, 3, 0)
    assert result[3].shape == (5, 0)


def test_a_quarter_turn_by_hand(backend: str) -> None:
    """Cosine 0 and sine 1 take (a, b) to (-b, a): 1 is 0x38, 2 is 0x40, 3 is 0x44, 4 is 0x48."""
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    table = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    arguments: tuple[Any, ...] = (q, q[0], None, None, table, torch.tensor([1]))
    turned = mlacast.rope_quantize_fp8(*arguments, pairing="interleaved", backend=backend)[0]
    assert _bytes(turned).flatten().tolist() == [0xC0, 0x38, 0xC8, 0x44]
    turned = mlacast.rope_quantize_fp8(*arguments, pairing="half", backend=backend)[0]
    assert _bytes(turned).flatten().tolist() == [0xC4, 0xC8, 0x38, 0x40]


@pytest.mark.parametrize(("dtype", "top"), [(E4M3, 0x7E), (E5M2, 0x7B)])
def test_codes_saturate_and_scales_multiply(dtype: torch.dtype, top: int, backend: str) -> None:
    nope = torch.tensor([[[1e5, -float("inf"), float("nan"), -0.0]]])
    rope = torch.zeros(1, 1, 2)
    result = mlacast.rope_quantize_fp8(
        rope,
        rope[0],
        nope,
        nope[0] * 0 + 2,
        torch.ones(1, 2),
        torch.tensor([0]),
        dtype=dtype,
        k_scale=0.5,
        backend=backend,
    )
    assert _bytes(result[2]).flatten().tolist() == [top, top | 0x80, 0x7F, 0x80]
    one = 0x38 if dtype == E4M3 else 0x3C
    assert _bytes(result[3]).flatten().tolist() == [one, 0x7F, 0x7F, one]


def test_no_tokens(backend: str) -> None:
    q, k = torch.empty(0, 4, 64).bfloat16(), torch.empty(0, 64).bfloat16()
    table, positions = torch.zeros(3, 64), torch.empty(0, dtype=torch.int64)
    result = mlacast.rope_quantize_fp8(q, k, q, k, table, positions, backend=backend)
    assert [tuple(out.shape) for out in result] == [(0, 4, 64), (0, 64), (0, 4, 64), (0, 64)]


def _good() -> Arguments:
    return {
        "q_rope": torch.zeros(3, 2, 64).bfloat16(),
        "k_rope": torch.zeros(3, 64).bfloat16(),
        "q_nope": torch.zeros(3, 2, 512).bfloat16(),
        "k_nope": torch.zeros(3, 512).bfloat16(),
        "cos_sin_cache": torch.zeros(5, 64),
        "positions": torch.zeros(3, dtype=torch.int32),
        "q_nope_out": poisoned(3, 2, 512, dtype=torch.uint8).view(E4M3),
    }


WRONG = (
    Rejection("q_is_none", {"q_rope": None}, "q_rope", "torch.Tensor", "NoneType", TypeError),
    Rejection("q_in_int32", {"q_rope": of(lambda q: q.int())}, "q_rope", "bfloat16", "int32"),
    Rejection("q_in_two_dims", {"q_rope": of(lambda q: q[0])}, "q_rope", "shape", r"\[2, 64\]"),
    Rejection("odd_width", {"q_rope": of(lambda q: q[..., :63])}, "", "r=63", "64"),
    Rejection("k_of_other_tokens", {"k_rope": of(lambda k: k[:2])}, "k_rope", "n=3", r"\[2, 64\]"),
    Rejection("k_of_other_width", {"k_rope": of(lambda k: k[:, :32])}, "k_rope", "r=64", "32"),
    Rejection("k_in_fp16", {"k_rope": of(lambda k: k.half())}, "k_rope", "bfloat16", "float16"),
    Rejection("k_nope_in_fp32", {"k_nope": of(lambda k: k.float())}, "k_nope", "bfloat16", "32"),
    Rejection("k_nope_with_heads", {"k_nope": of(lambda k: k[:, None])}, "k_nope", "shape", "1"),
    Rejection("q_nope_of_other_heads", {"q_nope": of(lambda q: q[:, :1])}, "q_nope", "h_q=2", "1"),
    Rejection("q_nope_strided", {"q_nope": of(last_dim_strided)}, "q_nope", "stride 1", "stride"),
    Rejection("k_elsewhere", {"k_rope": of(meta)}, "k_rope", "on cpu", "meta"),
    Rejection(
        "table_of_other_width",
        {"cos_sin_cache": torch.zeros(5, 32)},
        "cos_sin_cache",
        "r=64",
        r"\[5, 32\]",
    ),
    Rejection(
        "table_in_fp16",
        {"cos_sin_cache": torch.zeros(5, 64).half()},
        "cos_sin_cache",
        "float32 or bfloat16",
        "float16",
    ),
    Rejection(
        "table_without_rows", {"cos_sin_cache": torch.zeros(0, 64)}, "cos_sin_cache", "row", "0"
    ),
    Rejection("positions_in_float", {"positions": torch.zeros(3)}, "positions", "int32", "float32"),
    Rejection(
        "positions_too_few", {"positions": of(lambda p: p[:2])}, "positions", "n=3", r"\[2\]"
    ),
    Rejection("unknown_pairing", {"pairing": "neox"}, "pairing", "'interleaved'", "'neox'"),
    Rejection("dtype_is_bf16", {"dtype": torch.bfloat16}, "dtype", "float8_e4m3fn", "bfloat16"),
    Rejection("dtype_is_a_name", {"dtype": "e4m3"}, "dtype", "torch.dtype", "str", TypeError),
    Rejection(
        "scale_is_a_tensor", {"q_scale": torch.ones(1)}, "q_scale", "number", "Tensor", TypeError
    ),
    Rejection("scale_is_nan", {"k_scale": float("nan")}, "k_scale", "finite", "nan"),
    Rejection("out_of_other_dtype", {"dtype": E5M2}, "q_nope_out", "float8_e5m2", "float8_e4m3fn"),
    Rejection(
        "out_of_other_shape",
        {"q_nope_out": of(lambda out: out[:, :1])},
        "q_nope_out",
        r"\[3, 2, 512\]",
        r"\[3, 1, 512\]",
    ),
    Rejection("scale_past_float32", {"q_scale": 10**400}, "q_scale", "finite in float32"),
    Rejection(
        "out_of_one_token_for_all",
        {"q_rope_out": poisoned(1, 2, 64, dtype=torch.uint8).view(E4M3).expand(3, 2, 64)},
        "q_rope_out",
        "memory of its own",
        r"\[0, 64, 1\]",
    ),
    Rejection("unknown_backend", {"backend": "cuda"}, "backend", "'triton'", "'cuda'"),
)


@pytest.mark.parametrize("rejection", WRONG, ids=rejection_id)
def test_wrong_calls_name_what_is_wrong_and_write_nothing(rejection: Rejection) -> None:
    good = _good()
    arguments = wrong_arguments(good, rejection)
    with pytest.raises(rejection.error, match=rejection.pattern("rope_quantize_fp8")):
        mlacast.rope_quantize_fp8(**arguments)
    assert bool((good["q_nope_out"].view(torch.uint8) == 0x5A).all())


def test_the_call_that_the_mistakes_are_put_into_is_accepted() -> None:
    arguments = _good()
    assert mlacast.rope_quantize_fp8(**arguments)[2] is arguments["q_nope_out"]


def test_an_odd_width_is_refused() -> None:
    q, k = torch.zeros(1, 1, 3), torch.zeros(1, 3)
    with pytest.raises(ValueError, match="q_rope must have an even last dimension.*got 3"):
        mlacast.rope_quantize_fp8(q, k, None, None, torch.zeros(2, 3), torch.tensor([0]))


def test_outputs_that_share_memory_are_refused() -> None:
    arguments = _good()
    shared = torch.zeros(3, 2, 512, dtype=torch.uint8).view(E4M3)
    arguments |= {"q_nope_out": shared, "q_rope_out": shared[..., 10:74]}
    with pytest.raises(ValueError, match="not share memory"):
        mlacast.rope_quantize_fp8(**arguments)


@pytest.mark.parametrize("position", [-1, 5])
def test_validation_finds_positions_outside_the_table(position: int, validate: None) -> None:
    arguments = {**_good(), "positions": torch.tensor([0, position, 0])}
    with pytest.raises(ValueError, match=rf"positions must .*\[0, 5\), got {position} at \[1\]"):
        mlacast.rope_quantize_fp8(**arguments)

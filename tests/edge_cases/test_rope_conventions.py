"""RoPE: pairing, table checks, positions outside the table."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.scenarios import lengths_of, one_hot_rows

ELEMENTS = (0, 1, 2, 31, 32, 63)
# q's rope part is 0..63, cos = 0, sin = 1: (a, b) -> (-b, a).
INTERLEAVED = {0: -1.0, 1: 0.0, 2: -3.0, 31: 30.0, 32: -33.0, 63: 62.0}
HALF = {0: -32.0, 1: -33.0, 2: -34.0, 31: -63.0, 32: 0.0, 63: 31.0}


def read_back_rotated_elements(pairing: str, width: int, op: str, backend: str) -> list[float]:
    """What one-hot keys read of the rotated query through the LSE, for ``ELEMENTS``."""
    table = torch.cat((torch.zeros(1, 32), torch.ones(1, 32)), 1)
    q = torch.zeros(len(ELEMENTS), 1, width, dtype=torch.bfloat16)
    q[:, 0, width - 64 :] = torch.arange(64)
    keys = one_hot_rows(len(ELEMENTS), width, *(width - 64 + element for element in ELEMENTS))
    indices = torch.arange(len(ELEMENTS), dtype=torch.int32).unsqueeze(1)
    rope = mlacast.Rope(table, torch.zeros(len(ELEMENTS), dtype=torch.int32), pairing=pairing)
    if op == "prefill":
        _, _, lse = mlacast.sparse_mla_prefill(
            q, keys, indices, sm_scale=0.5, rope=rope, backend=backend
        )
    else:
        _, lse = mlacast.sparse_mla_decode(
            q,
            keys.view(2, 3, 1, width),
            indices,
            kv_format=mlacast.KvFormat.BF16,
            sm_scale=0.5,
            rope=rope,
            backend=backend,
        )
    return [float(element) for element in lse.flatten() / 0.5]


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("width", [512, 576])
@pytest.mark.parametrize(("pairing", "expected"), [("interleaved", INTERLEAVED), ("half", HALF)])
def test_the_pairing_asked_for_is_the_pairing_used(
    pairing: str, expected: dict[int, float], width: int, op: str, backend: str
) -> None:
    """BC-12, sgl-project/sglang#30342: a kernel hard-coded one pairing of the elements."""
    found = read_back_rotated_elements(pairing, width, op, backend)
    assert found == [expected[element] for element in ELEMENTS]


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_prologue_and_epilogue_use_the_same_pairing(pairing: str, backend: str) -> None:
    """BC-12: a key rotated like the query comes back unrotated in the output."""
    table = torch.cat((torch.zeros(1, 32), torch.ones(1, 32)), 1)
    kv = torch.zeros(1, 512, dtype=torch.bfloat16)
    kv[0, 448:] = oracles.rotate(torch.arange(64, dtype=torch.float64), table[0], pairing)
    rope = mlacast.Rope(table, torch.zeros(1, dtype=torch.int32), pairing=pairing)
    out, _, _ = mlacast.sparse_mla_prefill(
        torch.zeros(1, 1, 512, dtype=torch.bfloat16),
        kv,
        torch.zeros(1, 1, dtype=torch.int32),
        sm_scale=1.0,
        rope=rope,
        backend=backend,
    )
    assert oracles.plain(out)[0, 0, 448:].tolist() == [float(i) for i in range(64)]


def test_an_unknown_pairing_raises() -> None:
    """BC-12."""
    with pytest.raises(ValueError, match="pairing must .*'interleaved'.*'half'.*got 'neox'"):
        mlacast.Rope(torch.zeros(4, 64), torch.zeros(1, dtype=torch.int32), pairing="neox")


def _attend(
    table: Tensor, positions: Tensor, backend: str, topk_length: Tensor | None = None
) -> tuple[Tensor, ...]:
    s_q = positions.shape[0]
    torch.manual_seed(5)
    q, kv = oracles.exact_queries(s_q, 2, 512), torch.randn(4, 512).bfloat16()
    out, max_logits, lse = mlacast.sparse_mla_prefill(
        q,
        kv,
        torch.arange(4, dtype=torch.int32).expand(s_q, 4),
        sm_scale=0.02,
        topk_length=topk_length,
        rope=mlacast.Rope(table, positions),
        backend=backend,
    )
    return oracles.plain(out), max_logits, lse


@pytest.mark.parametrize(
    ("table", "match"),
    [
        (torch.zeros(100, 8), r"64.*got .*\[100, 8\]"),
        (torch.zeros(100, 63), r"64.*got .*\[100, 63\]"),
        (torch.zeros(64), r"64.*got .*\[64\]"),
        (torch.zeros(100, 64).half(), "float32.*got float16"),
        (torch.zeros(100, 64).bfloat16(), "float32.*got bfloat16"),
        (torch.zeros(100, 64).double(), "float32.*got float64"),
        (torch.zeros(64, 100).t(), "stride.*got"),
    ],
    ids=["8_wide", "63_wide", "one_dim", "float16", "bfloat16", "float64", "transposed"],
)
def test_tables_that_cannot_be_read_are_refused(table: Tensor, match: str, backend: str) -> None:
    """BC-26, NVIDIA/Megatron-LM#5317: an 8 wide table was read as if it were 64 wide."""
    with pytest.raises(ValueError, match=rf"cos_sin_cache must .*{match}"):
        _attend(table, torch.zeros(2, dtype=torch.int32), backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16], ids=str)
def test_positions_must_be_integers_of_32_or_64_bits(dtype: torch.dtype, backend: str) -> None:
    """BC-26."""
    with pytest.raises(ValueError, match="positions must .*int32.*int64.*got"):
        _attend(torch.zeros(100, 64), torch.zeros(2).to(dtype), backend)


def test_int32_and_int64_positions_give_identical_bits(backend: str) -> None:
    """BC-26, sgl-project/sgl-kernel-xpu#287."""
    table = oracles.exact_rope_table(100)
    narrow, wide = (
        _attend(table, torch.tensor([0, 99], dtype=dtype), backend)
        for dtype in (torch.int32, torch.int64)
    )
    for left, right in zip(narrow, wide, strict=True):
        assert oracles.same_bits(left, right)


@pytest.mark.parametrize(
    ("positions", "clamped"),
    [
        (torch.tensor([100, 5]), torch.tensor([99, 5])),
        (torch.tensor([-1, 5]), torch.tensor([0, 5])),
        (torch.tensor([2**62, -(2**62)]), torch.tensor([99, 0])),
        (
            torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32),
            torch.tensor([99, 0], dtype=torch.int32),
        ),
    ],
    ids=["one_past_the_end", "minus_one", "int64_extremes", "int32_extremes"],
)
def test_positions_outside_are_clamped_and_never_read(
    positions: Tensor, clamped: Tensor, backend: str
) -> None:
    """BC-26, local-inference-lab/vllm#67: the table lies in a buffer of NaN, so an outside read
    would show.
    """
    buffer = torch.full((300, 64), math.nan)
    table = buffer[100:200]
    table.copy_(oracles.exact_rope_table(100))
    outside, inside = (_attend(table, which, backend) for which in (positions, clamped))
    for left, right in zip(outside, inside, strict=True):
        assert not left.isnan().any()
        assert oracles.same_bits(left, right)


def test_rows_of_length_zero_do_not_read_the_table(backend: str) -> None:
    """BC-26: stale positions of dummy rows point at NaN."""
    table = oracles.exact_rope_table(10)
    table[9] = math.nan
    out, max_logits, lse = _attend(
        table, torch.tensor([9, 3]), backend, topk_length=lengths_of(0, 4)
    )
    assert not out.isnan().any()
    assert not out[0].any()
    assert bool((lse[0] == -math.inf).all()) and bool((max_logits[0] == -math.inf).all())


def test_neighbouring_positions_are_told_apart(backend: str) -> None:
    """BC-26, vllm-project/vllm-ascend#17170: positions kept in bf16 would make 256 and 257 the
    same.
    """
    angles = torch.arange(300).float().unsqueeze(1) * torch.linspace(1.0, 0.01, 32)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    out_256, out_257 = (
        _attend(table, torch.tensor([position]), backend)[0] for position in (256, 257)
    )
    assert not torch.equal(out_256, out_257)


def test_a_table_with_wider_rows_is_read_through_its_stride(backend: str) -> None:
    """BC-31, ROCm/aiter#3841: cos/sin sliced out of a wider table."""
    wide = torch.full((10, 100), math.nan)
    wide[:, 20:84] = oracles.exact_rope_table(10)
    positions = torch.tensor([3, 9])
    sliced = _attend(wide[:, 20:84], positions, backend)
    packed = _attend(wide[:, 20:84].contiguous(), positions, backend)
    for left, right in zip(sliced, packed, strict=True):
        assert oracles.same_bits(left, right)

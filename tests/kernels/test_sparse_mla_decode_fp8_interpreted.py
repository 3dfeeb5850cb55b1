"""The portable decode kernel, interpreted: e4m3 queries, scales on the device, output-only RoPE."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.cache_writers import FilledCache
from tests.kernels import launches
from tests.oracles import AttentionOracle
from tests.scenarios import CacheCase, draw_indices, used_rows

FP8 = mlacast.KvFormat.FP8
# Half a unit in the last place of float16, and of its subnormal numbers; weights are times 2**15.
FLOAT16_HALF_ULP, FLOAT16_SUBNORMAL = 2.0**-11, 2.0**-40


def _fp8_query(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def _pool(d_qk: int, tokens: int, topk: int, page_size: int) -> tuple[FilledCache, Tensor]:
    """A cache whose unselected slots are NaN, and indices with every nuisance."""
    pages = -(-20 // page_size)
    indices = draw_indices(tokens, topk, pages * page_size)
    used = sorted(used_rows(indices, pages * page_size))
    case = CacheCase("FP8", d_qk)
    return case.fill(num_pages=pages, page_size=page_size, slots=used), indices


def _with_float16_weights(plain: AttentionOracle, selected: list[Tensor]) -> AttentionOracle:
    """Allow for weights rounded to float16: relative to their sum, which is at least 1."""
    extra = torch.zeros_like(plain.out_error)
    for token, rows in enumerate(selected):
        if rows.shape[0]:
            largest = float(rows[:, :512].abs().max())
            extra[token] = largest * (FLOAT16_HALF_ULP + rows.shape[0] * FLOAT16_SUBNORMAL)
    return dataclasses.replace(plain, out_error=plain.out_error + extra)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("d_qk", "heads", "page_size"), [(576, 3, 5), (512, 17, 1), (576, 1, 53)])
def test_an_e4m3_query_over_an_fp8_cache(
    d_qk: int, heads: int, page_size: int, num_splits: int
) -> None:
    filled, indices = _pool(d_qk, 3, 70, page_size)
    lengths = torch.tensor([70, 0, 33], dtype=torch.int32)
    q = _fp8_query(3, heads, d_qk)
    result = launches.decode(
        q,
        filled.cache,
        indices,
        launches.float32_buffer(3, heads),
        kv_format=FP8,
        topk_length=lengths,
        num_splits=num_splits,
    )
    selected = oracles.select_rows(filled.rows, indices, lengths)
    plain = oracles.attend(q.float(), selected, sm_scale=launches.SM_SCALE)
    launches.assert_matches(result, _with_float16_weights(plain, selected))


def test_a_value_of_a_key_that_hardly_weighs() -> None:
    """Weights 1, 2**-30 and 2**-32 and a value that the first key has as 0: not lost in float16."""
    cache = FP8.allocate(1, 64, d_qk=576)
    codes = torch.zeros(64, 576)
    codes[:3, 0] = torch.tensor([0.0, -30.0, -32.0])
    codes[1:3, 5] = torch.tensor([448.0, -416.0])
    cache.copy_(codes.to(torch.float8_e4m3fn).view(cache.shape))
    q = torch.zeros(1, 1, 576)
    q[..., 0] = 1.0
    result = launches.decode(
        q.to(torch.float8_e4m3fn),
        cache,
        torch.tensor([[0, 1, 2, -1]], dtype=torch.int32),
        launches.float32_buffer(1, 1),
        kv_format=FP8,
        sm_scale=math.log(2.0),
    )
    expected = 448.0 * 2.0**-30 - 416.0 * 2.0**-32
    assert math.isclose(float(result.out.data.flatten()[5]), expected, rel_tol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
def test_scales_of_scores_and_values(on_device: bool, num_splits: int) -> None:
    filled, indices = _pool(576, 2, 40, 64)
    q = _fp8_query(2, 2, 576)
    sink = launches.sinks(2)
    scales: dict[str, Any] = {"sm_scale": 0.0625, "v_scale": -3.5}
    if on_device:
        scales = {name: torch.tensor([value]) for name, value in scales.items()}
    result = launches.decode(
        q,
        filled.cache,
        indices,
        launches.float32_buffer(2, 2),
        kv_format=FP8,
        attn_sink=sink,
        num_splits=num_splits,
        **scales,
    )
    selected = oracles.select_rows(filled.rows, indices)
    plain = oracles.attend(q.float(), selected, sm_scale=0.0625, attn_sink=sink)
    expected = _with_float16_weights(plain, selected)
    expected = dataclasses.replace(
        expected, out=expected.out * -3.5, out_error=expected.out_error * 3.5
    )
    launches.assert_matches(result, expected)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_a_rotated_query_has_only_its_output_rotated_back(pairing: str, num_splits: int) -> None:
    filled, indices = _pool(512, 3, 40, 5)
    q = _fp8_query(3, 2, 512)
    table = launches.unit_table(9)
    rope = mlacast.Rope(table, launches.POSITIONS, pairing, rotate_query=False)
    result = launches.decode(
        q,
        filled.cache,
        indices,
        launches.float32_buffer(3, 2),
        kv_format=FP8,
        rope=rope,
        num_splits=num_splits,
    )
    selected = oracles.select_rows(filled.rows, indices)
    plain = oracles.attend(q.float(), selected, sm_scale=launches.SM_SCALE)
    expected = _with_float16_weights(plain, selected)
    turned = expected.out.clone()
    for token in range(3):
        row = table[min(max(int(launches.POSITIONS[token]), 0), 8)]
        for head in range(2):
            turned[token, head, 448:] = oracles.rotate(
                expected.out[token, head, 448:], row, pairing, inverse=True
            )
    # Two products of size at most |v| each.
    expected = dataclasses.replace(expected, out=turned, out_error=expected.out_error * 2)
    launches.assert_matches(result, expected)


def test_a_repeated_call_has_the_same_bits() -> None:
    filled, indices = _pool(576, 2, 70, 61)
    q = _fp8_query(2, 5, 576)

    def run() -> launches.Result:
        buffer = launches.float32_buffer(2, 5)
        return launches.decode(q, filled.cache, indices, buffer, kv_format=FP8, num_splits=3)

    first, second = run(), run()
    assert oracles.same_bits(first.out.data, second.out.data)
    assert oracles.same_bits(first.lse, second.lse)

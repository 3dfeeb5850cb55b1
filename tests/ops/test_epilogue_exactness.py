"""The quantising epilogue: bytes equal an independent quantiser run on the reference's float32
output.

Ranges of a shared buffer must reproduce the whole call bit for bit, leave the neighbours alone and
clear the padding when, and only when, the range ends the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles, quantizers
from tests.format_cases import (
    FAMILIES,
    NVFP4,
    QUANTISED,
    FormatCase,
    assert_buffer_holds,
    buffer_bytes,
    bytes_of,
    case_id,
    poisoned_buffer,
    storage_bytes,
)
from tests.scenarios import CacheCase, draw_indices, prefill_inputs, transposed_queries

SM_SCALE = 0.02
Call = Callable[..., "tuple[object, ...]"]


@dataclass(frozen=True)
class Problem:
    """A fixed attention problem over ``tokens`` rows, runnable on any row range.

    Attributes:
        exact: The reference's float32 output [tokens, h, 512].
        run: ``run(first, last, **options)`` calls the public op on those rows.
        heads: Number of heads.
        tokens: Number of rows.
    """

    exact: Tensor
    run: Call
    heads: int
    tokens: int


def _prefill(tokens: int, heads: int, topk: int = 6) -> Problem:
    inputs = prefill_inputs(s_q=tokens, heads=heads, width=512, s_kv=20, topk=topk)
    table, positions = oracles.exact_rope_table(5), torch.randint(0, 5, (tokens,))
    sink = torch.randn(heads)

    def rope(first: int, last: int) -> mlacast.Rope:
        return mlacast.Rope(table, positions[first:last])

    def run(first: int, last: int, **options: object) -> tuple[object, ...]:
        return mlacast.sparse_mla_prefill(
            inputs.q[first:last],
            inputs.kv,
            inputs.indices[first:last],
            sm_scale=SM_SCALE,
            attn_sink=sink,
            q_norm_eps=1e-6,
            rope=rope(first, last),
            **options,  # type: ignore[arg-type]
        )

    exact = mlacast.reference.sparse_mla_prefill(
        inputs.q,
        inputs.kv,
        inputs.indices,
        sm_scale=SM_SCALE,
        attn_sink=sink,
        q_norm_eps=1e-6,
        rope=rope(0, tokens),
    )[0]
    return Problem(exact, run, heads, tokens)


def _decode(tokens: int, heads: int, num_splits: int) -> Problem:
    filled = CacheCase("V4", 512).fill(num_pages=3, page_size=5, slots=range(15))
    indices = draw_indices(tokens, 18, 15)
    q = transposed_queries(tokens, heads, 512)
    options = {"kv_format": mlacast.KvFormat.V4, "sm_scale": SM_SCALE, "num_splits": num_splits}

    def run(first: int, last: int, **more: object) -> tuple[object, ...]:
        return mlacast.sparse_mla_decode(
            q[first:last],
            filled.cache,
            indices[first:last],
            **options,  # type: ignore[arg-type]
            **more,  # type: ignore[arg-type]
        )

    exact = mlacast.reference.sparse_mla_decode(q, filled.cache, indices, **options)[0]
    return Problem(exact, run, heads, tokens)


def _grouped(exact: Tensor, num_groups: int) -> Tensor:
    return exact.float().reshape(exact.shape[0], num_groups, -1)


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_prefill_bytes(case: FormatCase, backend: str) -> None:
    problem = _prefill(5, 4)
    for num_groups in (1, 2):
        out = problem.run(0, 5, out_format=case.build(), num_groups=num_groups, backend=backend)[0]
        assert isinstance(out, mlacast.QuantizedTensor)
        assert_buffer_holds(out, case.expect(_grouped(problem.exact, num_groups)), case)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_decode_bytes(case: FormatCase, num_splits: int, backend: str) -> None:
    problem = _decode(3, 2, num_splits)
    out = problem.run(0, 3, out_format=case.build(), backend=backend)[0]
    assert isinstance(out, mlacast.QuantizedTensor)
    assert_buffer_holds(out, case.expect(_grouped(problem.exact, 1)), case)


def test_bf16_is_the_reference_rounded_once(backend: str) -> None:
    problem = _prefill(4, 2)
    out = problem.run(0, 4, backend=backend)[0]
    assert isinstance(out, Tensor)
    assert torch.equal(out.double(), oracles.round_to_bf16(problem.exact.double()))


def test_a_bf16_buffer_object_holds_the_same_numbers(backend: str) -> None:
    problem = _prefill(5, 2)
    plain = problem.run(0, 5, backend=backend)[0]
    buffer = mlacast.QuantizedTensor.empty(5, 2, 512, mlacast.Bf16())
    for first, last in ((0, 3), (3, 5)):
        view = buffer[first:last]
        assert problem.run(first, last, out=view, backend=backend)[0] is view
    assert isinstance(plain, Tensor)
    assert torch.equal(buffer.data.view(5, 2, 512), plain)


@pytest.mark.parametrize("bounds", [(0, 3, 5, 7), (0, 1, 6, 9), (0, 4, 8)], ids=str)
@pytest.mark.parametrize("case", [case for case in QUANTISED if case.kind != "Nvfp4"], ids=case_id)
def test_ranges_of_one_buffer_equal_the_whole_call(
    case: FormatCase, bounds: tuple[int, ...], backend: str
) -> None:
    tokens = bounds[-1]
    problem = _prefill(tokens, 2)
    whole = poisoned_buffer(case, tokens, 2, 512)
    assert problem.run(0, tokens, out=whole, backend=backend)[0] is whole
    assert_buffer_holds(whole, case.expect(_grouped(problem.exact, 2)), case)
    shared = poisoned_buffer(case, tokens, 2, 512)
    for first, last in zip(bounds, bounds[1:], strict=False):
        view = shared[first:last]
        assert problem.run(first, last, out=view, backend=backend)[0] is view
    for left, right in zip(buffer_bytes(shared), buffer_bytes(whole), strict=True):
        assert (left is None and right is None) or torch.equal(left, right)  # type: ignore[arg-type]


def test_nvfp4_ranges_cut_anywhere_equal_the_whole_call(backend: str) -> None:
    problem = _prefill(131, 1, topk=3)
    whole = poisoned_buffer(NVFP4, 131, 1, 512)
    problem.run(0, 131, out=whole, backend=backend)
    assert_buffer_holds(whole, NVFP4.expect(_grouped(problem.exact, 1)), NVFP4)
    shared = poisoned_buffer(NVFP4, 131, 1, 512)
    # In an order that ends neither with the last range nor on a multiple of 128.
    for first, last in ((127, 131), (0, 5), (5, 127)):
        problem.run(first, last, out=shared[first:last], backend=backend)
    for left, right in zip(buffer_bytes(shared), buffer_bytes(whole), strict=True):
        assert left is not None and right is not None and torch.equal(left, right)


def _changed(before: Tensor | None, after: Tensor | None) -> list[int]:
    assert before is not None and after is not None
    return torch.nonzero(before != after).flatten().tolist()


@pytest.mark.parametrize("case", [case for case in FAMILIES if case.mn_major], ids=case_id)
def test_mn_major_neighbours_and_padding_stay_until_the_last_range(
    case: FormatCase, backend: str
) -> None:
    """Seven tokens in columns of eight: a middle range may touch its own words only."""
    problem = _prefill(7, 2)
    shared = poisoned_buffer(case, 7, 2, 512)
    data_before, sf_before = buffer_bytes(shared)
    problem.run(2, 5, out=shared[2:5], backend=backend)
    data_after, sf_after = buffer_bytes(shared)
    assert sf_after is not None
    assert all(2 * 1024 <= byte < 5 * 1024 for byte in _changed(data_before, data_after))
    columns = sf_after.view(torch.int32).view(-1, 8)
    poison = 0x5A5A5A5A
    assert bool((columns[:, :2] == poison).all()) and bool((columns[:, 5:] == poison).all())
    assert not bool((columns[:, 2:5] == poison).any())
    problem.run(5, 7, out=shared[5:7], backend=backend)
    columns = storage_bytes(shared.sf).view(torch.int32).view(-1, 8)  # type: ignore[arg-type]
    assert bool((columns[:, :2] == poison).all())
    assert not columns[:, 7].any()


def test_swizzle_neighbours_and_padding_stay_until_the_last_range(backend: str) -> None:
    problem = _prefill(9, 1)
    shared = poisoned_buffer(NVFP4, 9, 1, 512)
    problem.run(3, 6, out=shared[3:6], backend=backend)
    _, sf = buffer_bytes(shared)
    assert sf is not None
    own = {quantizers.swizzled_offset(row, column, 32) for row in (3, 4, 5) for column in range(32)}
    others = torch.ones(sf.numel(), dtype=torch.bool)
    others[torch.tensor(sorted(own))] = False
    assert bool((sf[others] == 0x5A).all())
    problem.run(6, 9, out=shared[6:9], backend=backend)
    _, sf = buffer_bytes(shared)
    assert sf is not None
    real = {quantizers.swizzled_offset(row, column, 32) for row in range(9) for column in range(32)}
    padding = torch.ones(sf.numel(), dtype=torch.bool)
    padding[torch.tensor(sorted(real))] = False
    assert not sf[padding].any()


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_prefill_and_decode_share_one_buffer(case: FormatCase, backend: str) -> None:
    prefill, decode = _prefill(5, 2), _decode(2, 2, num_splits=2)
    shared = poisoned_buffer(case, 7, 1, 1024)
    decode.run(0, 2, out=shared[5:7], backend=backend)
    prefill.run(0, 5, out=shared[0:5], backend=backend)
    exact = torch.cat((prefill.exact.float(), decode.exact.float())).view(7, 1, 1024)
    assert_buffer_holds(shared, case.expect(exact), case)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_an_empty_row_is_quantised_like_any_row_of_zeros(case: FormatCase, backend: str) -> None:
    q, kv = transposed_queries(2, 2, 512), torch.randn(3, 512).bfloat16()
    indices = torch.tensor([[-1, 3], [0, 1]], dtype=torch.int32)
    out = mlacast.sparse_mla_prefill(
        q, kv, indices, sm_scale=SM_SCALE, out_format=case.build(), backend=backend
    )[0]
    exact = mlacast.reference.sparse_mla_prefill(q, kv, indices, sm_scale=SM_SCALE)[0]
    assert not exact[0].any()
    assert isinstance(out, mlacast.QuantizedTensor)
    assert_buffer_holds(out, case.expect(_grouped(exact, 1)), case)
    assert not out.dequantize()[0].any()


def test_scales_given_as_device_scalars_act_like_numbers(backend: str) -> None:
    problem = _prefill(3, 2)
    for by_number, by_tensor in (
        (mlacast.Fp8Tensor(0.03), mlacast.Fp8Tensor(torch.tensor([0.03]))),
        (mlacast.Nvfp4(672.0), mlacast.Nvfp4(torch.tensor([672.0]))),
    ):
        left = problem.run(0, 3, out_format=by_number, backend=backend)[0]
        right = problem.run(0, 3, out_format=by_tensor, backend=backend)[0]
        assert isinstance(left, mlacast.QuantizedTensor) and isinstance(
            right, mlacast.QuantizedTensor
        )
        assert torch.equal(bytes_of(left.data), bytes_of(right.data))

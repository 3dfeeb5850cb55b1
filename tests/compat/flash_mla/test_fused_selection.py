"""Which cache entries the fused step attends to, and what it must not read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlacast.compat import flash_mla
from tests.cache_writers import V4, V41, V41_FP4, RecordLayout, draw_records, put_records
from tests.compat.flash_mla.cases import (
    INT32_MAX,
    INT32_MIN,
    MAX_POS,
    FusedCall,
    FusedCase,
    decode_call,
    prefill_call,
    rotary_table,
)
from tests.compat.flash_mla.compare import assert_same_bits
from tests.compat.flash_mla.element_orders import natural_codes, natural_scale_bytes
from tests.compat.flash_mla.hand_calls import hand_prefill
from tests.compat.flash_mla.number_grid import FLOOR_BYTE, code_rank

FUSED = flash_mla.fused_norm_rope_attn_rope_cast
MODES = ("prefill", "decode", "decode-extra")


def make_call(mode: str, **changes: Any) -> FusedCall:
    base = FusedCase(mode, groups=2, s_q=3, topk=12, norm=True, sink="finite")
    if mode == "prefill":
        return prefill_call(replace(base, **changes))
    caches = (V41, V41_FP4) if mode == "decode-extra" else (V4,)
    return decode_call(replace(base, caches=caches, extra_topk=12, **changes))


def run_call(call: FusedCall, **changes: Any) -> tuple[Tensor, ...]:
    function = FUSED.decode if call.case.caches else FUSED.prefill
    result: tuple[Tensor, ...] = function(**call.arguments | changes)
    return result


def assert_same_results(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one, other)


def index_argument(mode: str) -> tuple[str, str]:
    """Names of the index and the length argument that a test varies."""
    if mode == "prefill":
        return "indices", "topk_length"
    if mode == "decode":
        return "indices_in_kvcache", "topk_length"
    return "extra_indices_in_kvcache", "extra_topk_length"


def index_rows(call: FusedCall, name: str) -> Tensor:
    """A copy of the index argument as [s_q, topk]."""
    indices: Tensor = call.arguments[name]
    return indices.clone().flatten(1)


def shaped(call: FusedCall, name: str, rows: Tensor) -> Tensor:
    return rows.view(call.arguments[name].shape)


@pytest.mark.parametrize("mode", MODES)
def test_result_does_not_depend_on_what_follows_the_length(mode: str) -> None:
    call = make_call(mode)
    name, length_name = index_argument(mode)
    lengths = torch.tensor([5, 0, 12], dtype=torch.int32)
    indices = index_rows(call, name)
    indices[0] = torch.tensor([0, -1, 2, -1, 4, *[-1] * 7])
    results = []
    for tail in (-1, 0, 6, 1, INT32_MAX):
        for row, length in enumerate(lengths.tolist()):
            indices[row, length:] = tail
        changes = {name: shaped(call, name, indices.clone()), length_name: lengths}
        results.append(run_call(call, **changes))
    for result in results[1:]:
        assert_same_results(result, results[0])


@pytest.mark.parametrize("mode", MODES)
def test_lengths_are_clamped(mode: str) -> None:
    call = make_call(mode)
    _, length_name = index_argument(mode)
    wild = torch.tensor([INT32_MAX, INT32_MIN, -1], dtype=torch.int32)
    tame = torch.tensor([12, 0, 0], dtype=torch.int32)
    assert_same_results(
        run_call(call, **{length_name: wild}), run_call(call, **{length_name: tame})
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("start", [0, 1, 5, 8])
def test_place_of_the_invalid_entries_does_not_matter(mode: str, start: int) -> None:
    call = make_call(mode)
    name, length_name = index_argument(mode)
    live = [0, 4, 4, 2]
    holes = [-1, -2, INT32_MIN, INT32_MAX, 10**6, -1, -1, -1]
    slid = torch.tensor([holes[:start] + live + holes[start:]] * 3, dtype=torch.int32)
    compact = torch.tensor([live + [-1] * 8] * 3, dtype=torch.int32)
    out_slid, sf_slid, *rest_slid = run_call(
        call, **{name: shaped(call, name, slid), length_name: None}
    )
    out, sf, *rest = run_call(call, **{name: shaped(call, name, compact), length_name: None})
    # The same four logits at other places of a sum and a maximum: a few roundings, of logits of
    # size 10 too, in which a logarithm may cancel.
    for one, other in zip(rest_slid, rest, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0.0)
    w = call.case.w
    assert torch.equal(natural_scale_bytes(sf_slid, w), natural_scale_bytes(sf, w))
    steps = code_rank(natural_codes(out_slid, w)) - code_rank(natural_codes(out, w))
    assert int(steps.abs().max()) <= 1


@pytest.mark.parametrize("mode", MODES[:2])
def test_out_of_range_entries_are_never_read(mode: str) -> None:
    """Eight rows amid a NaN buffer: 8, 1000, the extremes and negatives count as missing."""
    call = make_call(mode, s_q=1, topk=9)
    name, _ = index_argument(mode)
    rows = 8
    if mode == "prefill":
        parent = torch.full((3 * rows, 1, 512), float("nan")).bfloat16()
        parent[rows : 2 * rows] = torch.randn(rows, 1, 512).bfloat16()
        cache: dict[str, Any] = {"kv": parent[rows : 2 * rows]}
    else:
        flat = torch.full((3 * 4 * 584 * 2,), 0xFF, dtype=torch.uint8)
        put_records(flat, V4, 4, 4 * 584, 2 * 4 * 584, list(range(rows)), draw_records(V4, rows))
        view = flat.as_strided((2, 4, 1, 584), (4 * 584, 584, 584, 1), 2 * 4 * 584)
        cache = {"k_cache": view}
    hostile = torch.tensor([[0, 7, 8, 1000, INT32_MAX, -1, -2, INT32_MIN, 3]], dtype=torch.int32)
    plain = torch.tensor([[0, 7, -1, -1, -1, -1, -1, -1, 3]], dtype=torch.int32)
    results = [
        run_call(call, **cache, **{name: shaped(call, name, indices)})
        for indices in (hostile, plain)
    ]
    assert_same_results(results[0], results[1])
    assert bool(results[0][-1].isfinite().all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sink", ["none", "mixed"])
def test_row_with_nothing_to_attend(mode: str, sink: str) -> None:
    call = make_call(mode, sink=sink)
    nothing = {
        name: torch.full_like(call.arguments[name], value)
        for name, value in (
            ("indices", -1),
            ("indices_in_kvcache", INT32_MAX),
            ("extra_indices_in_kvcache", INT32_MIN),
        )
        if call.arguments.get(name) is not None
    }
    # A row without keys has nothing to rotate, whatever its table holds.
    nothing["cos_sin_cache"] = torch.full((MAX_POS, 64), float("nan"))
    out_fp8, out_sf, *statistics = run_call(call, **nothing)
    assert bool((natural_codes(out_fp8, call.case.w) & 0x7F == 0).all())
    assert bool((natural_scale_bytes(out_sf, call.case.w) == FLOOR_BYTE).all())
    assert bool((statistics[-1] == float("inf")).all())
    if mode == "prefill":
        assert bool((statistics[0] == float("-inf")).all())


@pytest.mark.parametrize("mode", MODES)
def test_zero_columns_make_every_row_empty(mode: str) -> None:
    call = make_call(mode)
    empty = {
        name: call.arguments[name][..., :0]
        for name in ("indices", "indices_in_kvcache", "extra_indices_in_kvcache")
        if call.arguments.get(name) is not None
    }
    out_fp8, _, *statistics = run_call(call, **empty)
    assert bool((natural_codes(out_fp8, call.case.w) & 0x7F == 0).all())
    assert bool((statistics[-1] == float("inf")).all())


@pytest.mark.parametrize("mode", MODES)
def test_zero_tokens(mode: str) -> None:
    call = make_call(mode)
    names = ("token_positions", "q", "indices", "indices_in_kvcache", "extra_indices_in_kvcache")
    none = {
        name: call.arguments[name][:0] for name in names if call.arguments.get(name) is not None
    }
    out_fp8, out_sf, *statistics = run_call(call, **none)
    assert out_fp8.shape == (0, 2, 2048)
    assert out_fp8.dtype == torch.float8_e4m3fn
    assert out_sf.shape == (0, 2, 16)
    assert out_sf.dtype == torch.int32
    assert [x.shape for x in statistics] == [(0, 8)] * len(statistics)
    assert {x.dtype for x in statistics} == {torch.float32}
    # A normal call still works afterwards.
    assert run_call(call)[0].shape == (3, 2, 2048)


def test_nothing_cached_yet() -> None:
    """No rows and no pages: whatever the indices say, every row is empty."""
    arguments = hand_prefill(torch.randn(2, 8, 512), torch.empty(0, 512), torch.zeros(2, 4))
    decode = make_call("decode-extra", s_q=2)
    pages = {name: decode.arguments[name][:0] for name in ("k_cache", "extra_k_cache")}
    for out_fp8, _, *statistics in (FUSED.prefill(**arguments), run_call(decode, **pages)):
        assert bool((out_fp8.view(torch.uint8) & 0x7F == 0).all())
        assert bool((statistics[-1] == float("inf")).all())


@pytest.mark.parametrize("mode", MODES)
def test_int32_and_int64_positions_are_the_same(mode: str) -> None:
    call = make_call(mode)
    wide = run_call(call, token_positions=call.arguments["token_positions"].long())
    assert_same_results(wide, run_call(call))


@pytest.mark.parametrize("mode", MODES)
def test_position_outside_the_table_is_clamped_and_not_read(mode: str) -> None:
    call = make_call(mode)
    parent = torch.full((3 * MAX_POS, 64), float("nan"))
    table = parent[MAX_POS : 2 * MAX_POS]
    table.copy_(rotary_table())
    outside = torch.tensor([MAX_POS, INT32_MAX, -1], dtype=torch.int32)
    inside = torch.tensor([MAX_POS - 1, MAX_POS - 1, 0], dtype=torch.int32)
    assert_same_results(
        run_call(call, cos_sin_cache=table, token_positions=outside),
        run_call(call, cos_sin_cache=table, token_positions=inside),
    )


@pytest.mark.parametrize("mode", MODES)
def test_rows_do_not_depend_on_their_batch_mates(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prefill never does; decode may choose its splits by the batch unless told not to.
    if mode != "prefill":
        monkeypatch.setenv("MLACAST_BATCH_INVARIANT", "1")
    call = make_call(mode, s_q=5, lengths=True)
    together = run_call(call)
    per_row = ["token_positions", "q", "indices", "indices_in_kvcache", "topk_length"]
    per_row += ["extra_indices_in_kvcache", "extra_topk_length"]
    for token in range(5):
        alone = run_call(
            call,
            **{
                name: call.arguments[name][token : token + 1]
                for name in per_row
                if call.arguments.get(name) is not None
            },
        )
        for one, other in zip(alone, together, strict=True):
            assert_same_bits(one, other[token : token + 1])


@pytest.mark.parametrize("mode", MODES)
def test_strides_of_the_inputs_are_honoured(mode: str) -> None:
    call = make_call(mode)
    q = call.arguments["q"]
    wide = torch.full((3, 8 * 512 + 128), float("nan")).bfloat16()
    wide[:, : 8 * 512] = q.flatten(1)
    strided = {"q": wide.as_strided(q.shape, (8 * 512 + 128, 512, 1))}
    for name in ("indices", "indices_in_kvcache", "extra_indices_in_kvcache"):
        if call.arguments.get(name) is not None:
            parent = torch.full((3, 20), 1, dtype=torch.int32)
            parent[:, :12] = index_rows(call, name)
            shape = call.arguments[name].shape
            strided[name] = parent.as_strided(shape, (20, *[12] * (len(shape) - 2), 1))
    assert_same_results(run_call(call, **strided), run_call(call))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("mode", MODES[1:])
def test_bytes_may_come_under_any_one_byte_dtype(mode: str, dtype: torch.dtype) -> None:
    call = make_call(mode)
    viewed = {
        name: call.arguments[name].view(dtype)
        for name in ("k_cache", "extra_k_cache")
        if call.arguments[name] is not None
    }
    assert_same_results(run_call(call, **viewed), run_call(call))


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 10, 63, 64])
@pytest.mark.parametrize("layout", [V4, V41], ids=["584", "528"])
def test_page_size_and_page_padding_do_not_matter(layout: RecordLayout, page_size: int) -> None:
    """The same ten tokens in pages of any size, with any distance between pages: the same bits."""
    call = decode_call(FusedCase("pages", s_q=2, topk=10, caches=(layout,)))
    records = draw_records(layout, 10)
    pages = -(-10 // page_size)
    results = []
    for padding in (0, 576):
        stride = page_size * layout.token_bytes + padding
        flat = torch.full((pages * stride,), 0xFF, dtype=torch.uint8)
        put_records(flat, layout, page_size, stride, 0, list(range(10)), records)
        width = layout.token_bytes
        cache = flat.as_strided((pages, page_size, 1, width), (stride, width, width, 1))
        indices = torch.arange(10, dtype=torch.int32).expand(2, -1).contiguous()
        results.append(run_call(call, k_cache=cache, indices_in_kvcache=indices))
    assert_same_results(results[1], results[0])
    one_page = torch.full((10 * layout.token_bytes,), 0xFF, dtype=torch.uint8)
    put_records(one_page, layout, 10, one_page.numel(), 0, list(range(10)), records)
    whole = one_page.view(1, 10, 1, layout.token_bytes)
    indices = torch.arange(10, dtype=torch.int32).expand(2, -1).contiguous()
    assert_same_results(results[0], run_call(call, k_cache=whole, indices_in_kvcache=indices))


def test_inputs_are_left_alone() -> None:
    call = make_call("decode-extra")
    before = {k: v.clone() for k, v in call.arguments.items() if isinstance(v, Tensor)}
    run_call(call)
    for name, tensor in before.items():
        assert_same_bits(call.arguments[name], tensor)


def test_placement_is_read_at_each_call() -> None:
    call = make_call("decode-extra")
    footer = run_call(call)
    flash_mla.set_v41_placement("inline")
    inline = run_call(call)
    assert not torch.equal(inline[-1], footer[-1])
    flash_mla.set_v41_placement("footer")
    assert_same_results(run_call(call), footer)


@pytest.mark.parametrize("placement", ["Footer", "page", "", None])
def test_unknown_placement_is_refused(placement: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"placement must .*footer.*inline.*got"):
        flash_mla.set_v41_placement(placement)

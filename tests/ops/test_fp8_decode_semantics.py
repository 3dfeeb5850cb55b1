"""What only the decodes take: e4m3 queries, scales on the device, a query that comes rotated."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.ops.rejections import (
    Rejection,
    assert_rejected,
    good_decode,
    good_dense,
    of,
    poisoned,
    rejection_id,
    wrong_arguments,
)
from tests.oracles import AttentionOracle
from tests.scenarios import CacheCase, draw_indices, indices_of, lengths_of, used_rows

FP8 = mlacast.KvFormat.FP8
E4M3 = torch.float8_e4m3fn


def _query(*shape: int) -> Tensor:
    return torch.randn(shape).to(E4M3)


def _scaled(plain: AttentionOracle, factor: float) -> AttentionOracle:
    return dataclasses.replace(
        plain, out=plain.out * factor, out_error=plain.out_error * abs(factor) * (1 + 2.0**-20)
    )


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize(("d_qk", "page_size"), [(576, 53), (576, 1), (512, 5)])
def test_sparse_decode_of_codes(
    d_qk: int, page_size: int, on_device: bool, num_splits: int, backend: str
) -> None:
    pages = -(-20 // page_size)
    indices, lengths = draw_indices(4, 24, pages * page_size), lengths_of(24, 0, 7, 40)
    used = sorted(used_rows(indices, pages * page_size, lengths))
    filled = CacheCase("FP8", d_qk).fill(num_pages=pages, page_size=page_size, slots=used)
    q, sink = _query(4, 3, d_qk), torch.tensor([0.5, -float("inf"), 2.0])
    scales: dict[str, Any] = {"sm_scale": 0.03125, "v_scale": -2.75}
    if on_device:
        scales = {"sm_scale": torch.tensor([0.03125]), "v_scale": torch.tensor(-2.75)}
    out, lse = mlacast.sparse_mla_decode(
        q,
        filled.cache,
        indices,
        kv_format=FP8,
        topk_length=lengths,
        attn_sink=sink,
        num_splits=num_splits,
        backend=backend,
        **scales,
    )
    selected = oracles.select_rows(filled.rows, indices, lengths)
    plain = oracles.attend(q.float(), selected, sm_scale=0.03125, attn_sink=sink)
    oracles.assert_matches(out, lse, _scaled(plain, -2.75))


@pytest.mark.parametrize("cache", ["FP8", "BF16"])
def test_dense_decode_with_scales(cache: str, backend: str) -> None:
    page_table, seq_lens = indices_of([[2, 0], [1, 1]]), lengths_of(5, 2)
    filled = CacheCase(cache, 576).fill(num_pages=3, page_size=3, slots=[6, 7, 8, 0, 1, 3, 4])
    q = _query(2, 2, 2, 576) if cache == "FP8" else oracles.exact_queries(2, 2, 2, 576)
    out, lse = mlacast.dense_mla_decode(
        q,
        filled.cache,
        page_table,
        seq_lens,
        kv_format=mlacast.KvFormat.from_name(cache),
        sm_scale=torch.tensor(0.0625),
        v_scale=0.375,
        backend=backend,
    )
    seen = ((6, 7, 8, 0), (6, 7, 8, 0, 1), (3,), (3, 4))
    selected = [filled.rows[list(slots)].double() for slots in seen]
    plain = oracles.attend(q.float().flatten(0, 1), selected, sm_scale=0.0625)
    expected = _scaled(plain, 0.375)
    oracles.assert_matches(oracles.plain(out).flatten(0, 1), lse.flatten(0, 1), expected)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16], ids=["e4m3", "bf16"])
def test_a_query_that_comes_rotated(dtype: torch.dtype, pairing: str, backend: str) -> None:
    filled = CacheCase("FP8", 512).fill(num_pages=2, page_size=5, slots=range(10))
    indices, positions = draw_indices(3, 9, 10), torch.tensor([3, -1, 99])
    table, q = oracles.exact_rope_table(6), torch.randn(3, 2, 512).to(dtype)
    out, lse = mlacast.sparse_mla_decode(
        q,
        filled.cache,
        indices,
        kv_format=FP8,
        sm_scale=0.02,
        rope=mlacast.Rope(table, positions, pairing, rotate_query=False),
        backend=backend,
    )
    plain = oracles.attend(q.float(), oracles.select_rows(filled.rows, indices), sm_scale=0.02)
    turned = plain.out.clone()
    for token, row in enumerate((3, 0, 5)):
        for head in range(2):
            turned[token, head, 448:] = oracles.rotate(
                plain.out[token, head, 448:], table[row], pairing, inverse=True
            )
    expected = dataclasses.replace(plain, out=turned, out_error=plain.out_error * 2)
    oracles.assert_matches(out, lse, expected)


def test_the_scale_of_the_values_comes_before_the_cast(backend: str) -> None:
    """Quantised output holds the scaled values, and no bfloat16 rounding comes in between."""
    filled = CacheCase("FP8", 512).fill(num_pages=1, page_size=8, slots=range(8))
    q, indices = _query(2, 4, 512), draw_indices(2, 6, 8, invalid=0.0)
    options: dict[str, Any] = {"kv_format": FP8, "sm_scale": 0.05, "backend": backend}
    buffer, _ = mlacast.sparse_mla_decode(
        q, filled.cache, indices, v_scale=7.0, out_format=mlacast.Fp8Group(128), **options
    )
    exact, _ = mlacast.reference.sparse_mla_decode(
        q, filled.cache, indices, kv_format=FP8, sm_scale=0.05, v_scale=1.0
    )
    assert isinstance(buffer, mlacast.QuantizedTensor)
    expected = mlacast.quantize_output((exact * 7.0).flatten(1), mlacast.Fp8Group(128))
    assert oracles.same_bits(buffer.data.flatten(1), expected.data.flatten(1))


def _good_fp8_decode() -> dict[str, Any]:
    """A correct call over two FP8 pools with every scale on the device."""
    return {
        **good_decode(),
        "q": _query(3, 2, 512),
        "k_cache": FP8.allocate(2, 4, d_qk=512),
        "kv_format": FP8,
        "extra_k_cache": FP8.allocate(3, 2, d_qk=512),
        "extra_kv_format": FP8,
        "sm_scale": torch.ones(1),
        "v_scale": torch.ones(()),
        "rope": mlacast.Rope(
            torch.zeros(5, 64), torch.zeros(3, dtype=torch.int32), rotate_query=False
        ),
    }


SCALES = tuple(
    rejection
    for name in ("sm_scale", "v_scale")
    for rejection in (
        Rejection(f"{name}_of_two", {name: torch.ones(2)}, name, "one element", r"shape \[2\]"),
        Rejection(
            f"{name}_of_rank_2", {name: torch.ones(1, 1)}, name, "one element", r"shape \[1, 1\]"
        ),
        Rejection(f"{name}_in_float64", {name: torch.ones(1).double()}, name, "float32", "float64"),
        Rejection(
            f"{name}_elsewhere", {name: torch.ones(1, device="meta")}, name, "on cpu", "meta"
        ),
        Rejection(f"{name}_is_text", {name: "1"}, name, "a number", "str", TypeError),
        Rejection(f"{name}_is_none", {name: None}, name, "a number", "NoneType", TypeError),
        Rejection(f"{name}_is_infinite", {name: float("inf")}, name, "be finite", "inf"),
        Rejection(f"{name}_is_nan", {name: float("nan")}, name, "be finite", "nan"),
    )
)
CODES = (
    Rejection(
        "q_in_e5m2", {"q": of(lambda q: q.float().to(torch.float8_e5m2))}, "q", "float8_e4m3fn"
    ),
    Rejection(
        "codes_over_bf16",
        {"kv_format": mlacast.KvFormat.BF16, "k_cache": torch.zeros(2, 4, 1, 512).bfloat16()},
        "kv_format",
        "KvFormat.FP8 for a float8_e4m3fn q",
        "KvFormat.BF16",
    ),
    Rejection(
        "codes_over_an_extra_v4",
        {
            "extra_kv_format": mlacast.KvFormat.V4,
            "extra_k_cache": mlacast.KvFormat.V4.allocate(3, 2),
        },
        "extra_kv_format",
        "KvFormat.FP8 for a float8_e4m3fn q",
        "KvFormat.V4",
    ),
    Rejection(
        "codes_and_norm", {"q_norm_eps": 1e-6}, "q_norm_eps", "be None for a float8_e4m3fn q"
    ),
    Rejection("codes_permuted", {"q_order": "chunk16"}, "q_order", "be 'head' for a float8"),
    Rejection(
        "codes_to_rotate",
        {"rope": mlacast.Rope(torch.zeros(5, 64), torch.zeros(3, dtype=torch.int32))},
        "rope",
        "None or have rotate_query=False for a float8",
    ),
)


@pytest.mark.parametrize("rejection", SCALES + CODES, ids=rejection_id)
def test_wrong_sparse_decodes(rejection: Rejection) -> None:
    arguments = wrong_arguments(_good_fp8_decode(), rejection)
    assert_rejected("sparse_mla_decode", arguments, rejection)


def test_the_sparse_decode_that_the_mistakes_are_put_into_is_accepted() -> None:
    mlacast.sparse_mla_decode(**_good_fp8_decode())


@pytest.mark.parametrize("rejection", (*SCALES, CODES[0]), ids=rejection_id)
def test_wrong_dense_decodes(rejection: Rejection) -> None:
    arguments = wrong_arguments({**good_dense(), "v_scale": 2.0}, rejection)
    assert_rejected("dense_mla_decode", arguments, rejection)


def test_codes_over_a_bf16_cache_of_a_dense_decode_are_refused() -> None:
    arguments = {**good_dense(), "q": _query(2, 1, 2, 576)}
    with pytest.raises(ValueError, match="dense_mla_decode: kv_format must be KvFormat.FP8 for"):
        mlacast.dense_mla_decode(**arguments)


@pytest.mark.parametrize("op", ["sparse_mla_prefill", "sparse_mla_decode"])
def test_only_a_512_wide_decode_takes_a_rotated_query(op: str) -> None:
    rope = mlacast.Rope(torch.zeros(5, 64), torch.zeros(3, dtype=torch.int32), rotate_query=False)
    width = 512 if op == "sparse_mla_prefill" else 576
    arguments: dict[str, Any] = {"rope": rope, "sm_scale": 0.1, "out": poisoned(3, 2, 512)}
    if op == "sparse_mla_decode":
        arguments["kv_format"] = mlacast.KvFormat.BF16
    kv = torch.zeros(8, width).bfloat16()
    cache = kv if op == "sparse_mla_prefill" else kv.view(2, 4, width)
    indices = torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{op}: rope must have rotate_query=True, got False"):
        getattr(mlacast, op)(oracles.exact_queries(3, 2, width), cache, indices, **arguments)


def test_the_needs_of_such_calls_are_explained() -> None:
    arguments = _good_fp8_decode()
    explained = mlacast.explain("sparse_mla_decode", **arguments)
    assert {"q:fp8", "scale:device", "scale:value", "rope:output_only"} <= set(explained.features)
    assert explained.backend == "reference"
    plain = mlacast.explain("sparse_mla_decode", **good_decode())
    assert not {"q:fp8", "scale:device", "scale:value", "rope:output_only"} & set(plain.features)

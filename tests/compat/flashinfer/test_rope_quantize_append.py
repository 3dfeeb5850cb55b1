"""mlacast.compat.flashinfer.rope_quantize_fp8_append_paged_kv_cache: rows, places and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlacast.compat.flashinfer import rope_quantize_fp8_append_paged_kv_cache as append
from tests.compat.flash_mla.test_signatures import described, parameters_of
from tests.rope_quantize_cases import (
    E4M3,
    E5M2,
    RopeQuantizeCase,
    codes,
    draw,
    expected,
)

BF16 = torch.bfloat16
PAGES, PAGE_SIZE = 5, 4
# Request 0 has pages 3 and 1, request 1 page 0, request 2 a page that does not exist, and 4.
# The last entry is of no request; request 3, which is one past the last, does not get it.
ENTRIES = [3, 1, 0, 9, 4, 2]
STARTS = [0, 2, 3, 5]
# Tokens: three ordinary ones, a skipped one, one past the list of pages, one on the page that does
# not exist, one of a request that does not exist, one with a negative place, one on the last page.
REQUESTS = [0, 0, 1, -1, 2, 2, 3, 1, 2]
PLACES = [1, 6, 3, 0, 90, 2, 0, -1, 7]
# Page and entry by hand; None where nothing is written.
WHERE = [(3, 1), (1, 2), (0, 3), None, None, None, None, None, (4, 3)]


def test_signature() -> None:
    pinned = (
        "q_rope, k_rope, q_nope, k_nope, v, cos_sin_cache, pos_ids, paged_kv_cache, kv_indices, "
        "kv_indptr, batch_indices, positions, is_neox=True, quantize_dtype=None, "
        "quant_scale_q=1.0, quant_scale_kv=1.0, page_size=16, kv_layout='NHD', q_rope_out=None, "
        "q_nope_out=None, enable_pdl=False"
    )
    assert described(append) == parameters_of(pinned)


def _poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 0x5A, dtype=torch.uint8).view(dtype)


def _tables(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "kv_indices": torch.tensor(ENTRIES, dtype=dtype),
        "kv_indptr": torch.tensor(STARTS, dtype=dtype),
        "batch_indices": torch.tensor(REQUESTS, dtype=dtype),
        "positions": torch.tensor(PLACES, dtype=dtype),
    }


def _bytes_in_cache(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The cache [pages, page_size, ...] that holds ``rows`` where they belong."""
    cache = torch.full(shape, 0x5A, dtype=torch.uint8)
    for row, where in zip(rows, WHERE, strict=True):
        if where is not None:
            cache[where] = row
    return cache


def _assert_query(out: tuple[Tensor, Tensor], wanted: Tensor, nope: int) -> None:
    """Every row but those of the skipped token; theirs keep what was there."""
    actual = torch.cat((out[1], out[0]), -1).view(torch.uint8).clone()
    assert bool((actual[3] == 0x5A).all())
    actual[3] = wanted[3]
    assert torch.equal(actual, wanted)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_mla(is_neox: bool, index: torch.dtype, kv_layout: str) -> None:
    case = RopeQuantizeCase(pairing="half" if is_neox else "interleaved", index=index)
    inputs = draw(case, tokens=9)
    ckv = _poisoned(PAGES, PAGE_SIZE, 512, dtype=E4M3)
    kpe = _poisoned(PAGES, PAGE_SIZE, 64, dtype=E4M3)
    rope_out, nope_out = (_poisoned(9, 3, width, dtype=E4M3) for width in (64, 512))
    out = append(
        inputs.q[..., 512:],
        inputs.k[..., 512:],
        inputs.q[..., :512],
        inputs.k[..., :512],
        None,
        inputs.table,
        inputs.positions,
        (ckv, kpe),
        **_tables(index),
        is_neox=is_neox,
        quant_scale_q=0.5,
        quant_scale_kv=2.0,
        page_size=PAGE_SIZE,
        kv_layout=kv_layout,
        q_rope_out=rope_out,
        q_nope_out=nope_out,
    )
    assert out[0] is rope_out and out[1] is nope_out
    q_bytes, k_bytes = expected(case, inputs, 0.5, 2.0)
    _assert_query(out, q_bytes, 512)
    assert torch.equal(ckv.view(torch.uint8), _bytes_in_cache(k_bytes[:, :512], ckv.shape))
    assert torch.equal(kpe.view(torch.uint8), _bytes_in_cache(k_bytes[:, 512:], kpe.shape))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_heads_of_keys_and_values(kv_layout: str, dtype: torch.dtype) -> None:
    """A row of the key cache is the rotated dimensions, then the others."""
    case = RopeQuantizeCase(kv_heads=2, rope=12, nope=20, dtype=dtype, inputs=torch.float16)
    inputs = draw(case, tokens=9)
    v = torch.randn(9, 2, 24).half()
    shapes = [(PAGES, PAGE_SIZE, 2, width) for width in (32, 24)]
    caches = []
    for pages, entries, heads, width in shapes:
        if kv_layout == "NHD":
            caches.append(_poisoned(pages, entries, heads, width, dtype=dtype))
        else:
            caches.append(_poisoned(pages, heads, entries, width, dtype=dtype))
    rope_out, nope_out = (_poisoned(9, 3, width, dtype=dtype) for width in (12, 20))
    out = append(
        inputs.q[..., 20:],
        inputs.k[..., 20:],
        inputs.q[..., :20],
        inputs.k[..., :20],
        v,
        inputs.table,
        inputs.positions,
        tuple(caches),
        **_tables(torch.int32),
        quant_scale_kv=2.0,
        page_size=PAGE_SIZE,
        kv_layout=kv_layout,
        q_rope_out=rope_out,
        q_nope_out=nope_out,
    )
    q_bytes, k_bytes = expected(case, inputs, 1.0, 2.0)
    _assert_query(out, q_bytes, 20)
    rope_first = torch.cat((k_bytes[..., 20:], k_bytes[..., :20]), -1)
    for cache, rows, shape in zip(
        caches, (rope_first, codes(v.double(), 2.0, dtype)), shapes, strict=True
    ):
        got = cache.view(torch.uint8)
        got = got if kv_layout == "NHD" else got.transpose(1, 2)
        assert torch.equal(got, _bytes_in_cache(rows, shape))


def test_no_tokens_and_allocated_queries() -> None:
    arguments = _good()
    q_rope_out, q_nope_out = append(**arguments)
    assert (q_rope_out.shape, q_nope_out.dtype) == ((2, 3, 64), E4M3)
    rows = ("q_rope", "k_rope", "q_nope", "k_nope", "pos_ids", "batch_indices", "positions")
    empty = {name: value[:0] if name in rows else value for name, value in arguments.items()}
    assert append(**empty)[0].shape == (0, 3, 64)


def _good() -> dict[str, Any]:
    return {
        "q_rope": torch.zeros(2, 3, 64, dtype=BF16),
        "k_rope": torch.zeros(2, 64, dtype=BF16),
        "q_nope": torch.zeros(2, 3, 512, dtype=BF16),
        "k_nope": torch.zeros(2, 512, dtype=BF16),
        "v": None,
        "cos_sin_cache": torch.zeros(5, 64),
        "pos_ids": torch.zeros(2, dtype=torch.int32),
        "paged_kv_cache": (_poisoned(2, 16, 512, dtype=E4M3), _poisoned(2, 16, 64, dtype=E4M3)),
        "kv_indices": torch.tensor([0, 1], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 2], dtype=torch.int32),
        "batch_indices": torch.zeros(2, dtype=torch.int32),
        "positions": torch.tensor([0, 1], dtype=torch.int32),
    }


def test_a_place_one_past_the_last_page_writes_no_key() -> None:
    """Place 32 is on page entry 2 of two; place 31 is the last that exists."""
    arguments = _good() | {"positions": torch.tensor([32, 31], dtype=torch.int32)}
    append(**arguments)
    ckv, kpe = (cache.view(torch.uint8) for cache in arguments["paged_kv_cache"])
    written = [(cache != 0x5A).flatten(0, 1).any(-1).nonzero().tolist() for cache in (ckv, kpe)]
    assert written == [[[31]], [[31]]]


def _heads() -> dict[str, Any]:
    return {"k_rope": torch.zeros(2, 1, 64, dtype=BF16), "k_nope": None}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cos_sin_cache": torch.zeros(5, 64, dtype=BF16)}, ValueError, "float32, got bfloat16"),
        ({"paged_kv_cache": (torch.zeros(1),)}, ValueError, "two tensors, got 1"),
        ({"paged_kv_cache": torch.zeros(2)}, TypeError, "tuple of two tensors, got Tensor"),
        ({"v": torch.zeros(2, 1, 64, dtype=BF16)}, ValueError, "v must be None"),
        (_heads(), ValueError, "v must be given"),
        (
            {"paged_kv_cache": (torch.empty(2, 16, 1, 512), torch.empty(2, 16, 64))},
            ValueError,
            r"paged_kv_cache\[0\] must have shape \[num_pages, page_size, width\]",
        ),
        (
            {**_heads(), "v": torch.zeros(2, 1, 8, dtype=BF16)},
            ValueError,
            r"paged_kv_cache\[0\] must have shape \[num_pages, page_size, h_kv, width\]",
        ),
        (
            {"quantize_dtype": E5M2},
            ValueError,
            r"paged_kv_cache\[0\] must have dtype float8_e5m2.*got float8_e4m3fn",
        ),
        ({"kv_layout": "HDN"}, KeyError, "kv_layout must be 'NHD' or 'HND', got 'HDN'"),
        ({"page_size": 32}, ValueError, "page_size=32, got"),
        ({"batch_indices": torch.zeros(3, dtype=torch.int32)}, ValueError, "batch_indices .*n=2"),
        ({"positions": torch.zeros(2)}, TypeError, "positions must have dtype int32 or int64"),
        ({"kv_indptr": torch.zeros(0, dtype=torch.int32)}, ValueError, "kv_indptr .*element"),
        ({"quant_scale_kv": torch.ones(1)}, TypeError, "quant_scale_kv must be a host scalar"),
        ({"k_nope": torch.zeros(2, 256, dtype=BF16)}, ValueError, "paged_kv_cache .*k_nope part"),
        ({"quant_scale_q": 10**400}, ValueError, "quant_scale_q must be finite in float32"),
        (
            {
                "paged_kv_cache": (
                    _poisoned(1, 16, 512, dtype=E4M3).expand(2, 16, 512),
                    _poisoned(2, 16, 64, dtype=E4M3),
                )
            },
            ValueError,
            "k_nope part.* must have each element in memory of its own",
        ),
    ],
)
def test_errors_write_nothing(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good = _good()
    with pytest.raises(error, match=f"append_paged_kv_cache: .*{message}"):
        append(**{**good, **change})
    for cache in good["paged_kv_cache"]:
        assert bool((cache.view(torch.uint8) == 0x5A).all())

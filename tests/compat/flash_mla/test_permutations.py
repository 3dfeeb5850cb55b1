"""Weight permutations: rows or 32-column chunks and their scales move together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mlacast.compat import flash_mla
from tests.compat.flash_mla.element_orders import (
    D_V,
    ceil4,
    chunk16_positions,
    chunk32_positions,
    to_chunk16,
)
from tests.compat.flash_mla.hand_calls import dequantised, hand_prefill
from tests.compat.flash_mla.number_grid import power_of_two

FUSED = flash_mla.fused_norm_rope_attn_rope_cast
FP8 = torch.float8_e4m3fn


def packed_mn_major(exponents: Tensor) -> Tensor:
    """Bytes [*, rows, k] -> little-endian int32 [*, rows, ceil(k / 4)], stride 1 along the rows."""
    *lead, rows, count = exponents.shape
    padded = torch.nn.functional.pad(exponents.long(), (0, ceil4(count) - count))
    quads = torch.unflatten(padded, -1, (-1, 4))
    words = (quads << torch.tensor([0, 8, 16, 24])).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    plane = torch.full((*lead, words.shape[-1], ceil4(rows)), 0x5A5A5A5A, dtype=torch.int32)
    view = plane[..., :rows].transpose(-1, -2)
    view.copy_(words)
    return view


def unpacked(words: Tensor, count: int) -> Tensor:
    """int32 [*, rows, n] -> the first ``count`` exponent bytes [*, rows, count] int64."""
    shifts = torch.tensor([0, 8, 16, 24])
    return ((words.long()[..., None] >> shifts) & 0xFF).flatten(-2)[..., :count]


def real_weight(codes: Tensor, words: Tensor, granularity: int) -> Tensor:
    """Float64 value of an fp8 weight [*, columns] with a byte per ``granularity`` columns."""
    count = -(-codes.shape[-1] // granularity)
    scale = power_of_two(unpacked(words, count)).repeat_interleave(granularity, -1)
    return codes.double() * scale[..., : codes.shape[-1]]


def small_integers(*shape: int, bound: int = 4) -> Tensor:
    """Integers that e4m3 holds exactly, as e4m3."""
    return torch.randint(-bound, bound + 1, shape).float().to(FP8)


def exponents(*shape: int) -> Tensor:
    """Scale bytes of 1, 2 and 4."""
    return torch.randint(127, 130, shape)


@dataclass(frozen=True)
class QueryCase:
    id: str
    h_q: int = 8
    rank: int = 256
    granularity: int = 32


QUERY_CASES = (
    QueryCase("gran-32"),
    QueryCase("gran-128", granularity=128),
    QueryCase("gran-128-one-scale", rank=96, granularity=128),
    QueryCase("gran-32-odd-count", rank=160),
    QueryCase("24-heads", h_q=24, rank=64),
    QueryCase("64-heads-gran-128", h_q=64, rank=640, granularity=128),
)


def query_weight(case: QueryCase) -> tuple[Tensor, Tensor]:
    rows = case.h_q * D_V
    weight = small_integers(rows, case.rank)
    scales = exponents(rows, -(-case.rank // case.granularity))
    return weight, packed_mn_major(scales)


@pytest.mark.parametrize("case", QUERY_CASES, ids=lambda case: case.id)
def test_permuted_query_projection_gives_chunk16(case: QueryCase) -> None:
    weight, words = query_weight(case)
    saved = weight.clone(), words.clone()
    permuted, permuted_words = FUSED.permute_q_b_proj((weight, words), case.h_q, D_V)
    assert permuted.shape == weight.shape
    assert permuted.dtype == FP8
    assert permuted_words.shape == words.shape
    assert permuted_words.dtype == torch.int32
    assert permuted_words.stride() == (1, ceil4(case.h_q * D_V))

    tokens = torch.randint(-3, 4, (3, case.rank)).double()
    natural = (tokens @ real_weight(weight, words, case.granularity).T).view(3, case.h_q, D_V)
    # Integers far below 2**53: both products are exact in any order.
    projected = tokens @ real_weight(permuted, permuted_words, case.granularity).T
    assert torch.equal(projected.view(3, case.h_q, D_V), to_chunk16(natural))
    assert torch.equal(weight.view(torch.uint8), saved[0].view(torch.uint8))
    assert torch.equal(words, saved[1])


def test_query_rows_move_to_their_positions() -> None:
    """Row h * 512 + d goes to (d // 16) * (h_q * 16) + h * 16 + d % 16 with all bytes and words."""
    h_q = 8
    codes = torch.randint(0, 256, (h_q * D_V, 16), dtype=torch.uint8)
    words = packed_mn_major(torch.randint(0, 256, (h_q * D_V, 5)))
    permuted, permuted_words = FUSED.permute_q_b_proj((codes.view(FP8), words), h_q, D_V)
    target = chunk16_positions(h_q).flatten()
    assert torch.equal(permuted.view(torch.uint8)[target], codes)
    assert torch.equal(permuted_words[target], words)


@dataclass(frozen=True)
class ValueCase:
    id: str
    groups: int = 2
    w: int = 8
    d_out: int = 8
    granularity: int = 32

    @property
    def columns(self) -> int:
        return self.w * D_V


VALUE_CASES = (
    ValueCase("gran-32"),
    ValueCase("gran-128", granularity=128),
    ValueCase("gran-64", granularity=64),
    ValueCase("gran-32-odd-rows", d_out=6),
    ValueCase("gran-128-odd-rows-w3", w=3, d_out=5, granularity=128),
    ValueCase("one-head", w=1, d_out=4, granularity=128),
    ValueCase("one-group-w12", groups=1, w=12),
    ValueCase("eight-groups-w16", groups=8, w=16, d_out=1, granularity=128),
)


def value_weight(case: ValueCase) -> tuple[Tensor, Tensor]:
    weight = small_integers(case.groups, case.d_out, case.columns)
    scales = exponents(case.groups, case.d_out, case.columns // case.granularity)
    return weight, packed_mn_major(scales)


@pytest.mark.parametrize("case", VALUE_CASES, ids=lambda case: case.id)
def test_permuted_value_projection_consumes_chunk32(case: ValueCase) -> None:
    weight, words = value_weight(case)
    saved = weight.clone(), words.clone()
    permuted, permuted_words = FUSED.permute_wv_proj((weight, words), case.w, D_V)
    assert permuted.shape == weight.shape
    assert permuted.dtype == FP8
    # Whatever came in, scales come back per 32 columns.
    assert permuted_words.shape == (case.groups, case.d_out, case.columns // 32 // 4)
    assert permuted_words.dtype == torch.int32
    assert permuted_words.stride(1) == 1
    assert permuted_words.stride(2) >= case.d_out
    assert permuted_words.stride(0) >= permuted_words.shape[2] * permuted_words.stride(2)

    natural = torch.randint(-3, 4, (3, case.groups, case.w, D_V)).double()
    expected = torch.einsum(
        "tgk,gdk->tgd", natural.flatten(2), real_weight(weight, words, case.granularity)
    )
    chunked = torch.empty_like(natural).flatten(2)
    chunked[:, :, chunk32_positions(case.w)] = natural
    actual = torch.einsum("tgk,gdk->tgd", chunked, real_weight(permuted, permuted_words, 32))
    assert torch.equal(actual, expected)
    assert torch.equal(weight.view(torch.uint8), saved[0].view(torch.uint8))
    assert torch.equal(words, saved[1])


@pytest.mark.parametrize("granularity", [32, 128])
@pytest.mark.parametrize("groups", [1, 2])
def test_both_permutations_around_the_fused_step(groups: int, granularity: int) -> None:
    """Chunk16 query, attention, chunk32 output, projection: as in natural order throughout."""
    h_q, rank, d_out, s_q = 8, 128, 4, 3
    w = h_q // groups
    query_codes, query_words = query_weight(QueryCase("q", h_q, rank, granularity))
    value_codes, value_words = value_weight(ValueCase("v", groups, w, d_out, granularity))
    tokens = torch.randint(-1, 2, (s_q, rank)).double()
    kv = torch.randn(12, D_V)
    indices = torch.randint(0, 12, (s_q, 6))

    def attended(q: Tensor) -> tuple[Tensor, Tensor]:
        """Fused output of a query that is already in chunk16 order."""
        arguments = hand_prefill(torch.zeros(s_q, h_q, D_V), kv, indices, n_wv_group=groups)
        arguments |= {"q": q.bfloat16(), "sm_scale": 2.0**-12}
        out_fp8, out_sf, _, _ = FUSED.prefill(**arguments)
        return out_fp8, out_sf

    permuted_q, permuted_q_words = FUSED.permute_q_b_proj((query_codes, query_words), h_q, D_V)
    projected = tokens @ real_weight(permuted_q, permuted_q_words, granularity).T
    natural = (tokens @ real_weight(query_codes, query_words, granularity).T).view(s_q, h_q, D_V)
    out_fp8, out_sf = attended(projected.view(s_q, h_q, D_V))
    from_natural = attended(to_chunk16(natural))
    assert torch.equal(out_fp8.view(torch.uint8), from_natural[0].view(torch.uint8))
    assert torch.equal(out_sf, from_natural[1])

    head_order = dequantised(out_fp8, out_sf, groups, h_q).view(s_q, groups, w * D_V)
    expected = torch.einsum(
        "tgk,gdk->tgd", head_order, real_weight(value_codes, value_words, granularity)
    )
    permuted_v, permuted_v_words = FUSED.permute_wv_proj((value_codes, value_words), w, D_V)
    position = torch.arange(w * 16)
    bytes_in_place = (out_sf.long()[..., position // 4] >> (8 * (position % 4))) & 0xFF
    in_place = out_fp8.double() * power_of_two(bytes_in_place).repeat_interleave(32, -1)
    actual = torch.einsum("tgk,gdk->tgd", in_place, real_weight(permuted_v, permuted_v_words, 32))
    # The same products in another order, in float64.
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def row_major(words: Tensor) -> Tensor:
    return words.contiguous()


BadPair = Callable[[Tensor, Tensor], Any]
BAD_PAIRS = (
    pytest.param(lambda w, s: w, r"weight_and_sf must ", id="no-pair"),
    pytest.param(lambda w, s: (w, None), r"must .*got .*None", id="no-scales"),
    pytest.param(
        lambda w, s: (w.float(), s), r"must .*float8_e4m3fn.*got float32", id="float-weight"
    ),
    pytest.param(
        lambda w, s: (w, s.float()), r"must .*int32.*got float32; each row", id="float-scales"
    ),
    pytest.param(lambda w, s: (w, row_major(s)), r"must .*got ", id="row-major-scales"),
    pytest.param(lambda w, s: (w, s[..., :-1, :]), r"must .*got ", id="scale-rows-missing"),
    pytest.param(lambda w, s: (w[..., :-1, :], s), r"must .*got ", id="weight-rows-missing"),
    pytest.param(lambda w, s: (w.flatten(), s), r"must .*got ", id="flat-weight"),
)


@pytest.mark.parametrize(("make", "match"), BAD_PAIRS)
def test_bad_query_weight_is_refused(make: BadPair, match: str) -> None:
    weight, words = query_weight(QueryCase("bad"))
    with pytest.raises((TypeError, ValueError), match=rf"permute_q_b_proj: .*{match}"):
        FUSED.permute_q_b_proj(make(weight, words), 8, D_V)


@pytest.mark.parametrize(("make", "match"), BAD_PAIRS)
def test_bad_value_weight_is_refused(make: BadPair, match: str) -> None:
    weight, words = value_weight(ValueCase("bad"))
    with pytest.raises((TypeError, ValueError), match=rf"permute_wv_proj: .*{match}"):
        FUSED.permute_wv_proj(make(weight, words), 8, D_V)


def test_sizes_that_do_not_fit_the_weight_are_refused() -> None:
    query, value = query_weight(QueryCase("bad")), value_weight(ValueCase("bad"))
    with pytest.raises(ValueError, match=r"permute_q_b_proj: .*8192.*got .*4096"):
        FUSED.permute_q_b_proj(query, 16, D_V)
    with pytest.raises(ValueError, match=r"permute_wv_proj: .*8192.*got .*4096"):
        FUSED.permute_wv_proj(value, 16, D_V)

"""Merging partial results of which some, or all, saw no key.

BC-05, vllm-project/vllm#39148 (also flashinfer-ai/flashinfer#4051, Dao-AILab/flash-attention#978):
max(-inf, -inf) gave NaN, a +inf marker took all the weight, and zero times a NaN partial poisoned
the sum.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles

ORDERS = list(itertools.permutations(range(4)))


def _parts() -> tuple[list[Tensor], list[Tensor]]:
    """Four partials over six rows and two heads.

    Row 0 all live, 1 one empty, 2 three empty, 3 all empty, 4 an empty part with NaN output, 5 lses
    -60000 and +80.
    """
    outs = [torch.randn(6, 2, 512).bfloat16() for _ in range(4)]
    lses = [torch.randn(6, 2) for _ in range(4)]
    lses[2][1] = -math.inf
    for part in (0, 1, 3):
        lses[part][2] = -math.inf
        outs[part][2] = math.nan
    for part in range(4):
        lses[part][3] = math.inf if part == 1 else -math.inf
        outs[part][3] = math.nan
    lses[1][4], outs[1][4] = math.inf, math.nan
    lses[0][5], lses[1][5] = -60000.0, 80.0
    return outs, lses


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join(map(str, order)))
def test_every_order_of_the_parts_matches_float64(order: tuple[int, ...], backend: str) -> None:
    outs, lses = _parts()
    expected_out, expected_lse = oracles.merge_parts(outs, lses)
    out, lse = mlacast.merge_attention_states(
        [outs[part] for part in order],
        [lses[part] for part in order],
        lse_layout="th",
        backend=backend,
    )
    assert isinstance(out, Tensor)
    assert not out.isnan().any() and not lse.isnan().any()
    # Weights exp(lse - max) of lses below 128 in size: exponent error 128 u, a few u more; |out| <
    # 8; half a bf16 ulp on top.
    allowed = 2.0**-8 * expected_out.abs() + 2 * 160 * 2.0**-24 * 8
    assert bool(((out.double() - expected_out).abs() <= allowed).all())
    finite = expected_lse.isfinite()
    assert torch.equal(lse[~finite].double(), expected_lse[~finite])
    assert bool(((lse[finite].double() - expected_lse[finite]).abs() <= 160 * 2.0**-24).all())


def test_only_empty_parts_give_zero_and_the_empty_marker(backend: str) -> None:
    outs, lses = _parts()
    out, lse = mlacast.merge_attention_states(outs, lses, lse_layout="th", backend=backend)
    assert isinstance(out, Tensor)
    assert not out[3].any()
    assert lse[3].tolist() == [-math.inf] * 2


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join(map(str, order)))
def test_one_live_part_comes_back_bit_for_bit(order: tuple[int, ...], backend: str) -> None:
    outs, lses = _parts()
    out, lse = mlacast.merge_attention_states(
        [outs[part] for part in order],
        [lses[part] for part in order],
        lse_layout="th",
        backend=backend,
    )
    assert isinstance(out, Tensor)
    assert oracles.same_bits(out[2], outs[2][2])
    assert oracles.same_bits(lse[2], lses[2][2])


@pytest.mark.parametrize("marker", [-math.inf, math.inf], ids=["minus_inf", "plus_inf"])
@pytest.mark.parametrize("garbage", [0.0, 1e30, math.nan, math.inf], ids=str)
def test_an_empty_part_is_the_identity_whatever_its_output_holds(
    garbage: float, marker: float, backend: str
) -> None:
    live, lse = torch.randn(3, 2, 512).bfloat16(), torch.randn(3, 2)
    # Bit for bit holds for zeros of either sign too.
    live[0, :, :8], live[1, 1, 8:16] = -0.0, 0.0
    empty = torch.full((3, 2, 512), garbage).bfloat16()
    for outs, lses in (
        ([live, empty], [lse, torch.full((3, 2), marker)]),
        ([empty, live], [torch.full((3, 2), marker), lse]),
    ):
        out, merged = mlacast.merge_attention_states(outs, lses, lse_layout="th", backend=backend)
        assert oracles.same_bits(out, live)
        assert oracles.same_bits(merged, lse)


def test_the_sides_of_two_ranks_merge_like_one_attention(backend: str) -> None:
    """Keys split by slot parity between two simulated ranks, each attending alone, merged in either
    order.
    """
    kv, q = torch.randn(16, 512).bfloat16(), oracles.exact_queries(5, 2, 512)
    indices = torch.randint(0, 16, (5, 12), dtype=torch.int32)
    indices[0] = torch.arange(0, 24, 2) % 16
    indices[4] = -1
    whole = oracles.attend(q, oracles.select_rows(kv, indices), sm_scale=0.02)
    outs, lses = [], []
    for rank in range(2):
        local = torch.where(
            (indices % 2 == rank) & (indices >= 0), indices, torch.full_like(indices, -1)
        )
        out, _, lse = mlacast.reference.sparse_mla_prefill(q, kv, local, sm_scale=0.02)
        outs.append(out)
        lses.append(lse)
    for order in ((0, 1), (1, 0)):
        out, lse = mlacast.merge_attention_states(
            [outs[rank] for rank in order],
            [lses[rank] for rank in order],
            lse_layout="th",
            backend=backend,
        )
        oracles.assert_matches(out, lse, whole)

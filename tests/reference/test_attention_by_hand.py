"""Reference attention against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mlacast import KvFormat, Rope, reference
from tests.scenarios import indices_of, lengths_of, one_hot_rows

LN2, LN3 = math.log(2.0), math.log(3.0)
# Rounding of a few sums and exponentials of numbers below 100 in float64, 1e-14 each.
FLOAT64 = 1e-12


def _row(**elements: float) -> Tensor:
    """One zero row [1, 512] with the named elements set: ``_row(e3=2.0)``."""
    row = torch.zeros(1, 512, dtype=torch.bfloat16)
    for name, value in elements.items():
        row[0, int(name[1:])] = value
    return row


def _query(**elements: float) -> Tensor:
    """One token, one head [1, 1, 512]."""
    return _row(**elements).unsqueeze(0)


def test_one_key_returns_its_value_and_its_logit() -> None:
    kv = torch.randn(3, 512).bfloat16()
    q = torch.randn(1, 1, 512).bfloat16()
    out, max_logits, lse = reference.sparse_mla_prefill(q, kv, indices_of([[2]]), sm_scale=0.5)
    assert torch.equal(out[0, 0], kv[2].float())
    logit = 0.5 * sum(a * b for a, b in zip(q[0, 0].tolist(), kv[2].tolist(), strict=True))
    # 512 products in float32: about sqrt(512) * 2**-24 * sum|q k|, below 5e-4 by a wide margin.
    assert float(lse) == pytest.approx(logit, abs=5e-4)
    assert float(max_logits) == pytest.approx(logit, abs=5e-4)


def test_two_logits_zero_and_ln3_weigh_one_to_three() -> None:
    kv = torch.cat((_row(e1=4.0), _row(e0=1.0, e2=8.0)))
    out, max_logits, lse = reference.sparse_mla_prefill(
        _query(e0=1.0), kv, indices_of([[0, 1]]), sm_scale=LN3, compute_dtype=torch.float64
    )
    assert out[0, 0, :3].tolist() == pytest.approx([0.75, 1.0, 6.0], abs=FLOAT64)
    assert float(lse) == pytest.approx(math.log(4.0), abs=FLOAT64)
    assert float(max_logits) == pytest.approx(LN3, abs=FLOAT64)


def test_a_repeated_index_counts_each_time() -> None:
    kv = torch.cat((_row(e0=3.0), _row(e1=3.0)))
    out, _, lse = reference.sparse_mla_prefill(
        _query(), kv, indices_of([[0, 1, 0]]), sm_scale=1.0, compute_dtype=torch.float64
    )
    assert out[0, 0, :2].tolist() == pytest.approx([2.0, 1.0], abs=FLOAT64)
    assert float(lse) == pytest.approx(LN3, abs=FLOAT64)


@pytest.mark.parametrize(
    ("sink", "share"),
    [(0.0, 1 / 2), (LN3, 1 / 4), (-math.inf, 1.0), (math.inf, 0.0)],
    ids=["0", "ln3", "-inf", "+inf"],
)
def test_the_sink_joins_the_denominator_only(sink: float, share: float) -> None:
    out, max_logits, lse = reference.sparse_mla_prefill(
        _query(),
        _row(e5=8.0),
        indices_of([[0]]),
        sm_scale=1.0,
        attn_sink=torch.tensor([sink]),
        compute_dtype=torch.float64,
    )
    # The sink reaches the call as float32: ln 3 is off by up to 2**-24.
    assert float(out[0, 0, 5]) == pytest.approx(8.0 * share, abs=1e-6)
    assert (float(lse), float(max_logits)) == (0.0, 0.0)


@pytest.mark.parametrize(
    "sink", [None, 0.0, math.inf, -math.inf], ids=["none", "0", "+inf", "-inf"]
)
def test_an_empty_row_gives_zeros_and_minus_infinity_with_any_sink(sink: float | None) -> None:
    attn_sink = None if sink is None else torch.tensor([sink])
    kv = torch.full((2, 512), math.nan, dtype=torch.bfloat16)
    out, max_logits, lse = reference.sparse_mla_prefill(
        _query(e0=1.0), kv, indices_of([[-1, 2]]), sm_scale=1.0, attn_sink=attn_sink
    )
    assert torch.equal(out, torch.zeros(1, 1, 512))
    assert (float(lse), float(max_logits)) == (-math.inf, -math.inf)


@pytest.mark.parametrize(("eps", "factor"), [(0.0, 1 / 2), (5.0, 1 / 3)])
def test_norm_divides_the_logit_by_the_root_mean_square(eps: float, factor: float) -> None:
    # Every element is 2, so the mean square is 4; eps = 5 makes it 9.
    q = torch.full((1, 1, 512), 2.0, dtype=torch.bfloat16)
    out, max_logits, lse = reference.sparse_mla_prefill(
        q,
        _row(e0=3.0),
        indices_of([[0]]),
        sm_scale=1.0,
        q_norm_eps=eps,
        compute_dtype=torch.float64,
    )
    assert float(lse) == pytest.approx(6.0 * factor, abs=FLOAT64)
    assert float(max_logits) == pytest.approx(6.0 * factor, abs=FLOAT64)
    assert float(out[0, 0, 0]) == 3.0


def test_norm_is_taken_per_head_and_before_the_rotation() -> None:
    # Head 0 has mean square 1, head 1 has 16. The table doubles the rope part, which must not enter
    # the norm.
    q = torch.ones(1, 2, 512, dtype=torch.bfloat16)
    q[0, 1] = 4.0
    table = torch.zeros(1, 64)
    table[0, :32] = 2.0
    rope = Rope(table, torch.zeros(1, dtype=torch.int32))
    _, _, lse = reference.sparse_mla_prefill(
        q,
        _row(e511=1.0),
        indices_of([[0]]),
        sm_scale=1.0,
        q_norm_eps=0.0,
        rope=rope,
        compute_dtype=torch.float64,
    )
    assert lse[0].tolist() == pytest.approx([2.0, 2.0], abs=FLOAT64)


def test_the_rotated_query_is_rounded_to_bf16() -> None:
    # cos = 1, sin = 2**-9 turns the pair (1, 1) into (1 - 2**-9, 1 + 2**-9); both round to 1 (ties
    # to even below, nearest above), so the logit reads exactly 1.
    table = torch.zeros(1, 64)
    table[0, :32], table[0, 32:] = 1.0, 2.0**-9
    rope = Rope(table, torch.zeros(2, dtype=torch.int32))
    q = torch.ones(2, 1, 512, dtype=torch.bfloat16)
    keys = one_hot_rows(2, 512, 448, 449)
    _, _, lse = reference.sparse_mla_prefill(
        q, keys, indices_of([[0], [1]]), sm_scale=1.0, rope=rope, compute_dtype=torch.float64
    )
    assert lse.flatten().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_the_output_is_rotated_back_for_512(pairing: str) -> None:
    table = torch.cat((torch.zeros(1, 32), torch.ones(1, 32)), 1)
    rope = Rope(table, torch.zeros(1, dtype=torch.int64), pairing=pairing)
    kv = torch.arange(512, dtype=torch.float32).view(1, 512).bfloat16()
    kv[0, 448:] = torch.arange(64)
    out, _, _ = reference.sparse_mla_prefill(
        _query(), kv, indices_of([[0]]), sm_scale=1.0, rope=rope
    )
    assert torch.equal(out[0, 0, :448], kv[0, :448].float())
    # With cos = 0, sin = 1 the inverse maps the pair (a, b) to (b, -a).
    tail = out[0, 0, 448:].tolist()
    if pairing == "interleaved":
        assert tail == [value for i in range(0, 64, 2) for value in (i + 1.0, -float(i))]
    else:
        assert tail == [i + 32.0 for i in range(32)] + [-float(i) for i in range(32)]


def test_the_output_is_never_rotated_back_for_576() -> None:
    table = torch.cat((torch.zeros(1, 32), torch.ones(1, 32)), 1)
    rope = Rope(table, torch.zeros(1, dtype=torch.int32))
    kv = torch.randn(1, 576).bfloat16()
    q = torch.zeros(1, 1, 576, dtype=torch.bfloat16)
    q[0, 0, 512:] = torch.arange(64)
    kv[0, 512:] = 0
    kv[0, 514] = 1.0
    out, _, lse = reference.sparse_mla_prefill(q, kv, indices_of([[0]]), sm_scale=1.0, rope=rope)
    assert torch.equal(out[0, 0], kv[0, :512].float())
    # Element 2 of the rotated rope part is 2*cos - 3*sin = -3.
    assert float(lse) == -3.0


def test_topk_length_is_clamped_to_the_list() -> None:
    kv = torch.cat((_row(e0=2.0), _row(e1=2.0)))
    q = torch.zeros(4, 1, 512, dtype=torch.bfloat16)
    out, _, lse = reference.sparse_mla_prefill(
        q,
        kv,
        indices_of([[0, 1]] * 4),
        sm_scale=1.0,
        topk_length=lengths_of(-1, 0, 1, 9),
        compute_dtype=torch.float64,
    )
    assert lse.flatten().tolist() == pytest.approx([-math.inf, -math.inf, 0.0, LN2], abs=FLOAT64)
    assert out[:, 0, :2].tolist() == [[0.0, 0.0], [0.0, 0.0], [2.0, 0.0], [1.0, 1.0]]


def test_chunk16_queries_are_read_in_the_permuted_order() -> None:
    # Two heads: in the flat token, index 16..31 holds d = 0..15 of head 1 and index 32 holds d = 16
    # of head 0.
    flat = torch.zeros(1024, dtype=torch.bfloat16)
    flat[16 + 3], flat[32] = 5.0, 7.0
    keys = one_hot_rows(2, 512, 3, 16)
    _, _, lse = reference.sparse_mla_prefill(
        flat.view(1, 2, 512).expand(2, 2, 512),
        keys,
        indices_of([[0], [1]]),
        sm_scale=1.0,
        q_order="chunk16",
    )
    assert lse.tolist() == [[0.0, 5.0], [7.0, 0.0]]


def test_results_come_in_the_dtype_asked_for() -> None:
    kv, q = torch.randn(4, 512).bfloat16(), torch.randn(2, 3, 512).bfloat16()
    indices = indices_of([[0, 1], [2, 3]])
    for dtype in (torch.float32, torch.float64):
        out, _, _ = reference.sparse_mla_prefill(q, kv, indices, sm_scale=0.1, compute_dtype=dtype)
        assert out.dtype == dtype
    out, _, _ = reference.sparse_mla_prefill(q, kv, indices, sm_scale=0.1)
    assert out.dtype == torch.float32


def test_decode_joins_both_caches_in_one_softmax() -> None:
    main, extra = (
        torch.zeros(1, 2, 1, 512, dtype=torch.bfloat16),
        torch.zeros(2, 1, 1, 512, dtype=torch.bfloat16),
    )
    main[0, 1, 0, 0] = 4.0
    extra[1, 0, 0, 1] = 4.0
    out, lse = reference.sparse_mla_decode(
        torch.zeros(1, 1, 512, dtype=torch.bfloat16),
        main,
        indices_of([[1, -1]]),
        kv_format=KvFormat.BF16,
        sm_scale=1.0,
        extra_k_cache=extra,
        extra_indices=indices_of([[1, 1, -1]]),
        extra_kv_format=KvFormat.BF16,
        compute_dtype=torch.float64,
    )
    assert out[0, 0, :2].tolist() == pytest.approx([4 / 3, 8 / 3], abs=FLOAT64)
    assert float(lse) == pytest.approx(LN3, abs=FLOAT64)


def test_dense_decode_reads_pages_in_table_order_and_aligns_causality_to_the_end() -> None:
    # Token p of the request has value p + 1 in dimension 0; pages are stored in the order 2, 0.
    cache = torch.full((3, 2, 1, 512), math.nan, dtype=torch.bfloat16)
    for position, (page, offset) in enumerate([(2, 0), (2, 1), (0, 0)]):
        cache[page, offset] = 0.0
        cache[page, offset, 0, 0] = position + 1.0
    q = torch.zeros(1, 2, 1, 512, dtype=torch.bfloat16)
    out, lse = reference.dense_mla_decode(
        q,
        cache,
        indices_of([[2, 0]]),
        lengths_of(3),
        kv_format=KvFormat.BF16,
        sm_scale=1.0,
        compute_dtype=torch.float64,
    )
    # The last of two new tokens sees positions 0..2, the one before sees 0..1.
    assert out[0, :, 0, 0].tolist() == pytest.approx([1.5, 2.0], abs=FLOAT64)
    assert lse[0, :, 0].tolist() == pytest.approx([LN2, LN3], abs=FLOAT64)


def test_merge_of_natural_lses_ln2_and_ln8() -> None:
    outs = [torch.zeros(1, 1, 8), torch.full((1, 1, 8), 10.0)]
    lses = [torch.tensor([[LN2]]), torch.tensor([[math.log(8.0)]])]
    out, lse = reference.merge_attention_states(outs, lses, lse_layout="th")
    # Weights 2/10 and 8/10; float32 logarithms and exponentials are good to a few 2**-24.
    assert out.flatten().tolist() == pytest.approx([8.0] * 8, abs=1e-5)
    assert float(lse) == pytest.approx(math.log(10.0), abs=1e-6)

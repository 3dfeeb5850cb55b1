"""The fused step on inputs whose results are worked out on paper."""

from __future__ import annotations

import math

import pytest
import torch

from mlacast.compat import flash_mla
from tests.compat.flash_mla.element_orders import D_V, natural_codes, natural_scale_bytes
from tests.compat.flash_mla.hand_calls import (
    H_Q,
    dequantised,
    hand_prefill,
    one_hot_rows,
    one_row_table,
    same_for_all_heads,
)
from tests.compat.flash_mla.number_grid import FLOOR_BYTE

FUSED = flash_mla.fused_norm_rope_attn_rope_cast
ROPE_DIMS = [0, 1, 2, 31, 32, 63]
INF = float("inf")
# Here a logit has one product that is not zero, and a sum at most four exponentials: a result has a
# few roundings of float32, 6e-8 each, in the norm, the scale, the sum and the logarithm.
ROUNDINGS = 1e-6


def rope_ramp() -> torch.Tensor:
    """[512] query: 0..63 in the rotary dims, zero elsewhere."""
    return torch.cat((torch.zeros(448), torch.arange(64).float()))


@pytest.mark.parametrize(
    ("neox", "rotated"),
    [
        # A quarter turn maps a pair (a, b) to (-b, a).
        pytest.param(False, [-1.0, 0.0, -3.0, 30.0, -33.0, 62.0], id="interleaved"),
        pytest.param(True, [-32.0, -33.0, -34.0, -63.0, 0.0, 31.0], id="neox"),
    ],
)
def test_quarter_turn_reads_back_the_rotated_query(neox: bool, rotated: list[float]) -> None:
    count = len(ROPE_DIMS)
    keys = one_hot_rows([448 + dim for dim in ROPE_DIMS])
    arguments = hand_prefill(
        same_for_all_heads(rope_ramp()).expand(count, -1, -1),
        keys,
        torch.arange(count)[:, None],
        table=one_row_table(0.0, 1.0),
        is_rope_neox_style=neox,
    )
    _, _, max_logits, lse = FUSED.prefill(**arguments)
    expected = torch.tensor(rotated)[:, None].expand(-1, H_Q)
    torch.testing.assert_close(max_logits, expected, rtol=ROUNDINGS, atol=0.0)
    # One key: the sum of exponentials is 1, so the lse is the logit itself.
    torch.testing.assert_close(lse, expected, rtol=ROUNDINGS, atol=0.0)


@pytest.mark.parametrize(
    ("neox", "target", "sign"),
    [
        # The inverse quarter turn maps a pair (a, b) to (b, -a).
        pytest.param(False, [1, 0, 3, 30, 33, 62], [-1, 1, -1, 1, -1, 1], id="interleaved"),
        pytest.param(True, [32, 33, 34, 63, 0, 31], [-1, -1, -1, -1, 1, 1], id="neox"),
    ],
)
def test_output_is_rotated_back(neox: bool, target: list[int], sign: list[int]) -> None:
    count = len(ROPE_DIMS)
    arguments = hand_prefill(
        torch.zeros(count, H_Q, D_V),
        one_hot_rows([448 + dim for dim in ROPE_DIMS]),
        torch.arange(count)[:, None],
        table=one_row_table(0.0, 1.0),
        is_rope_neox_style=neox,
    )
    out_fp8, out_sf, _, _ = FUSED.prefill(**arguments)
    expected = one_hot_rows([448 + dim for dim in target]) * torch.tensor(sign)[:, None]
    assert torch.equal(dequantised(out_fp8, out_sf), same_for_all_heads(expected).double())


def test_only_the_last_64_dims_rotate() -> None:
    query = torch.arange(512).float() % 128
    arguments = hand_prefill(
        same_for_all_heads(query).expand(3, -1, -1),
        one_hot_rows([0, 100, 447]),
        torch.arange(3)[:, None],
        table=one_row_table(0.0, 1.0),
    )
    out_fp8, out_sf, _, lse = FUSED.prefill(**arguments)
    expected_lse = query[[0, 100, 447], None].expand(-1, H_Q)
    torch.testing.assert_close(lse, expected_lse, rtol=ROUNDINGS, atol=0.0)
    expected = same_for_all_heads(one_hot_rows([0, 100, 447])).double()
    assert torch.equal(dequantised(out_fp8, out_sf), expected)


@pytest.mark.parametrize(
    ("cos", "rounded"),
    [
        # Around 1 bf16 steps by 2**-7.
        pytest.param(1 + 2.0**-9, 1.0, id="down"),
        pytest.param(1 + 3 * 2.0**-9, 1 + 2.0**-7, id="up"),
        pytest.param(1 + 2.0**-8, 1.0, id="tie-to-even"),
    ],
)
def test_rotated_query_is_rounded_to_bf16(cos: float, rounded: float) -> None:
    query = one_hot_rows([448])
    arguments = hand_prefill(
        same_for_all_heads(query), query, torch.zeros(1, 1), table=one_row_table(cos, 0.0)
    )
    lse = FUSED.prefill(**arguments)[3]
    torch.testing.assert_close(lse, torch.full((1, H_Q), rounded), rtol=ROUNDINGS, atol=0.0)


@pytest.mark.parametrize(
    ("eps", "logit"),
    # Every element 2: the mean square is 4, and the logit without the norm 2 * 3.
    [pytest.param(0.0, 3.0, id="eps-0"), pytest.param(12.0, 1.5, id="eps-12")],
)
def test_norm_divides_by_the_root_mean_square(eps: float, logit: float) -> None:
    key = one_hot_rows([7]) * 3.0
    arguments = hand_prefill(
        torch.full((1, H_Q, D_V), 2.0),
        key,
        torch.zeros(1, 1),
        enable_q_norm=True,
        rms_norm_eps=eps,
    )
    torch.testing.assert_close(
        FUSED.prefill(**arguments)[3], torch.full((1, H_Q), logit), rtol=ROUNDINGS, atol=0.0
    )


def test_norm_is_per_head() -> None:
    heads = torch.arange(1, H_Q + 1).float()
    query = heads[None, :, None] * torch.ones(D_V)
    arguments = hand_prefill(query, one_hot_rows([3]), torch.zeros(1, 1), enable_q_norm=True)
    torch.testing.assert_close(
        FUSED.prefill(**arguments)[3], torch.ones(1, H_Q), rtol=ROUNDINGS, atol=0.0
    )


def test_sink_joins_the_denominator_once_and_nothing_else() -> None:
    values = torch.stack((torch.full((D_V,), 3.0), torch.full((D_V,), 6.0)))
    sinks = torch.tensor([0.0, -INF, INF, 0.0, -INF, INF, 0.0, 0.0])
    arguments = hand_prefill(
        torch.zeros(1, H_Q, D_V), values, torch.tensor([[0, 1]]), attn_sink=sinks
    )
    out_fp8, out_sf, max_logits, lse = FUSED.prefill(**arguments)
    # exp(0) twice, and exp(0) once more for the sink: (3 + 6) / 3; without a sink (3 + 6) / 2.
    by_sink = {0.0: 3.0, -INF: 4.5, INF: 0.0}
    expected = torch.tensor([by_sink[sink] for sink in sinks.tolist()]).double()
    assert torch.equal(dequantised(out_fp8, out_sf)[0], expected[:, None].expand(-1, D_V))
    torch.testing.assert_close(lse, torch.full((1, H_Q), math.log(2.0)), rtol=ROUNDINGS, atol=0.0)
    assert torch.equal(max_logits, torch.zeros(1, H_Q))


def test_nan_of_a_live_key_reaches_its_own_row_only() -> None:
    values = torch.stack((torch.full((D_V,), 2.0), torch.full((D_V,), float("nan"))))
    arguments = hand_prefill(torch.zeros(2, H_Q, D_V), values, torch.tensor([[0, 0], [0, 1]]))
    out_fp8, out_sf, _, _ = FUSED.prefill(**arguments)
    assert torch.equal(dequantised(out_fp8, out_sf)[0], torch.full((H_Q, D_V), 2.0).double())
    assert bool((natural_codes(out_fp8, H_Q)[1] & 0x7F == 0x7F).all())


def test_repeated_entry_counts_each_time() -> None:
    values = torch.stack((torch.full((D_V,), 1.0), torch.full((D_V,), 5.0)))
    arguments = hand_prefill(torch.zeros(1, H_Q, D_V), values, torch.tensor([[0, 0, 0, 1]]))
    out_fp8, out_sf, _, lse = FUSED.prefill(**arguments)
    # (1 + 1 + 1 + 5) / 4
    assert torch.equal(dequantised(out_fp8, out_sf), torch.full((1, H_Q, D_V), 2.0).double())
    torch.testing.assert_close(lse, torch.full((1, H_Q), math.log(4.0)), rtol=ROUNDINGS, atol=0.0)


GROUP_BYTES = (
    # (maximum of the group of 32, byte of the smallest power of two >= maximum / 448)
    (448.0, 127),
    (3.5, 120),
    (7.0, 121),
    (0.875, 118),
    (448.0 * 2.0**-20, 107),
    (3.0, 120),
    # The next bf16 numbers above and below 448.
    (450.0, 128),
    (446.0, 127),
    (448.0 * 1024, 137),
    (450.0 * 1024, 138),
    # Below the floor of 1e-4, and nothing at all.
    (2.0**-17, FLOOR_BYTE),
    (2.0**-130, FLOOR_BYTE),
    (0.0, FLOOR_BYTE),
    # 448 * 2**-22 lies just above the floor and needs no rounding; the next number up does.
    (448.0 * 2.0**-22, 105),
    (450.0 * 2.0**-22, 106),
    (1.0, 119),
)


def test_scale_bytes_of_chosen_maxima() -> None:
    # One live key and no rotation: the output is the value row, exactly.
    row = torch.zeros(D_V)
    for group, (maximum, _) in enumerate(GROUP_BYTES):
        row[group * 32 + group] = -maximum
        row[group * 32 + (group + 1) % 32] = maximum / 2
    arguments = hand_prefill(torch.zeros(1, H_Q, D_V), row[None], torch.zeros(1, 1))
    out_fp8, out_sf, _, _ = FUSED.prefill(**arguments)
    expected = torch.tensor([byte for _, byte in GROUP_BYTES]).expand(1, H_Q, -1)
    assert torch.equal(natural_scale_bytes(out_sf, H_Q), expected)


def test_codes_of_chosen_values() -> None:
    # The maximum 448 makes the scale 1, so values are rounded on the e4m3 grid itself.
    pairs = [
        (448.0, 0x7E),
        (-448.0, 0xFE),
        (1.0, 0x38),
        (-1.5, 0xBC),
        # Ties between neighbours go to the even code.
        (17.0, 0x58),
        (19.0, 0x5A),
        # The subnormal step is 2**-9; half of it ties to zero, three halves to two.
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),
        (3 * 2.0**-10, 0x02),
        (0.0, 0x00),
    ]
    row = torch.zeros(D_V)
    row[: len(pairs)] = torch.tensor([value for value, _ in pairs])
    arguments = hand_prefill(torch.zeros(1, H_Q, D_V), row[None], torch.zeros(1, 1))
    out_fp8, out_sf, _, _ = FUSED.prefill(**arguments)
    assert int(natural_scale_bytes(out_sf, H_Q)[0, 0, 0]) == 127
    expected = torch.tensor([code for _, code in pairs], dtype=torch.uint8)
    assert torch.equal(natural_codes(out_fp8, H_Q)[0, 0, : len(pairs)], expected)


def test_head_and_chunk_order_of_the_output() -> None:
    # 16 heads in two groups; head h may read only key h: values tell head and chunk apart.
    h_q, w = 16, 8
    query = torch.zeros(1, h_q, D_V)
    query[0, torch.arange(h_q), torch.arange(h_q)] = 200.0
    keys = torch.zeros(h_q, D_V)
    keys[torch.arange(h_q), torch.arange(h_q)] = 8.0
    for head in range(h_q):
        for chunk in range(1, 16):
            keys[head, chunk * 32] = 2.0 ** (chunk - 8) * (1 + head % 8 / 8)
            keys[head, chunk * 32 + 1] = -1.0 if head >= 8 else 1.0
    arguments = hand_prefill(query, keys, torch.arange(h_q)[None], n_wv_group=2)
    out_fp8, out_sf, _, _ = FUSED.prefill(**arguments)
    values = out_fp8.float()
    assert out_fp8.shape == (1, 2, w * D_V)
    for head in range(h_q):
        group, within = divmod(head, w)
        for chunk in range(1, 16):
            position = chunk * w + within
            word = int(out_sf[0, group, position // 4])
            scale = 2.0 ** (((word >> (8 * (position % 4))) & 0xFF) - 127)
            value = float(values[0, group, position * 32]) * scale
            # The other heads' keys weigh exp(-1600) = 0.
            assert value == float(keys[head, chunk * 32].bfloat16())
            sign = float(values[0, group, position * 32 + 1])
            assert (sign < 0) == (head >= 8)

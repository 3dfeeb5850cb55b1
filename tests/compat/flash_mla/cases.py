"""Random calls of the fused step: a frozen case, its keyword arguments and its exact result.

Everything a call must not read is poisoned: rows that no valid entry names hold NaN, and columns
past a row's length name such rows. Values come from torch's global generator, which the suite seeds
from the test's id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.cache_writers import FilledCache, RecordLayout, draw_records, fill_cache
from tests.compat.flash_mla.element_orders import D_V, to_chunk16
from tests.compat.flash_mla.oracle import Attended, Rotation, attend, join_keys, select_keys

SM_SCALE = D_V**-0.5
EPS = 1e-3
MAX_POS = 50
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
# Finite sinks of both signs between the two that switch a head off and on.
SINK_CYCLE = (0.5, float("inf"), -3.0, float("-inf"), 7.0)


def rotary_table(max_pos: int = MAX_POS) -> Tensor:
    """[max_pos, 64] float32: 32 cosines, then 32 sines."""
    frequency = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    angle = torch.arange(max_pos, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), -1).float()


def make_sink(kind: str, h_q: int) -> Tensor | None:
    """None, random finite values, or a cycle over finite and infinite ones; [h_q] float32."""
    if kind == "none":
        return None
    if kind == "finite":
        return torch.randn(h_q)
    return torch.tensor([SINK_CYCLE[head % len(SINK_CYCLE)] for head in range(h_q)])


def make_lengths(count: int, topk: int) -> Tensor:
    """[count] int32 in and around [0, topk] (to be clamped); the first row keeps every column."""
    lengths = torch.randint(0, topk + 1, (count,), dtype=torch.int32)
    for row, value in enumerate((topk + 3, 0, -1, 1)):
        if row < count:
            lengths[row] = value
    return lengths


def make_indices(count: int, topk: int, rows: int, live: Tensor) -> Tensor:
    """[count, topk] int32 naming ``live`` rows, with repeats and holes; the last row is empty."""
    indices = live[torch.randint(0, len(live), (count, topk))].int()
    bad = torch.tensor([-1, -2, INT32_MIN, rows, rows + 1, INT32_MAX], dtype=torch.int32)
    holes = bad[torch.randint(0, len(bad), (count, topk))]
    indices = torch.where(torch.rand(count, topk) < 0.25, holes, indices)
    half = topk // 2
    # The leading half of every third row is invalid, later entries are not.
    indices[::3, :half] = holes[::3, :half]
    if half < topk:
        indices[:, half] = live[torch.randint(0, len(live), (count,))].int()
        indices[:, -1] = indices[:, half]
    if count > 2:
        indices[-1] = holes[-1]
    return indices


def poison_tails(indices: Tensor, lengths: Tensor | None, dead_row: int) -> None:
    """Make the columns past each length name an unselected row, whose memory is NaN."""
    if lengths is not None:
        for row, length in enumerate(lengths.tolist()):
            indices[row, max(length, 0) :] = dead_row


@dataclass(frozen=True)
class FusedCase:
    """One call of the fused step. ``caches`` empty: prefill; one or two record layouts: decode."""

    id: str
    s_q: int = 5
    h_q: int = 8
    groups: int = 1
    topk: int = 10
    rows: int = 48
    norm: bool = False
    neox: bool = False
    sink: str = "none"
    lengths: bool = False
    positions: torch.dtype = torch.int32
    caches: tuple[RecordLayout, ...] = ()
    page_size: int = 8
    extra_topk: int = 6
    extra_page_size: int = 4

    @property
    def w(self) -> int:
        """Heads of one group."""
        return self.h_q // self.groups


@dataclass(frozen=True)
class FusedCall:
    """Arguments of prefill or decode, with natural q and every row's keys for the oracle."""

    case: FusedCase
    arguments: dict[str, Any]
    q: Tensor
    keys: list[Tensor]
    rotation: Rotation

    def attended(self) -> Attended:
        """The exact result."""
        return attend(
            self.q,
            self.keys,
            sm_scale=SM_SCALE,
            norm_eps=EPS if self.case.norm else None,
            rotation=self.rotation,
            sink=self.arguments["attn_sink"],
        )


def fused_flags(case: FusedCase, positions: Tensor, table: Tensor) -> dict[str, Any]:
    """The leading arguments that prefill and decode share."""
    return {
        "enable_q_norm": case.norm,
        "rms_norm_eps": EPS,
        "token_positions": positions,
        "is_rope_neox_style": case.neox,
        "rope_dim": 64,
        "cos_sin_cache": table,
        "n_wv_group": case.groups,
        "num_per_channels": 32,
        "use_tma_aligned_col_major_sf": True,
        "round_sf": True,
        "use_packed_ue8m0": True,
    }


def _query(case: FusedCase) -> tuple[Tensor, Rotation, dict[str, Any]]:
    q = (torch.randn(case.s_q, case.h_q, D_V) * 1.5).bfloat16()
    positions = torch.randint(0, MAX_POS, (case.s_q,), dtype=case.positions)
    table = rotary_table()
    arguments = fused_flags(case, positions, table)
    arguments["q"] = to_chunk16(q)
    arguments["sm_scale"] = SM_SCALE
    arguments["attn_sink"] = make_sink(case.sink, case.h_q)
    return q, Rotation(table, positions, case.neox), arguments


def _poisoned_rows(rows: int) -> tuple[Tensor, Tensor]:
    """kv [rows, 1, 512] bf16 whose odd rows are NaN, and the even row numbers."""
    kv = torch.randn(rows, 1, D_V).bfloat16()
    kv[1::2] = float("nan")
    return kv, torch.arange(0, rows, 2)


def prefill_call(case: FusedCase) -> FusedCall:
    """A prefill call."""
    q, rotation, arguments = _query(case)
    kv, live = _poisoned_rows(case.rows)
    lengths = make_lengths(case.s_q, case.topk) if case.lengths else None
    indices = make_indices(case.s_q, case.topk, case.rows, live)
    poison_tails(indices, lengths, dead_row=1)
    arguments |= {"kv": kv, "indices": indices[:, None], "topk_length": lengths}
    keys = select_keys(kv[:, 0], indices, lengths)
    return FusedCall(case, arguments, q, keys, rotation)


def half_full_cache(layout: RecordLayout, rows: int, page_size: int) -> FilledCache:
    """A cache of at least ``rows`` slots with records at the even ones and NaN bytes elsewhere."""
    pages = -(-rows // page_size)
    slots = list(range(0, pages * page_size, 2))
    records = draw_records(layout, len(slots))
    return fill_cache(layout, records, num_pages=pages, page_size=page_size, slots=slots)


def decode_call(case: FusedCase) -> FusedCall:
    """A decode call over the case's one or two caches."""
    q, rotation, arguments = _query(case)
    main = half_full_cache(case.caches[0], case.rows, case.page_size)
    lengths = make_lengths(case.s_q, case.topk) if case.lengths else None
    indices = make_indices(case.s_q, case.topk, len(main.rows), main.slots)
    poison_tails(indices, lengths, dead_row=1)
    arguments |= {
        "k_cache": main.cache,
        "indices_in_kvcache": indices,
        "topk_length": lengths,
        "extra_k_cache": None,
        "extra_indices_in_kvcache": None,
        "extra_topk_length": None,
    }
    keys = select_keys(main.rows, indices, lengths)
    if len(case.caches) == 2:
        extra = half_full_cache(case.caches[1], case.rows, case.extra_page_size)
        # Reversed, so that a row can be empty in one segment and live in the other.
        limits = make_lengths(case.s_q, case.extra_topk).flip(0) if case.lengths else None
        more = make_indices(case.s_q, case.extra_topk, len(extra.rows), extra.slots).flip(0)
        poison_tails(more, limits, dead_row=1)
        arguments |= {
            "extra_k_cache": extra.cache,
            "extra_indices_in_kvcache": more,
            "extra_topk_length": limits,
        }
        keys = join_keys(keys, select_keys(extra.rows, more, limits))
    return FusedCall(case, arguments, q, keys, rotation)

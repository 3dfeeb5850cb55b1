"""Hand-made fused calls: every argument chosen, so that results follow on paper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.compat.flash_mla.element_orders import (
    D_V,
    natural_codes,
    natural_scale_bytes,
    to_chunk16,
)
from tests.compat.flash_mla.number_grid import e4m3_values, power_of_two

H_Q = 8


def one_row_table(cos: float | Tensor, sin: float | Tensor) -> Tensor:
    """[1, 64] float32 table with the same cos and sin (a number or 32 of them) at position 0."""
    halves = [torch.as_tensor(half, dtype=torch.float32).expand(32) for half in (cos, sin)]
    return torch.cat(halves)[None].contiguous()


def hand_prefill(
    q: Tensor, kv: Tensor, indices: Tensor, *, table: Tensor | None = None, **changes: Any
) -> dict[str, Any]:
    """Prefill arguments for natural q [s_q, 8, 512], kv [s_kv, 512], indices [s_q, topk].

    Defaults: one group, no norm, interleaved pairs, position 0 of a table that does not rotate,
    sm_scale 1.
    """
    arguments: dict[str, Any] = {
        "enable_q_norm": False,
        "rms_norm_eps": 0.0,
        "token_positions": torch.zeros(len(q), dtype=torch.int32),
        "is_rope_neox_style": False,
        "rope_dim": 64,
        "cos_sin_cache": one_row_table(1.0, 0.0) if table is None else table,
        "n_wv_group": 1,
        "num_per_channels": 32,
        "use_tma_aligned_col_major_sf": True,
        "round_sf": True,
        "use_packed_ue8m0": True,
        "q": to_chunk16(q.bfloat16()),
        "kv": kv.bfloat16()[:, None],
        "indices": indices.int()[:, None],
        "sm_scale": 1.0,
    }
    return arguments | changes


def one_hot_rows(dims: list[int]) -> Tensor:
    """[n, 512] rows with a single 1 at the given dims."""
    rows = torch.zeros(len(dims), D_V)
    rows[torch.arange(len(dims)), torch.tensor(dims)] = 1.0
    return rows


def same_for_all_heads(row: Tensor) -> Tensor:
    """[512] or [s_q, 512] -> [s_q, 8, 512]."""
    rows = row if row.dim() == 2 else row[None]
    return rows[:, None].expand(-1, H_Q, -1).contiguous()


def dequantised(out_fp8: Tensor, out_sf: Tensor, groups: int = 1, h_q: int = H_Q) -> Tensor:
    """[s_q, h_q, 512] float64 in natural order."""
    codes = torch.unflatten(natural_codes(out_fp8, h_q // groups), -1, (16, 32))
    scale = power_of_two(natural_scale_bytes(out_sf, h_q // groups))[..., None]
    return (e4m3_values(codes) * scale).flatten(-2)

"""Rotary embedding of the last 64 dimensions: table, positions and pairing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlacast.errors import check_choice, check_tensor, check_type, fail

ROPE_DIM = 64
ROPE_PAIRINGS = ("interleaved", "half")


@dataclass(frozen=True, eq=False)
class Rope:
    """What an operation needs to rotate ``q[..., -64:]`` and to rotate the output back.

    Positions outside the table are clamped to its first or last row; a row without any key reads no
    table entry.

    Args:
        cos_sin_cache: [max_pos, 64] float32, 32 cosines then 32 sines a row; rows may be strided.
        positions: [s_q] int32 or int64, row of the table for each query token.
        pairing: ``"interleaved"`` rotates dimensions (2i, 2i+1), ``"half"`` rotates (i, i+32).
        rotate_query: False for a query that comes rotated: only the output is rotated back.
            ``sparse_mla_decode`` with d_qk = 512 takes it.

    Raises:
        TypeError: A table or positions that is no tensor, or a switch that is no bool.
        ValueError: Unknown pairing. Shapes, dtypes and devices are checked by the operation,
            through `check`.
    """

    cos_sin_cache: Tensor
    positions: Tensor
    pairing: str = "interleaved"
    rotate_query: bool = True

    def __post_init__(self) -> None:
        check_type("Rope", "cos_sin_cache", self.cos_sin_cache, Tensor, "a torch.Tensor")
        check_type("Rope", "positions", self.positions, Tensor, "a torch.Tensor")
        check_choice("Rope", "pairing", self.pairing, ROPE_PAIRINGS)
        check_type("Rope", "rotate_query", self.rotate_query, bool, "a bool")

    def check(self, op: str, sizes: dict[str, Any], device: torch.device | None = None) -> None:
        """Raise ValueError unless table and positions fit a call of ``op``.

        Args:
            op: Name that opens the message.
            sizes: Sizes bound so far; ``s_q`` must agree with ``positions``.
            device: Where both tensors have to be; None only asks that they are together.
        """
        table = self.cos_sin_cache
        check_tensor(
            op,
            "rope.cos_sin_cache",
            table,
            f"max_pos {ROPE_DIM}",
            # The table's length is no size of the call.
            {},
            dtype=torch.float32,
            device=device,
            last_dim_contiguous=True,
            remedy="a row is 32 cosines then 32 sines",
        )
        if table.shape[0] < 1:
            fail(op, "rope.cos_sin_cache", "have at least one row", f"shape {list(table.shape)}")
        check_tensor(
            op,
            "rope.positions",
            self.positions,
            "s_q",
            sizes,
            dtype=(torch.int32, torch.int64),
            device=table.device,
        )

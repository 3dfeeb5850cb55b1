"""Checks of values, switched on by MLACAST_VALIDATE=1.

They synchronise, so graph capture refuses them.

Without the switch the same inputs have defined results: entries outside the cache are masked,
lengths and positions are clamped. With it they raise, which finds the bug that produced them.
"""

from __future__ import annotations

import os

import torch

from mlacast.errors import fail

VALIDATE_VARIABLE = "MLACAST_VALIDATE"


def validation_requested(op: str, device: torch.device) -> bool:
    """Whether values are to be checked.

    Raises:
        RuntimeError: The switch is on while a CUDA graph is being captured.
    """
    if os.environ.get(VALIDATE_VARIABLE, "0") in ("", "0"):
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op}: {VALIDATE_VARIABLE}=1 synchronises and cannot run under CUDA graph capture; "
            "unset it"
        )
    return True


def check_lengths(op: str, argument: str, lengths: torch.Tensor | None, width: int) -> None:
    """Every length lies in [0, width]."""
    if lengths is None or lengths.numel() == 0:
        return
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0 or high > width:
        fail(op, argument, f"have values in [0, {width}]", f"values from {low} to {high}")


def check_indices(
    op: str, argument: str, indices: torch.Tensor, lengths: torch.Tensor | None, num_rows: int
) -> None:
    """Every entry that is counted by its length is -1 or names a row that exists."""
    if indices.numel() == 0:
        return
    bad = (indices < -1) | (indices >= num_rows)
    if lengths is not None:
        columns = torch.arange(indices.shape[-1], device=indices.device)
        bad &= columns < lengths.reshape(-1, *([1] * (indices.dim() - 1)))
    if bool(bad.any()):
        where = [int(position) for position in bad.nonzero()[0]]
        value = int(indices[tuple(where)])
        fail(op, argument, f"have values in [0, {num_rows}) or -1", f"{value} at {where}")


def check_cu_seqlens(op: str, argument: str, bounds: torch.Tensor, total: int) -> None:
    """Bounds of packed sequences ascend from 0 to at most ``total``."""
    values = bounds.tolist()
    for at, (low, high) in enumerate(zip([0, *values], [*values, total], strict=True)):
        if high < low or (at == 0 and high != 0):
            fail(op, argument, f"ascend from 0 to at most {total}", values)


def check_longest(op: str, argument: str, longest: int, bounds: torch.Tensor) -> None:
    """No packed sequence is longer than ``longest``."""
    found = int(bounds.diff().max()) if bounds.numel() > 1 else 0
    if found > longest:
        fail(op, argument, f"be at least {found}, the longest sequence", longest)


def check_slots(op: str, slots: torch.Tensor, num_slots: int) -> None:
    """Every slot is -1 (skip) or exists."""
    bad = (slots < -1) | (slots >= num_slots)
    if bool(bad.any()):
        where = int(bad.nonzero()[0])
        fail(
            op,
            "slots",
            f"have values in [0, {num_slots}) or -1",
            f"{int(slots[where])} at [{where}]",
        )


def check_positions(
    op: str, positions: torch.Tensor | None, cos_sin_cache: torch.Tensor | None, live: torch.Tensor
) -> None:
    """Positions of rows that attend to something lie inside the table."""
    if positions is None or cos_sin_cache is None or positions.numel() == 0:
        return
    rows = cos_sin_cache.shape[0]
    bad = ((positions < 0) | (positions >= rows)) & live
    if bool(bad.any()):
        where = int(bad.nonzero()[0])
        fail(
            op,
            "rope.positions",
            f"have values in [0, {rows})",
            f"{int(positions[where])} at [{where}]",
        )


def live_rows(indices: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Rows whose length is not 0, [s_q] bool."""
    if lengths is None:
        return torch.full((indices.shape[0],), indices.shape[-1] > 0, device=indices.device)
    return (lengths > 0) & (indices.shape[-1] > 0)

"""The value that marks a row with nothing to attend to."""

from __future__ import annotations

import torch


def mark_empty_rows_(lse: torch.Tensor) -> torch.Tensor:
    """Turn the -inf of empty rows (core ops) into the +inf that FlashMLA returns, in place.

    One elementwise launch: ``nan_to_num_`` with NaN and +inf mapped to themselves.
    """
    inf = float("inf")
    return torch.nan_to_num_(lse, nan=float("nan"), posinf=inf, neginf=inf)

"""Which keys the queries of a dense MLA layer attend: causal ranges, or any set as columns.

Prompts, padded on the left or not, and cached steps give each request one range of keys, which
dense attention takes as it is. Whatever else a mask says (documents packed into a row, padding on
the right) becomes lists of columns. As in ``selection``, no rule of the model is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from mlacast.errors import fail
from mlacast.integrations.transformers.selection import (
    check_mask_shape,
    compact_columns,
    open_pairs,
    refuse_strays,
)


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """Query i of request b attends the columns from first[b] to stop[b] - (s_q - 1 - i).

    Attributes:
        first: First column of each request.
        stop: Column after the last one that its last query attends.
        s_q: Query tokens per request.
        kv_len: Columns per request.
        device: Where tensors go.
    """

    first: tuple[int, ...]
    stop: tuple[int, ...]
    s_q: int
    kv_len: int
    device: torch.device

    @property
    def lengths(self) -> list[int]:
        """Keys of each request."""
        return [stop - first for first, stop in zip(self.first, self.stop, strict=True)]

    @cached_property
    def seq_lens(self) -> torch.Tensor:
        """[batch] int32, ``lengths``."""
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.device)

    @cached_property
    def cu_seqlens_q(self) -> torch.Tensor:
        """[batch + 1] int32 offsets of the queries."""
        requests = len(self.first) + 1
        return torch.arange(requests, dtype=torch.int32, device=self.device) * self.s_q

    @cached_property
    def cu_seqlens_k(self) -> torch.Tensor:
        """[batch + 1] int32 offsets of the keys once they are packed."""
        offsets = list(accumulate(self.lengths, initial=0))
        return torch.tensor(offsets, dtype=torch.int32, device=self.device)

    @cached_property
    def packed_rows(self) -> torch.Tensor | None:
        """Rows of [batch * kv_len] that hold keys, one request after the other. None: all."""
        if all(length == self.kv_len for length in self.lengths):
            return None
        rows = [
            torch.arange(
                request * self.kv_len + first, request * self.kv_len + stop, device=self.device
            )
            for request, (first, stop) in enumerate(zip(self.first, self.stop, strict=True))
        ]
        return torch.cat(rows)

    @cached_property
    def aligned_rows(self) -> torch.Tensor | None:
        """[batch, longest] rows with the first key of each request in front. None: they are."""
        if not any(self.first):
            return None
        start = torch.tensor(
            [request * self.kv_len + first for request, first in enumerate(self.first)],
            device=self.device,
        )
        rows = start[:, None] + torch.arange(max(self.lengths), device=self.device)
        # Behind the keys of a request stands anything: its length keeps it out.
        return rows.clamp_(max=len(self.first) * self.kv_len - 1)


Keys = KeyRanges | torch.Tensor


def read_keys(
    mask: torch.Tensor | None,
    batch: int,
    s_q: int,
    kv_len: int,
    device: torch.device,
    *,
    is_sdpa: bool,
) -> Keys:
    """Return ranges where the mask is made of them, else the columns that it leaves open.

    Args:
        mask: [batch or 1, 1, s_q, kv_len], additive as for ``window_columns``, or bool with True
            for keys that count, which "sdpa" alone understands so. None: "eager" attends to
            everything; "sdpa" is causal from the first key on for more than one query.
        batch: Requests.
        s_q: Query tokens per request.
        kv_len: Keys per request, cached ones included.
        device: Where tensors go.
        is_sdpa: Whether the model made the mask for "sdpa" instead of "eager".

    Returns:
        KeyRanges, or [batch, s_q, w] int32 ascending columns, then -1. With a mask it is read back
        from the device: two synchronisations at most.

    Raises:
        ValueError: The mask has another shape or dtype, or holds a bias.
    """
    if mask is None:
        if s_q == 1 or is_sdpa:
            stop = kv_len if s_q == 1 else s_q
            return KeyRanges((0,) * batch, (stop,) * batch, s_q, kv_len, device)
        columns = torch.arange(kv_len, dtype=torch.int32, device=device)
        return columns.expand(batch, s_q, kv_len)
    allowed, strays = read_pairs(mask, batch, s_q, kv_len, is_sdpa=is_sdpa)
    column = torch.arange(kv_len, device=device)
    last = allowed[:, -1]
    stop_column = torch.where(last, column + 1, 0).amax(-1)
    first_column = torch.where(last, column, kv_len).amin(-1).minimum(stop_column)
    before_last = torch.arange(s_q - 1, -1, -1, device=device)
    stops = stop_column[:, None, None] - before_last[:, None]
    differs = allowed != ((column >= first_column[:, None, None]) & (column < stops))
    widest = allowed.sum(-1).amax()
    facts = torch.stack((strays, differs.sum(), widest))
    num_strays, num_different, width, *bounds = torch.cat(
        (facts, first_column, stop_column)
    ).tolist()
    refuse_strays(num_strays)
    if num_different:
        return compact_columns(allowed, width)
    return KeyRanges(tuple(bounds[:batch]), tuple(bounds[batch:]), s_q, kv_len, device)


def read_pairs(
    mask: torch.Tensor, batch: int, s_q: int, kv_len: int, *, is_sdpa: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``open_pairs``, for boolean masks too if the model made the mask for "sdpa"."""
    if mask.dtype != torch.bool or not is_sdpa:
        return open_pairs(mask, batch, s_q, kv_len)
    check_mask_shape(mask, batch, s_q, kv_len)
    no_strays = torch.zeros((), dtype=torch.int64, device=mask.device)
    return mask[:, 0].expand(batch, s_q, kv_len), no_strays


def selected_columns(topk: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return the indexer's columns with -1 for those that the mask closes.

    An indexer always names as many columns as it is wide, closed ones after the open ones.

    Args:
        topk: [batch, s_q, topk] int32 columns.
        allowed: [batch, s_q, kv_len] bool.
    """
    is_open = allowed.gather(-1, topk.to(torch.int64))
    return torch.where(is_open, topk, -1)


def check_has_mask(mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mask of a layer with an indexer, which cannot do without.

    Raises:
        ValueError: It is None.
    """
    if mask is None:
        fail("fuse", "attention_mask", "be a tensor for a layer with an indexer", None)
    return mask

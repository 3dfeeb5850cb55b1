"""From the model's masks to index columns: which keys each query attends.

Nothing here recomputes a rule of the model. Sliding window, causality, padding and custom masks all
arrive in the model's own additive mask, the compressed entries in its own block bias; both are only
read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mlacast.errors import fail

Read = TypeVar("Read")

# exp(-1e4) is 0 in float32: an entry biased this far can never carry weight beside a live one.
_BLOCKED = -1.0e4


def window_columns(
    mask: torch.Tensor | None, batch: int, s_q: int, kv_len: int, device: torch.device
) -> torch.Tensor:
    """Return the key columns that the additive mask leaves open, in ascending order.

    Args:
        mask: [batch or 1, 1, s_q, kv_len] float, 0 where a key counts and -1e4 or less where it
            does not (the model uses the lowest value of its dtype). None: every key counts, which
            is what eager attention does with None.
        batch: Requests.
        s_q: Query tokens per request.
        kv_len: Keys per request, cached ones included.
        device: Where the result goes when there is no mask.

    Returns:
        [batch, s_q, w] int32 with -1 after the last open column; w is the largest number of open
        columns of any query (read back from the device: one synchronisation).

    Raises:
        ValueError: The mask has another shape or dtype, or holds a bias between 0 and -1e4 (or
            above 0), which index lists cannot express.
    """
    if mask is None:
        return _all_columns(batch, s_q, kv_len, device)
    allowed, strays = open_pairs(mask, batch, s_q, kv_len)
    widest, num_strays = torch.stack((allowed.sum(-1).amax(), strays)).tolist()
    refuse_strays(num_strays)
    return compact_columns(allowed, int(widest))


def open_pairs(
    mask: torch.Tensor, batch: int, s_q: int, kv_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read an additive mask, see ``window_columns``.

    Returns:
        ([batch, s_q, kv_len] bool, whether the key counts; int64 scalar, how many entries say
        neither yes nor no: ``refuse_strays`` on the host). No synchronisation.
    """
    check_mask_shape(mask, batch, s_q, kv_len)
    if not mask.is_floating_point():
        fail(
            "fuse",
            "attention_mask",
            "be additive, in floating point",
            str(mask.dtype).removeprefix("torch."),
            "eager attention adds the mask to the scores, so True would not mean 'attend'",
        )
    rows = mask[:, 0].expand(batch, s_q, kv_len)
    allowed = rows == 0
    return allowed, (~(allowed | (rows <= _BLOCKED))).sum()


def refuse_strays(strays: int) -> None:
    """Raise ValueError if a mask holds entries that ``open_pairs`` cannot read."""
    if strays:
        fail(
            "fuse",
            "attention_mask",
            f"hold only 0 and values of {_BLOCKED:g} or less",
            f"{strays} other values",
            "an additive bias cannot be written as a list of keys",
        )


def compressed_columns(
    block_bias: torch.Tensor | None,
    batch: int,
    s_q: int,
    num_entries: int,
    device: torch.device,
    *,
    width: int | None,
) -> torch.Tensor:
    """Return the compressed entries that the compressor leaves open to each query.

    Args:
        block_bias: [batch, 1, s_q, num_entries], 0 where an entry counts and -inf where it does
            not. None: every entry counts (the heavily compressed layers return None for one new
            token).
        batch: Requests.
        s_q: Query tokens per request.
        num_entries: Compressed entries per request.
        device: Where the result goes when there is no bias.
        width: Upper bound of open entries per query, known from the indexer's top-k: the columns
            are compacted to it. None: not compacted, one column per entry.

    Returns:
        [batch, s_q, w] int32, -1 in holes. No synchronisation.
    """
    if block_bias is None:
        return _all_columns(batch, s_q, num_entries, device)
    allowed = block_bias[:, 0].expand(batch, s_q, num_entries) == 0
    if width is not None and width < num_entries:
        return compact_columns(allowed, width)
    columns = torch.arange(num_entries, dtype=torch.int32, device=allowed.device)
    return torch.where(allowed, columns, -1)


def compact_columns(allowed: torch.Tensor, width: int) -> torch.Tensor:
    """Return the numbers of the first ``width`` true columns of each row, ascending, then -1.

    Args:
        allowed: [..., n] bool.
        width: Columns of the result, at most n. 0 gives an empty last dimension.

    Returns:
        [..., width] int32.
    """
    n = allowed.shape[-1]
    columns = torch.arange(n, dtype=torch.int32, device=allowed.device)
    # n - column is positive and falls with the column: the largest are the first columns.
    keys = torch.where(allowed, n - columns, 0).topk(width, dim=-1).values
    return torch.where(keys > 0, n - keys, -1)


def to_rows(columns: torch.Tensor, rows_per_request: int, first_row: int = 0) -> torch.Tensor:
    """Number columns through the flattened batch; -1 stays -1.

    Args:
        columns: [batch, s_q, w] int32 columns within a request.
        rows_per_request: Rows that one request has in the flattened tensor (or page size, a page
            being a request).
        first_row: Row of column 0 within its request.

    Returns:
        [batch * s_q, w] int32.
    """
    batch = columns.shape[0]
    requests = torch.arange(batch, dtype=torch.int32, device=columns.device)
    start = requests * rows_per_request + first_row
    rows = torch.where(columns >= 0, columns + start[:, None, None], -1)
    return rows.flatten(0, 1)


class SelectionMemo:
    """Remembers what was last read of a mask: all layers of a forward are given the same one.

    The mask is held weakly and compared by identity and version, so a recycled address or a mask
    that was changed in place is never mistaken for the old one. Copies and pickles of a memo start
    empty.
    """

    def __init__(self) -> None:
        # One attribute, replaced as a whole: a concurrent forward sees an old or a new entry.
        self._entry: tuple[weakref.ref[torch.Tensor] | None, tuple[Any, ...], Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (SelectionMemo, ())

    def recall(
        self, mask: torch.Tensor | None, key: tuple[Any, ...], read: Callable[[], Read]
    ) -> Read:
        """Return what ``read`` returned for this mask and key, or call it.

        Args:
            mask: What is read, or None if there is none.
            key: All else that the result depends on.
            read: Reads the mask.
        """
        # Inference tensors have no version counter: a change in place could not be noticed.
        if mask is not None and mask.is_inference():
            return read()
        full_key = (*key, None if mask is None else mask._version)
        entry = self._entry
        if entry is not None and entry[1] == full_key:
            held = None if entry[0] is None else entry[0]()
            # A mask that is gone is not the absence of one.
            if held is mask and (entry[0] is None) == (mask is None):
                known: Read = entry[2]
                return known
        result = read()
        self._entry = (None if mask is None else weakref.ref(mask), full_key, result)
        return result

    def window_columns(
        self,
        mask: torch.Tensor | None,
        batch: int,
        s_q: int,
        kv_len: int,
        device: torch.device,
    ) -> torch.Tensor:
        """``window_columns`` of this module, computed once per mask."""
        return self.recall(
            mask,
            ("window_columns", batch, s_q, kv_len, device),
            lambda: window_columns(mask, batch, s_q, kv_len, device),
        )


def _all_columns(batch: int, s_q: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device=device).expand(batch, s_q, count)


def check_mask_shape(mask: torch.Tensor, batch: int, s_q: int, kv_len: int) -> None:
    """Raise ValueError unless the mask has an entry for each query and key, shared by all heads."""
    shapes = ((batch, 1, s_q, kv_len), (1, 1, s_q, kv_len))
    if tuple(mask.shape) not in shapes:
        fail(
            "fuse",
            "attention_mask",
            f"have shape [{batch} or 1, 1, {s_q}, {kv_len}] inside the attention layer",
            list(mask.shape),
        )

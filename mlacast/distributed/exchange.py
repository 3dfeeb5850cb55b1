"""What the ranks of a group exchange: query heads, partial attention, rows of their caches.

Every rank calls these in the same order with the same sizes. Nothing is summed by a collective:
parts are moved as they are, and merged in order of ranks, so the same call gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlacast.distributed.groups import gather_into
from mlacast.errors import check_tensor, fail
from mlacast.ops.merge_attention_states import merge_attention_states

_LATENT = 512
# Rows of a message start at a multiple of this, as fast loads of 16-bit values need it.
_ROW_BYTES = 32


def gather_heads(q: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the query heads of all ranks, in order of ranks.

    Args:
        q: [n, N, d] bfloat16 or float8_e4m3fn, the heads of this rank. A transposed contiguous
            [N, n, d] is sent without a copy.
        group: Ranks that all have n tokens and N heads.

    Returns:
        [n, world * N, d], last dimension contiguous: the transposed view of head-major memory. No
        tokens: nothing is sent.

    Raises:
        RuntimeError: The transport failed, or another rank did not call in time.
    """
    message = q.transpose(0, 1).contiguous()
    # Not every transport knows every dtype.
    received = _gathered(message.view(torch.uint8), group)
    return received.view(q.dtype).transpose(0, 1)


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks, in order of ranks.

    Args:
        rows: [n, d].
        group: Ranks that all have n rows.

    Returns:
        [world * n, d]. No rows: nothing is sent.

    Raises:
        RuntimeError: The transport failed, or another rank did not call in time.
    """
    return _gathered(rows.contiguous(), group)


def merge_over_ranks(out: Tensor, lse: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Merge what the ranks found for each other's heads; each gets the result for its own.

    One message of partial results to every rank, then one merge in float32, in order of ranks.

    Args:
        out: [n, world * N, 512] bfloat16, contiguous: attention of all heads to the tokens that
            this rank keeps.
        lse: [n, world * N] float32: natural-log sums. A head that sees nothing here has -inf or
            +inf, and its output is not read.
        group: Ranks that all have n tokens and N heads.

    Returns:
        out: [n, N, 512] bfloat16: as if all tokens were on this rank. A head that only one rank saw
            tokens of comes back unchanged, one without any is zeros.
        lse: [n, N] float32; -inf without any.

    Raises:
        ValueError: A shape or dtype breaks the contract; nothing has been sent.
        RuntimeError: The transport failed, or another rank did not call in time.
    """
    op = "merge_over_ranks"
    sizes: dict[str, Any] = {}
    check_tensor(op, "out", out, f"n heads {_LATENT}", sizes, dtype=torch.bfloat16, contiguous=True)
    check_tensor(op, "lse", lse, "n heads", sizes, dtype=torch.float32, device=out.device)
    world = group.size()
    tokens, all_heads = lse.shape
    if all_heads % world:
        fail(op, "out", f"have a multiple of {world} heads, the ranks of group", all_heads)
    heads = all_heads // world
    values = heads * _LATENT * out.element_size()
    sums = values + heads * lse.element_size()
    row = -(-sums // _ROW_BYTES) * _ROW_BYTES
    # A row has the outputs of a token's heads and their sums, so that one exchange moves both.
    message = torch.empty((world, tokens, row), dtype=torch.uint8, device=out.device)
    sent_out, sent_lse = _halves(message, heads, values, sums)
    sent_out.copy_(out.view(tokens, world, heads, _LATENT).transpose(0, 1))
    sent_lse.copy_(lse.view(tokens, world, heads).transpose(0, 1))
    received = torch.empty_like(message)
    if tokens > 0:
        dist.all_to_all_single(received, message, group=group)
    outs, lses = _halves(received, heads, values, sums)
    merged, merged_lse = merge_attention_states(
        list(outs.unbind(0)), list(lses.unbind(0)), lse_layout="th"
    )
    assert isinstance(merged, Tensor), "an output without a format is a tensor"
    return merged, merged_lse


def _halves(message: Tensor, heads: int, values: int, sums: int) -> tuple[Tensor, Tensor]:
    """Return a message as outputs [world, n, N, 512] and sums [world, n, N]."""
    outs = message[..., :values].view(torch.bfloat16).view(*message.shape[:2], heads, _LATENT)
    return outs, message[..., values:sums].view(torch.float32)


def _gathered(message: Tensor, group: dist.ProcessGroup) -> Tensor:
    shape = (group.size() * message.shape[0], *message.shape[1:])
    received = message.new_empty(shape)
    if message.numel() > 0:
        gather_into(received, message, group)
    return received

"""Reference of ``decode_metadata``: the split-KV walk as torch operations, without a sync."""

from __future__ import annotations

import torch

BLOCK = 64
ROW = 8


def decode_metadata(
    lengths: torch.Tensor, *, num_parts: int, topk: int | None = None, overhead: int = 5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the blocks of all requests into ``num_parts`` runs of about equal cost.

    A request of n blocks of 64 tokens costs ``n + overhead``, a part has ``payload = ceil(total /
    num_parts) + overhead`` to spend and walks on from where the one before stopped: it finishes a
    request while it can pay for the rest of it, else takes what is left beyond ``overhead`` of the
    next one and stops. With all costs on one axis this is one search a part.

    Args:
        lengths: [B] integers.
        num_parts: Parts, at least 1.
        topk: Lengths are clamped to [0, topk]; None leaves them as they are.
        overhead: Blocks that a request costs beyond its own.

    Returns:
        parts [num_parts, 8] int32 and num_splits [B + 1] int32, see ``mlacast.ops``.
    """
    device, batch = lengths.device, lengths.shape[0]
    counted = lengths.long().clamp(min=0, max=topk)
    blocks = (counted.clamp(min=1) + BLOCK - 1) // BLOCK
    starts = torch.zeros(batch + 1, dtype=torch.int64, device=device)
    torch.cumsum(blocks + overhead, 0, out=starts[1:])
    payload = (starts[-1] + num_parts - 1) // num_parts + overhead
    # The state of the walk: a request, the first block of it that is left, the split that starts.
    request = torch.zeros((), dtype=torch.int64, device=device)
    block, split = torch.zeros_like(request), torch.zeros_like(request)
    parts = torch.zeros((num_parts, ROW), dtype=torch.int64, device=device)
    last_blocks = torch.cat((blocks.new_zeros(1), blocks))
    for part in range(num_parts):
        reach = starts[request] + block + payload
        following = torch.searchsorted(starts, reach, right=True) - 1
        rest = (reach - starts[following] - overhead).clamp(min=0)
        following_block = torch.where(following < batch, rest, torch.zeros_like(rest))
        stopped_inside = following_block > 0
        is_idle = request >= batch
        end_request = torch.where(stopped_inside, following, following - 1)
        end_block = torch.where(stopped_inside, following_block, last_blocks[following])
        end_block = torch.where(is_idle, torch.zeros_like(end_block), end_block)
        row = (request, block, end_request, end_block, split)
        parts[part, : len(row)] = torch.stack(row)
        again = torch.where(following == request, split + 1, torch.ones_like(split))
        split = torch.where(stopped_inside, again, torch.zeros_like(split))
        request, block = following, following_block
    # A request has one split more than parts that start inside of it.
    splits = torch.ones(batch + 1, dtype=torch.int64, device=device)
    splits[:1] = 0
    inside = (parts[:, 1] > 0).long()
    splits.scatter_add_(0, (parts[:, 0] + 1).clamp(max=batch), inside)
    return parts.int(), splits.cumsum(0).int()

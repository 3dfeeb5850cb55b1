"""Portable ``decode_metadata``: one program walks over the parts, its warps search together."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlacast.kernels.common.dependents import overlaps_launches, wait_for_previous_kernel
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.config.decode_metadata import metadata_config


@triton.jit(
    do_not_specialize=["batch", "stride_length", "num_parts", "topk", "overhead"],
    do_not_specialize_on_alignment=["lengths_ptr", "parts_ptr", "num_splits_ptr"],
)
def _decode_metadata_kernel(
    lengths_ptr,
    stride_length,
    parts_ptr,
    num_splits_ptr,
    batch,
    num_parts,
    topk,
    overhead,
    HAS_TOPK: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Plan all requests. Grid: (1,).

    Request b lies at [start_b, start_b + blocks_b + overhead) of the axis of costs. A part that
    starts at ``position`` reaches ``position + payload``; requests that end at or before that are
    finished. What is 64 bits wide adds up costs of all requests.
    """
    wait_for_previous_kernel(PDL)
    request = tl.arange(0, BLOCK_B)  # [BLOCK_B]
    inside = request < batch  # [BLOCK_B]
    length = tl.load(lengths_ptr + request.to(tl.int64) * stride_length, mask=inside, other=0)
    length = tl.maximum(length, 1)  # [BLOCK_B]
    if HAS_TOPK:
        length = tl.minimum(length, tl.maximum(topk, 1))
    blocks = tl.where(inside, (length - 1) // 64 + 1, 0)  # [BLOCK_B]
    # The end of each request on the axis of costs, int64 [BLOCK_B].
    stop = tl.cumsum(tl.where(inside, blocks.to(tl.int64) + overhead, 0), 0)
    total = tl.max(stop, 0)
    payload = (total + num_parts - 1) // num_parts + overhead
    column = tl.arange(0, 8)  # [8], of a row of parts
    splits = tl.where(inside, 1, 0)  # [BLOCK_B]
    # What the next part starts with: numbers, blocks and costs int64.
    first = batch * 0
    first_block = total * 0
    start = total * 0
    split = batch * 0
    for part in range(0, num_parts):
        reach = start + first_block + payload
        is_finished = inside & (stop <= reach)  # [BLOCK_B]
        following = tl.sum(is_finished.to(tl.int32), 0)
        following_start = tl.max(tl.where(is_finished, stop, 0), 0)
        rest = tl.maximum(reach - following_start - overhead, 0)
        rest = tl.where(following < batch, rest, 0)
        stopped_inside = rest > 0
        last_blocks = tl.sum(tl.where(request == following - 1, blocks, 0), 0)
        last = tl.where(stopped_inside, following, following - 1)
        last_block = tl.where(stopped_inside, rest, last_blocks.to(tl.int64))
        last_block = tl.where(first < batch, last_block, 0)
        row = tl.where(column == 0, first, 0)  # [8]
        row = tl.where(column == 1, first_block.to(tl.int32), row)
        row = tl.where(column == 2, last, row)
        row = tl.where(column == 3, last_block.to(tl.int32), row)
        row = tl.where(column == 4, split, row)
        tl.store(parts_ptr + tl.cast(part, tl.int64) * 8 + column, row)
        splits += ((request == following) & (stopped_inside & inside)).to(tl.int32)
        again = tl.where(following == first, split + 1, 1)
        split = tl.where(stopped_inside, again, 0)
        first = following
        first_block = rest
        start = following_start
    before = tl.cumsum(splits, 0)  # [BLOCK_B], this request's own splits included
    tl.store(num_splits_ptr + 1 + request, before, mask=inside)
    tl.store(num_splits_ptr + column, 0, mask=column == 0)


def launch_decode_metadata(
    lengths: torch.Tensor,
    *,
    topk: int | None,
    overhead: int,
    parts: torch.Tensor,
    num_splits: torch.Tensor,
) -> Launches:
    """Fill ``parts`` and ``num_splits``; arguments as in ``mlacast.ops.decode_metadata``."""
    batch = lengths.shape[0]
    config = metadata_config(batch)
    launches = Launches(lengths.device)
    overlaps = overlaps_launches(lengths.device)
    launches.launch(
        _decode_metadata_kernel,
        (1,),
        lengths,
        lengths.stride(0),
        parts,
        num_splits,
        batch,
        parts.shape[0],
        0 if topk is None else topk,
        overhead,
        HAS_TOPK=topk is not None,
        PDL=overlaps,
        BLOCK_B=config.block_b,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        launch_pdl=overlaps,
    )
    return launches

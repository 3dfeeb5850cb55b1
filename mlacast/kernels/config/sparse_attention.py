"""Tile sizes and splits of the attention kernels over cached tokens."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class TileConfig(NamedTuple):
    """Heads and keys of a program's tile, and how Triton schedules it."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def tile_config(num_heads: int) -> TileConfig:
    """Pick a tile for ``num_heads`` query heads; pure, so results do not depend on tuning."""
    if num_heads <= 16:
        return TileConfig(block_h=16, block_n=32, num_warps=4, num_stages=2)
    if num_heads <= 32:
        return TileConfig(block_h=32, block_n=32, num_warps=4, num_stages=2)
    return TileConfig(block_h=64, block_n=32, num_warps=8, num_stages=2)


def choose_num_splits(
    programs: int, width: int, block_n: int, device: torch.device, batch_invariant: bool
) -> int:
    """Pick how many programs share one row of indices.

    Args:
        programs: Programs of an un-split launch.
        width: Index columns of both lists.
        block_n: Keys per block.
        device: Device of the launch.
        batch_invariant: Decide by ``width`` alone, so a row is cut the same way in every batch.
    """
    blocks = max(1, -(-width // block_n))
    if batch_invariant:
        return min(-(-blocks // 4), 16)
    return max(1, min(num_multiprocessors(device) // max(programs, 1), -(-blocks // 2), 32))


def choose_decode_splits(
    tiles: int, blocks: int, multiprocessors: int, batch_invariant: bool
) -> int:
    """Pick the splits of a decode by persistent programs, one per multiprocessor.

    Args:
        tiles: Tokens times tiles of 64 heads.
        blocks: Blocks of 64 keys of a row, both lists.
        multiprocessors: Programs that run at a time.
        batch_invariant: Decide by ``blocks`` alone, so a row is cut the same way in every batch.
    """
    blocks = max(blocks, 1)
    if batch_invariant:
        return -(-blocks // 6)
    limit = multiprocessors // max(tiles, 1)
    if limit < 2:
        return 1
    # The fewest splits that are as short as ``limit`` of them would be.
    return -(-blocks // -(-blocks // limit))


def plan_portable_decode(
    s_q: int, h_q: int, width: int, device: torch.device, batch_invariant: bool
) -> int:
    """Splits that the portable decode picks for ``width`` index columns of both lists."""
    config = tile_config(h_q)
    programs = s_q * -(-h_q // config.block_h)
    return choose_num_splits(programs, width, config.block_n, device, batch_invariant)


def plan_hopper_decode(
    s_q: int, h_q: int, width: int, device: torch.device, batch_invariant: bool
) -> int:
    """Splits that the Hopper decode picks for ``width`` index columns of both lists."""
    tiles, blocks = s_q * -(-h_q // 64), -(-width // 64)
    return choose_decode_splits(tiles, blocks, num_multiprocessors(device), batch_invariant)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 where there are none to ask about."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

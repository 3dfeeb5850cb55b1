"""Tile sizes of the portable dense prefill, and the order of its tiles."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

# Bytes of a key and its value, in bfloat16.
_KEY_BYTES = (192 + 128) * 2
# Keys and values of the heads that are worked on at a time should stay in the cache: half of what
# the smallest GPU in question has.
_CACHE_BYTES = 16 << 20
_LARGE_SHARED_MEMORY = 160 << 10


class PrefillConfig(NamedTuple):
    """Query rows and keys of a tile, and how Triton schedules it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_config(max_seqlen_q: int, shared_memory: int) -> PrefillConfig:
    """Pick a tile; pure. Rows give the same bits whatever ``max_seqlen_q``: keys go by block_n.

    Args:
        max_seqlen_q: Most query tokens of a sequence.
        shared_memory: Bytes of shared memory that a program may have.
    """
    if shared_memory < _LARGE_SHARED_MEMORY:
        return PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
    if max_seqlen_q <= 64:
        # Two programs fit a multiprocessor.
        return PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
    return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)


def max_tiles(num_tokens: int, num_sequences: int, block_m: int) -> int:
    """Most tiles that the tokens of a head can take, whatever the lengths of the sequences.

    The tokens before the first sequence and those behind the last count as sequences too.
    """
    return min(num_tokens, (num_tokens + (num_sequences + 2) * (block_m - 1)) // block_m)


def heads_at_a_time(num_heads: int, kv_heads: int, max_seqlen_k: int) -> int:
    """Query heads whose tiles follow each other: as many as find their keys in the cache."""
    fitting = _CACHE_BYTES // max(max_seqlen_k * _KEY_BYTES, 1)
    return min(max(fitting, 1), kv_heads) * (num_heads // kv_heads)


@functools.cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; as on an H200 where there is no GPU."""
    if device.type != "cuda":
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return int(
        getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    )

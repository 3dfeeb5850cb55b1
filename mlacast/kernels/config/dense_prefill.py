"""The launch of the portable dense prefill: tiles, their order, the scale of scores."""

from __future__ import annotations

import math
from typing import NamedTuple

from mlacast.kernels.config.shared_memory import LARGE_SHARED_MEMORY

# Bytes of a key and its value, in bfloat16.
_KEY_BYTES = (192 + 128) * 2
# Keys and values of the heads that are worked on at a time should stay in the cache: half of what
# the smallest GPU in question has.
_CACHE_BYTES = 16 << 20
_LOG2_E = 1.4426950408889634
_LEAST_FLOAT32 = 2.0**-149


class PrefillConfig(NamedTuple):
    """Query rows and keys of a tile, and how Triton schedules it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class PrefillPlan(NamedTuple):
    """How the portable dense prefill is launched.

    Attributes:
        config: Tile of a program.
        tiles: Most tiles that a head can need.
        num_programs: Tiles of all heads.
        heads_per_key_head: Heads of the query that share one of the keys.
        heads_at_a_time: Heads whose tiles follow each other.
        query_sign: What the query is multiplied by: -1, 0 or 1.
        score_scale: What scores are multiplied by, for powers of two; positive.
    """

    config: PrefillConfig
    tiles: int
    num_programs: int
    heads_per_key_head: int
    heads_at_a_time: int
    query_sign: float
    score_scale: float


def prefill_config(max_seqlen_q: int, shared_memory: int) -> PrefillConfig:
    """Pick a tile; pure. Rows give the same bits whatever ``max_seqlen_q``: keys go by block_n.

    Args:
        max_seqlen_q: Most query tokens of a sequence.
        shared_memory: Bytes of shared memory that a program may have.
    """
    if shared_memory < LARGE_SHARED_MEMORY:
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


def score_scale(softmax_scale: float) -> tuple[float, float]:
    """Sign and magnitude of the scale of scores, for powers of two.

    The kernel takes maxima before it multiplies by the magnitude, which so has to be positive: the
    sign goes into the query, and is 0 for a scale of 0.
    """
    magnitude = abs(softmax_scale)
    # As a number of float32, in which the kernel multiplies, a smaller one is 0.
    if magnitude < _LEAST_FLOAT32:
        return 0.0, _LOG2_E
    return math.copysign(1.0, softmax_scale), magnitude * _LOG2_E


def prefill_plan(
    num_tokens: int,
    num_sequences: int,
    num_heads: int,
    kv_heads: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    shared_memory: int,
) -> PrefillPlan:
    """Plan a launch.

    Args:
        num_tokens: Tokens of the query.
        num_sequences: Sequences.
        num_heads: Heads of the query.
        kv_heads: Heads of keys and values, a divisor of those.
        max_seqlen_q: Most query tokens of a sequence.
        max_seqlen_k: Most keys of a sequence.
        softmax_scale: As in ``mlacast.dense_mla_prefill``.
        shared_memory: Bytes of shared memory that a program may have.
    """
    config = prefill_config(max_seqlen_q, shared_memory)
    tiles = max_tiles(num_tokens, num_sequences, config.block_m)
    return PrefillPlan(
        config,
        tiles,
        tiles * num_heads,
        num_heads // kv_heads,
        heads_at_a_time(num_heads, kv_heads, max_seqlen_k),
        *score_scale(softmax_scale),
    )

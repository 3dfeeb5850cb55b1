"""Tiles of ``merge_attention_states``, and how many parts a launch takes."""

from __future__ import annotations

from typing import NamedTuple

# Parts that one launch reads; more are merged in turn, by way of a float32 result.
PARTS_AT_ONCE = 4


class MergeConfig(NamedTuple):
    """What is merged, and a program's tile.

    Attributes:
        parts: Parts, 1 to 4.
        d: Features of a head.
        features: Features of a token where the last row of a tile is not full, else 0.
        block_t: Tokens.
        block_b: Neighbouring rows of a token.
        width: Features of a row.
        num_warps: Warps of a program.
    """

    parts: int
    d: int
    features: int
    block_t: int
    block_b: int
    width: int
    num_warps: int


class MergePlan(NamedTuple):
    """How a merge is launched.

    Attributes:
        config: What is merged, and a program's tile.
        num_blocks: Rows of a tile that a token takes.
        num_programs: Programs of the launch.
    """

    config: MergeConfig
    num_blocks: int
    num_programs: int


def merge_rounds(parts: int) -> tuple[int, ...]:
    """Parts that each launch merges, of those that are left.

    What the first of them give is a part like the others, and the first of the next launch.
    """
    rounds = []
    while parts > PARTS_AT_ONCE:
        rounds.append(PARTS_AT_ONCE)
        parts -= PARTS_AT_ONCE - 1
    return (*rounds, parts)


def merge_config(parts: int, num_heads: int, width: int) -> MergeConfig:
    """Describe the merge of ``parts`` parts of heads ``width`` wide."""
    features = num_heads * width
    ragged = features if features % 128 else 0
    return MergeConfig(parts, width, ragged, block_t=8, block_b=8, width=128, num_warps=8)


def merge_plan(parts: int, num_tokens: int, num_heads: int, width: int) -> MergePlan:
    """Plan a launch that merges ``parts`` parts of heads ``width`` wide."""
    config = merge_config(parts, num_heads, width)
    blocks = -(-num_heads * width // config.width)
    programs = -(-num_tokens // config.block_t) * -(-blocks // config.block_b)
    return MergePlan(config, blocks, programs)

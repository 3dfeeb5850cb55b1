"""Tiles of ``merge_attention_states``."""

from __future__ import annotations

from typing import NamedTuple


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


def merge_config(parts: int, num_heads: int, width: int) -> MergeConfig:
    """Describe the merge of ``parts`` parts of heads ``width`` wide."""
    features = num_heads * width
    ragged = features if features % 128 else 0
    return MergeConfig(parts, width, ragged, block_t=8, block_b=8, width=128, num_warps=8)

"""Tiles of ``v_up_project``."""

from __future__ import annotations

from typing import NamedTuple

# Up to so many tokens a program holds them all.
_FEW_TOKENS = 64


class VUpConfig(NamedTuple):
    """A program's tile, and how Triton schedules it.

    Attributes:
        block_m: Tokens.
        block_k: Latent dimensions of a step.
        num_warps: Warps of a program.
        num_stages: Steps in flight: the kernel is bound by reading the weights.
    """

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


def v_up_config(num_tokens: int) -> VUpConfig:
    """Pick a tile; both add the same products in the same order.

    Many tokens fill the larger one, which reads each weight half as often.
    """
    block_m = 64 if num_tokens <= _FEW_TOKENS else 128
    return VUpConfig(block_m, block_k=64, num_warps=block_m // 16, num_stages=4)

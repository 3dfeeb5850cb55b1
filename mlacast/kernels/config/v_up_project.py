"""Tiles of ``v_up_project``."""

from __future__ import annotations

from typing import NamedTuple

# Up to so many tokens a program holds them all.
_FEW_TOKENS = 64
_BLOCK_K = 64


class VUpConfig(NamedTuple):
    """A program's tile, and how Triton schedules it.

    Attributes:
        block_m: Tokens.
        block_k: Latent dimensions of a step.
        num_warps: Warps of a program.
        num_stages: Steps in flight: the kernel is bound by reading the weights.
        is_wide: Whether a tile of the weights spans 2**31 elements or more. Its offsets are 64 bits
            then, which costs two percent of a small product.
    """

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    is_wide: bool = False


def v_up_config(num_tokens: int, stride_latent: int = 1, stride_value: int = 1) -> VUpConfig:
    """Pick a tile; all add the same products in the same order.

    Many tokens fill the larger one, which reads each weight half as often.

    Args:
        num_tokens: Tokens.
        stride_latent: Elements between the weights of neighbouring latent dimensions.
        stride_value: Elements between those of neighbouring values.
    """
    block_m = 64 if num_tokens <= _FEW_TOKENS else 128
    is_wide = _BLOCK_K * stride_latent + 128 * stride_value >= 2**31
    return VUpConfig(block_m, _BLOCK_K, block_m // 16, num_stages=4, is_wide=is_wide)

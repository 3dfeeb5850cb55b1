"""Tiles of the portable products that consume a quantised output, and what multiplies where."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlacast.kernels.config.output import OutputConfig

# Kinds of weights and of outputs, as in ``common.project_operands`` and ``common.store``.
_PLAIN, _BLOCKS_128, _GROUPS_32 = 0, 1, 2
_FP8_UE8M0, _NVFP4 = 4, 5
# Up to so many tokens a program holds them all.
_FEW_TOKENS = 64
# What float32 operands of the larger tile take with all of its stages, in most formats less.
_FLOAT32_BYTES = 176 << 10


class ProductConfig(NamedTuple):
    """What is multiplied where.

    Attributes:
        weight_kind: Kind of weights, as in ``project_operands``.
        multiplies_codes: Whether the matrix unit multiplies codes; else numbers.
        x_operand: Whether scales of activations are in their operand.
        x_factor: Whether they multiply products.
        w_operand: Whether scales of weights are in their operand.
        w_factor: Whether they multiply products.
        in_float32: Whether numbers are multiplied as float32; else as bfloat16, which holds every
            code and, of weights that are not codes, bfloat16.
    """

    weight_kind: int
    multiplies_codes: bool
    x_operand: bool
    x_factor: bool
    w_operand: bool
    w_factor: bool
    in_float32: bool


class Variant(NamedTuple):
    """A tile, and how it is multiplied.

    Attributes:
        block_m: Tokens.
        block_n: Columns.
        block_k: Features of a step; cut to the groups of scales that multiply the product.
        fp8_product: Whether the matrix unit may multiply codes.
        num_warps: Warps of a program.
        num_stages: Steps in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    fp8_product: bool = True
    num_warps: int = 4
    num_stages: int = 4


def choose_variant(num_tokens: int, fp8_product: bool) -> Variant:
    """Tile for a number of tokens."""
    block_k = 128 if fp8_product else 64
    if num_tokens <= _FEW_TOKENS:
        return Variant(64, 64, block_k, fp8_product, num_stages=5)
    return Variant(128, 128, block_k, fp8_product, num_warps=8)


def _can_multiply_codes(kind: int, weight_kind: int) -> bool:
    """Whether scales, if any, are of whole blocks of the product."""
    return kind in (1, 2, 3, 4) and weight_kind == _BLOCKS_128


def _fit(
    variant: Variant,
    kind: int,
    group: int,
    weight_kind: int,
    in_float32: bool,
    shared_memory: int,
) -> tuple[Variant, ProductConfig]:
    """Cut the steps to what scales and shared memory allow, and say what multiplies where."""
    # Codes with scales, which are none for one scale per tensor.
    has_groups = kind in (2, 3, 4)
    fp8_product = variant.fp8_product and _can_multiply_codes(kind, weight_kind)
    x_operand = kind == _FP8_UE8M0 and group == 32 and not fp8_product
    x_factor = has_groups and not x_operand
    block_k = variant.block_k
    if kind == _NVFP4:
        block_k = 64
    if x_factor:
        block_k = min(block_k, group)
    stages = variant.num_stages
    if in_float32 and shared_memory < _FLOAT32_BYTES:
        stages = min(stages, 2)
    product = ProductConfig(
        weight_kind,
        multiplies_codes=fp8_product,
        x_operand=x_operand,
        x_factor=x_factor,
        w_operand=weight_kind == _GROUPS_32,
        w_factor=weight_kind == _BLOCKS_128,
        in_float32=in_float32,
    )
    return variant._replace(block_k=block_k, num_stages=stages), product


def plan_product(
    source: OutputConfig,
    weight: torch.Tensor,
    weight_sf: torch.Tensor | None,
    native: bool,
    num_tokens: int,
    shared_memory: int,
    variant: Variant | None = None,
) -> tuple[Variant, ProductConfig]:
    """Tile and product of a buffer and weights with these scales, or none.

    Args:
        source: The buffer.
        weight: Its dtype and the type of its device are looked at.
        weight_sf: Its scales, of which the dtype is looked at, or None.
        native: Whether the matrix unit knows e4m3.
        num_tokens: Tokens of the buffer.
        shared_memory: Bytes of shared memory that a program may have.
        variant: A tile to be cut; None for the usual one.
    """
    weight_kind = _PLAIN
    if weight_sf is not None:
        weight_kind = _BLOCKS_128 if weight_sf.dtype == torch.float32 else _GROUPS_32
    fp8_product = native and _can_multiply_codes(source.kind, weight_kind)
    variant = variant or choose_variant(num_tokens, fp8_product)
    variant = variant._replace(fp8_product=variant.fp8_product and fp8_product)
    # Rounded to bfloat16 such weights would lose bits; nor does a CPU multiply that.
    in_float32 = weight.dtype in (torch.float32, torch.float16) or weight.device.type == "cpu"
    return _fit(variant, source.kind, source.group, weight_kind, in_float32, shared_memory)

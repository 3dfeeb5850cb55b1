"""Tiles of the Hopper products that consume a quantised output, and what is multiplied."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlacast.kernels.config.hopper_grouped_out_project_few import FewPlan, plan_few


class Variant(NamedTuple):
    """What the kernel can be built with.

    Attributes:
        block_m: Tokens of a tile.
        block_n: Columns of a tile.
        stages: Steps of 128 features in flight.
        split: What the consumers share: "rows", "columns", or "steps".
        banks: Products of a scale's features in flight per consumer, 1 or 2.
        loaders: Load roles that take steps in turn, 1 or 2.
    """

    block_m: int
    block_n: int
    stages: int
    split: str
    banks: int = 2
    loaders: int = 1


class ProductConfig(NamedTuple):
    """What is multiplied.

    Attributes:
        steps: Steps of 128 features that a group has.
        parts: Parts of a step that have scales of their own.
        x_bytes: Whether scales of tokens are bytes, four to a word; else float32.
        weight_bytes: Whether those of weights are.
    """

    steps: int
    parts: int
    x_bytes: bool
    weight_bytes: bool


# From the tile that reads its operands least often to the one that fills the device first.
VARIANTS = (
    Variant(128, 128, 6, "rows"),
    Variant(64, 128, 6, "steps"),
    Variant(64, 64, 8, "steps"),
)
# For few tokens and scales per 32 features, whose load role takes longer than their consumers.
TWO_LOADERS = Variant(64, 64, 8, "steps", loaders=2)
# Multiprocessors of ten that may not idle.
_BUSY_TENTHS = 9
# Registers that all roles of a program may have by the thread, with as many load roles.
MAX_REGISTERS = {1: 168, 2: 128}


class ProductPlan(NamedTuple):
    """How the product is launched.

    Attributes:
        variant: What the kernel is built with.
        product: What is multiplied.
        num_programs: Programs that take tiles in turn.
        max_registers: Registers of a thread before roles trade theirs.
    """

    variant: Variant
    product: ProductConfig
    num_programs: int
    max_registers: int


def count_tiles(variant: Variant, num_tokens: int, num_columns: int, num_groups: int) -> int:
    """Tiles of a product."""
    down, across = -(-num_tokens // variant.block_m), -(-num_columns // variant.block_n)
    return down * across * num_groups


def choose_variant(
    num_tokens: int, num_columns: int, num_groups: int, multiprocessors: int, per_32: bool
) -> Variant:
    """The largest tile that still gives most multiprocessors one.

    ``per_32`` says that either side has scales per 32 features.
    """
    for variant in VARIANTS[:-1]:
        is_tall = num_tokens <= variant.block_m - 64
        tiles = count_tiles(variant, num_tokens, num_columns, num_groups)
        if not is_tall and 10 * tiles >= _BUSY_TENTHS * multiprocessors:
            return variant
    return TWO_LOADERS if per_32 else VARIANTS[-1]


def product_config(features: int, sf: torch.dtype, weight_sf: torch.dtype) -> ProductConfig:
    """Describe the product over so many features, with scales of these types."""
    x_bytes, weight_bytes = sf == torch.int32, weight_sf == torch.int32
    parts = 4 if x_bytes or weight_bytes else 1
    return ProductConfig(features // 128, parts, x_bytes, weight_bytes)


def product_plan(
    sizes: tuple[int, int, int, int],
    sf: torch.dtype,
    weight_sf: torch.dtype,
    multiprocessors: int,
    variant: Variant | None = None,
) -> ProductPlan:
    """Plan a launch; pure.

    Args:
        sizes: Tokens, columns of a group, groups, and features of a group.
        sf: Type of the scales of tokens.
        weight_sf: Type of those of weights.
        multiprocessors: Programs that run at a time.
        variant: What to build; None for the largest tile that gives most multiprocessors one.
    """
    tokens, columns, groups, features = sizes
    product = product_config(features, sf, weight_sf)
    if variant is None:
        per_32 = product.parts > 1
        variant = choose_variant(tokens, columns, groups, multiprocessors, per_32)
    tiles = count_tiles(variant, tokens, columns, groups)
    registers = MAX_REGISTERS[variant.loaders]
    return ProductPlan(variant, product, min(tiles, multiprocessors), registers)


def choose_product(
    sizes: tuple[int, int, int, int],
    sf: torch.dtype,
    weight_sf: torch.dtype,
    multiprocessors: int,
    variant: Variant | FewPlan | None = None,
) -> ProductPlan | FewPlan:
    """Choose the kernel, and plan its launch; pure.

    That of few tokens takes those for which no other tile would keep the multiprocessors busy,
    with words of scales on both sides. Arguments as in ``product_plan``; ``variant`` may be a plan
    of either.
    """
    tokens, _, _, features = sizes
    if isinstance(variant, FewPlan):
        assert tokens <= variant.block_m, "a program holds all tokens"
        assert features == 128 * variant.steps, "the kernel is built for a number of steps"
        return variant
    plan = product_plan(sizes, sf, weight_sf, multiprocessors, variant)
    has_words = plan.product.x_bytes and plan.product.weight_bytes
    if variant is None and plan.variant == TWO_LOADERS and has_words:
        return plan_few(tokens, features) or plan
    return plan

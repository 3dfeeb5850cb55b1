"""Tile sizes and splits of the attention kernels over cached tokens."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from mlacast.kernels.config.attention import PoolConfig
from mlacast.kernels.config.output import OutputConfig
from mlacast.kernels.config.shared_memory import LARGE_SHARED_MEMORY, shared_memory_of

# Heads that a tile of the Hopper decode has as columns, where a token has no more of them; else
# they are rows of tiles of 64.
FEW_HEADS = (16, 32)
# Rows (token, head) up to which the merge of splits has few warps on a multiprocessor.
_FEW_ROWS = 1024


class TileConfig(NamedTuple):
    """Heads and keys of a program's tile, and how Triton schedules it."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


class WorkConfig(NamedTuple):
    """How the Hopper decode cuts a call into items of 64 heads of a token.

    Attributes:
        head_blocks: Items for the heads of a token.
        full_tiles: Whether the last of them is full.
        is_split: Whether several items share the keys of a row.
    """

    head_blocks: int
    full_tiles: bool
    is_split: bool


class PrefillWork(NamedTuple):
    """How the Hopper prefill of 512 dimensions cuts a call into tiles of 64 heads of a token.

    Attributes:
        head_blocks: Tiles for the heads of a token.
        full_tiles: Whether the last of them is full.
        parts: Programs that share a tile, each with all scores and its part of the output.
    """

    head_blocks: int
    full_tiles: bool
    parts: int


class RingConfig(NamedTuple):
    """What the roles of the Hopper decode share.

    Attributes:
        num_pieces: Pieces of the ring, [64, 256] of bfloat16 each.
        delays_output: Whether P V waits until the next scores are nearly done.
        dequant_registers: Registers of a dequantising thread.
    """

    num_pieces: int
    delays_output: bool
    dequant_registers: int


class CombineConfig(NamedTuple):
    """A program of the portable merge of splits.

    Attributes:
        block_h: Heads of one token.
        width: Dimensions of theirs, of 512; only the last 64 are rotated.
        num_warps: Its warps.
    """

    block_h: int
    width: int
    num_warps: int


class MergeProgram(NamedTuple):
    """A program of the Hopper merge of splits.

    Attributes:
        heads: Heads of one token.
        warps: Two for one head to one for four.
        ahead: Splits whose partials are on their way at a time.
    """

    heads: int
    warps: int
    ahead: int


class MergePlan(NamedTuple):
    """How the Hopper merge of splits is launched.

    Attributes:
        program: What a program takes on.
        full_tiles: Whether the last program of a token has all of its heads.
        grid: Tokens, and programs of a token.
    """

    program: MergeProgram
    full_tiles: bool
    grid: tuple[int, int]


def work_config(num_heads: int, num_splits: int) -> WorkConfig:
    """Cut ``num_heads`` heads and the keys of a row."""
    return WorkConfig(-(-num_heads // 64), num_heads % 64 == 0, num_splits > 1)


def prefill_work(num_tokens: int, num_heads: int, multiprocessors: int) -> PrefillWork:
    """Cut ``num_heads`` heads, and the output where that keeps more multiprocessors at work.

    Every output is the same sum in either case, so a row has its bits in any batch.
    """
    head_blocks = -(-num_heads // 64)
    fits_twice = 2 * num_tokens * head_blocks <= multiprocessors
    return PrefillWork(head_blocks, num_heads % 64 == 0, 2 if fits_twice else 1)


class PrefillPlan(NamedTuple):
    """How a Hopper prefill is launched.

    Attributes:
        work: How the kernel cuts the call.
        num_programs: Programs that take tiles in turn.
    """

    work: PrefillWork | WorkConfig
    num_programs: int


def prefill_plan(num_tokens: int, num_heads: int, multiprocessors: int) -> PrefillPlan:
    """Plan a Hopper prefill of 512 dimensions."""
    work = prefill_work(num_tokens, num_heads, multiprocessors)
    tiles = num_tokens * work.head_blocks * work.parts
    return PrefillPlan(work, min(tiles, multiprocessors))


def prefill_576_plan(num_tokens: int, num_heads: int, multiprocessors: int) -> PrefillPlan:
    """Plan a Hopper prefill of 576 dimensions."""
    work = work_config(num_heads, num_splits=1)
    return PrefillPlan(work, min(num_tokens * work.head_blocks, multiprocessors))


_FEW_HEADS_RECORDS = ("v4", "v41")
# As in the stores: float32 scales of any value, a division by which calls a slow path.
_FP8_FLOAT32 = 2


def has_few_heads(
    num_heads: int, is_split: bool, pool: PoolConfig, extra: PoolConfig | None, output: OutputConfig
) -> bool:
    """Whether the Hopper decode takes the kernel of few heads, by what it can do.

    Not by the number of tokens, other than by the splits: where these are the same in any batch, so
    are the bits of a row.
    """
    is_alike = extra is None or extra.record == pool.record
    return (
        num_heads <= FEW_HEADS[-1]
        and not is_split
        and pool.record in _FEW_HEADS_RECORDS
        and is_alike
        and output.kind != _FP8_FLOAT32
    )


def few_heads_tile(num_heads: int) -> int:
    """Heads of a tile of the Hopper decode of few heads: columns of its products."""
    return next(tile for tile in FEW_HEADS if num_heads <= tile)


def few_heads_work(num_heads: int) -> WorkConfig:
    """A token of the Hopper decode of few heads as one item, a tile of ``few_heads_tile``."""
    return WorkConfig(1, num_heads == few_heads_tile(num_heads), is_split=False)


def ring_config(d_qk: int, has_codes: bool) -> RingConfig:
    """Share out shared memory and registers.

    Args:
        d_qk: Dimensions of a head.
        has_codes: Whether queries are e4m3; their ring holds keys alone, two blocks of them.
    """
    if has_codes:
        return RingConfig(num_pieces=4, delays_output=False, dequant_registers=48)
    # P V is held back where the ring has room for it.
    has_room = d_qk == 512
    return RingConfig(5 if has_room else 4, has_room, dequant_registers=48)


def tile_config(num_heads: int, shared_memory: int) -> TileConfig:
    """Pick a tile; pure, so results do not depend on tuning.

    Args:
        num_heads: Query heads.
        shared_memory: Bytes of shared memory that a program may have. Where that is little only the
            smallest tile fits every format and 576 dimensions.
    """
    if num_heads <= 16 or shared_memory < LARGE_SHARED_MEMORY:
        return TileConfig(block_h=16, block_n=32, num_warps=4, num_stages=2)
    if num_heads <= 32:
        return TileConfig(block_h=32, block_n=32, num_warps=4, num_stages=2)
    return TileConfig(block_h=64, block_n=32, num_warps=8, num_stages=2)


def choose_num_splits(
    programs: int, width: int, block_n: int, multiprocessors: int, batch_invariant: bool
) -> int:
    """Pick how many programs share one row of indices.

    Args:
        programs: Programs of an un-split launch.
        width: Index columns of both lists.
        block_n: Keys per block.
        multiprocessors: Programs that run at a time, if one fills a multiprocessor.
        batch_invariant: Decide by ``width`` alone, so a row is cut the same way in every batch.
    """
    blocks = max(1, -(-width // block_n))
    if batch_invariant:
        return min(-(-blocks // 4), 16)
    return max(1, min(multiprocessors // max(programs, 1), -(-blocks // 2), 32))


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
    tiles = tile_config(h_q, shared_memory_of(device))
    return _portable_splits(s_q, h_q, width, tiles, num_multiprocessors(device), batch_invariant)


def plan_hopper_decode(
    s_q: int, h_q: int, width: int, device: torch.device, batch_invariant: bool
) -> int:
    """Splits that the Hopper decode picks for ``width`` index columns of both lists."""
    return _hopper_splits(s_q, h_q, width, num_multiprocessors(device), batch_invariant)


def _portable_splits(
    s_q: int, h_q: int, width: int, tiles: TileConfig, multiprocessors: int, batch_invariant: bool
) -> int:
    programs = s_q * -(-h_q // tiles.block_h)
    return choose_num_splits(programs, width, tiles.block_n, multiprocessors, batch_invariant)


def _hopper_splits(
    s_q: int, h_q: int, width: int, multiprocessors: int, batch_invariant: bool
) -> int:
    tiles, blocks = s_q * -(-h_q // 64), -(-width // 64)
    return choose_decode_splits(tiles, blocks, multiprocessors, batch_invariant)


class HopperDecodePlan(NamedTuple):
    """How the Hopper decode is launched.

    Attributes:
        work: How the kernel cuts the call.
        num_splits: Items that share the keys of a row.
        num_items: Items of the call.
        num_programs: Programs that take them in turn.
    """

    work: WorkConfig
    num_splits: int
    num_items: int
    num_programs: int


class PortableDecodePlan(NamedTuple):
    """How a portable decode, sparse or dense, is launched.

    Attributes:
        tiles: Tile of a program.
        num_splits: Programs that share the keys of a row.
        num_programs: Programs of a split.
    """

    tiles: TileConfig
    num_splits: int
    num_programs: int


def hopper_decode_plan(
    s_q: int,
    h_q: int,
    width: int,
    multiprocessors: int,
    num_splits: int | None,
    batch_invariant: bool,
) -> HopperDecodePlan:
    """Plan a launch over ``width`` index columns of both lists; ``num_splits`` as in the call."""
    splits = num_splits or _hopper_splits(s_q, h_q, width, multiprocessors, batch_invariant)
    work = work_config(h_q, splits)
    items = s_q * work.head_blocks * splits
    return HopperDecodePlan(work, splits, items, min(items, multiprocessors))


def portable_decode_plan(
    s_q: int,
    h_q: int,
    width: int,
    multiprocessors: int,
    shared_memory: int,
    num_splits: int | None,
    batch_invariant: bool,
) -> PortableDecodePlan:
    """Plan a launch over ``width`` index columns of both lists; ``num_splits`` as in the call."""
    tiles = tile_config(h_q, shared_memory)
    splits = num_splits or _portable_splits(
        s_q, h_q, width, tiles, multiprocessors, batch_invariant
    )
    # No more splits than blocks; but two stay two, so that a narrower list runs the same variant.
    splits = min(splits, max(-(-width // tiles.block_n), 2))
    return PortableDecodePlan(tiles, splits, s_q * -(-h_q // tiles.block_h))


def combine_config(num_tokens: int, num_heads: int) -> CombineConfig:
    """Pick a program of the portable merge.

    Few rows need every multiprocessor; many are cheaper in larger programs.
    """
    block_h = 1 if num_tokens * num_heads <= _FEW_ROWS else 4
    return CombineConfig(block_h, width=128, num_warps=1)


FEW = MergeProgram(heads=1, warps=2, ahead=8)
MANY = MergeProgram(heads=8, warps=4, ahead=2)


def merge_plan(num_tokens: int, num_heads: int) -> MergePlan:
    """Plan the Hopper merge; not by the number of splits, which varies with the contexts' length.

    Few rows wait for memory, so their programs have many splits on their way.
    """
    is_few = num_tokens * num_heads <= _FEW_ROWS or num_heads < MANY.heads
    program = FEW if is_few else MANY
    grid = (num_tokens, -(-num_heads // program.heads))
    return MergePlan(program, num_heads % program.heads == 0, grid)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 where there are none to ask about."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

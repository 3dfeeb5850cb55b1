"""What kernels that quantise queries and keys, or write or read records, are compiled for.

The sizes of their programs, and what the tensors and the cache of a call are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.rope import Rope

# Up to so many rows small programs, so that all multiprocessors have some.
_FEW_ROWS = 1024
# A program of 32 rows lies in two pages at most if these are not smaller.
_ROWS_OF_A_PAGE = 32
# 16 tokens of 128 heads.
_FEW_QUERY_ROWS = 2048
# Formats that keep the last 64 dimensions as they were.
_KEEP_TAILS = ("v32", "v4", "nvfp4_384")


class RowsConfig(NamedTuple):
    """Rows of a program, and its warps."""

    rows: int
    num_warps: int


class RopeConfig(NamedTuple):
    """A program of ``rope_quantize_fp8``.

    Attributes:
        rows: Rows of a program, a token and a head each.
        num_warps: Its warps.
        pinned: A barrier keeps the loads of columns before those of angles.
        ahead: Rows of queries are sent for before the kernel before has ended.
    """

    rows: int
    num_warps: int
    pinned: bool = False
    ahead: bool = False


class RopePlan(NamedTuple):
    """How ``rope_quantize_fp8`` is launched.

    Attributes:
        config: A program.
        q_blocks: Programs for rows of queries.
        k_blocks: Programs for rows of keys, and as many for rows of values if there are any.
        num_programs: All of them.
    """

    config: RopeConfig
    q_blocks: int
    k_blocks: int
    num_programs: int


class PairsConfig(NamedTuple):
    """Columns that are rotated.

    Attributes:
        columns: How many of a row.
        block: A power of two that is not below half of that.
        half_pairing: Whether column i is paired with that half of them further; else with its
            neighbour.
    """

    columns: int
    block: int
    half_pairing: bool


class HeadsConfig(NamedTuple):
    """Heads of queries, keys or values.

    Attributes:
        heads: How many of a token.
        columns: Columns of a head that are not rotated, possibly 0.
        block: A power of two that is not below that.
    """

    heads: int
    columns: int
    block: int


class CodesConfig(NamedTuple):
    """How numbers become FP8.

    Attributes:
        is_e5m2: Whether codes are e5m2; else e4m3.
        native: Whether the device has instructions for that.
    """

    is_e5m2: bool
    native: bool


class RecordConfig(NamedTuple):
    """Records of a cache: plain rows in elements, all others in bytes.

    Attributes:
        name: Name of the record format, "rows" for plain bfloat16.
        is_inline: Whether scales stand beside each token; else behind those of a page.
        data: Width of what a token has without its scales.
        scale: Width of its scales.
        d_qk: Dimensions of a row, 512 or 576.
        keeps_tail: Whether the last 64 of them are stored as bfloat16 beside codes.
    """

    name: str
    is_inline: bool
    data: int
    scale: int
    d_qk: int
    keeps_tail: bool


class LatentConfig(NamedTuple):
    """What happens to rows before they become records.

    Attributes:
        has_norm: Whether the first 512 dimensions are normed.
        has_weight: Whether the norm has weights; else ones.
        has_rope: Whether the last 64 dimensions are rotated.
        half_pairing: Whether dimension i of those is paired with i + 32; else with its neighbour.
    """

    has_norm: bool
    has_weight: bool
    has_rope: bool
    half_pairing: bool


class AppendConfig(NamedTuple):
    """Rows of a program, and how it looks for earlier rows with the same slots.

    Attributes:
        rows: Rows of a program, 32 at most.
        num_warps: Its warps.
        tile: Earlier slots compared with the ranges of its own at a time, before any are compared
            with each of its own; 0 leaves the ranges out.
        step: Earlier slots compared with each of its own at a time.
        max_registers: Registers of a thread at most, 0 for as many as the compiler wants. With 128
            there are 512 threads on a multiprocessor, for which 8192 rows are one wave.
        parts: A row is so many parts of 512 // parts dimensions, one behind the other: with four
            eight threads share a row, and each has but one.
    """

    rows: int
    num_warps: int
    tile: int
    step: int
    max_registers: int = 0
    parts: int = 1


def rope_quantize_config(num_rows: int) -> RopeConfig:
    """Pick the program of ``rope_quantize_fp8`` for so many rows of queries.

    Eight rows of 576 numbers are 9 KB in flight, and 64 tokens of 128 heads still give every
    multiprocessor several programs. Of fewer tokens a warp has one row, sends for it before the
    kernel before has ended, and asks for all of it before it waits for a position.
    """
    if num_rows <= _FEW_QUERY_ROWS:
        return RopeConfig(rows=4, num_warps=4, pinned=True, ahead=True)
    return RopeConfig(rows=8, num_warps=4)


def rope_quantize_plan(
    num_tokens: int,
    q_heads: int,
    kv_heads: int,
    has_values: bool,
    config: RopeConfig | None = None,
) -> RopePlan:
    """Plan a launch of ``rope_quantize_fp8``; ``config`` None takes the usual program."""
    config = config or rope_quantize_config(num_tokens * q_heads)
    q_blocks = -(-num_tokens * q_heads // config.rows)
    k_blocks = -(-num_tokens * kv_heads // config.rows)
    return RopePlan(config, q_blocks, k_blocks, q_blocks + k_blocks * (2 if has_values else 1))


def _power_of_two(number: int) -> int:
    """The least power of two that is not below ``number``, 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()


def pairs_config(columns: int, pairing: str) -> PairsConfig:
    """Describe the rotated columns; ``pairing`` as in ``mlacast.rope_quantize_fp8``."""
    return PairsConfig(columns, _power_of_two(columns // 2), half_pairing=pairing == "half")


def heads_config(heads: int, columns: int) -> HeadsConfig:
    """Describe heads with so many columns that are not rotated."""
    return HeadsConfig(heads, columns, _power_of_two(columns))


def codes_config(dtype: torch.dtype, *, native: bool) -> CodesConfig:
    """Describe the codes of an output of ``dtype``."""
    return CodesConfig(is_e5m2=dtype == torch.float8_e5m2, native=native)


def record_config(kv_format: KvFormat, width: int, num_slots: int) -> RecordConfig:
    """Describe the records of a cache with so many slots.

    Args:
        kv_format: Format of the cache.
        width: Dimensions of a row; looked at where the format leaves them open, whose records are
            as wide.
        num_slots: Slots of the cache.
    """
    assert num_slots < 2**31, "a cache of 2**31 records would take 600 GB or more"
    d_qk = width if kv_format.d_qk is None else kv_format.d_qk
    return RecordConfig(
        kv_format.record or "rows",
        is_inline=kv_format.placement == "inline",
        data=d_qk if kv_format.record is None else kv_format.record_data_bytes(d_qk),
        scale=kv_format.scale_bytes,
        d_qk=d_qk,
        keeps_tail=kv_format.record in _KEEP_TAILS,
    )


def latent_config(
    norm_weight: torch.Tensor | None, norm_eps: float | None, rope: Rope | None
) -> LatentConfig:
    """Describe what a call does to its rows; arguments as in ``mlacast.kv_cache_append``."""
    return LatentConfig(
        has_norm=norm_eps is not None,
        has_weight=norm_weight is not None,
        has_rope=rope is not None,
        half_pairing=rope is not None and rope.pairing == "half",
    )


def append_config(num_rows: int, page_size: int) -> AppendConfig:
    """Pick the program of ``kv_cache_append``.

    Programs of many rows ask for all slots of a chunk of 8192 at once, and wait for no second tile.
    """
    if num_rows <= _FEW_ROWS:
        return AppendConfig(rows=2, num_warps=2, tile=0, step=1024)
    if page_size < _ROWS_OF_A_PAGE:
        # A program of 32 rows would lie in more pages than it has ranges for.
        return AppendConfig(rows=16, num_warps=4, tile=4096, step=128, max_registers=128, parts=4)
    return AppendConfig(rows=32, num_warps=8, tile=8192, step=128, max_registers=128, parts=4)


def gather_config() -> RowsConfig:
    """Pick the program of ``kv_cache_gather``: a warp that reads two records."""
    return RowsConfig(rows=2, num_warps=1)

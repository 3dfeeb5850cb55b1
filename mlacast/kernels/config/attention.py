"""What attention kernels over selected or cached tokens are compiled for, apart from tiles.

Each value is one compile-time argument of a kernel. They hold data alone: Triton tells variants
apart by what these tuples print, and would not see a method of theirs change.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.rope import Rope

# Names of the record formats in ``records.load_records``, by cache format.
_RECORDS = {
    "BF16": "rows",
    "FP8": "fp8",
    "V32": "v32",
    "V4": "v4",
    "V41": "v41",
    "V41_INLINE": "v41",
    "V41_FP4": "v41_fp4",
    "V41_FP4_INLINE": "v41_fp4",
    "NVFP4_384": "nvfp4_384",
}


class QueryConfig(NamedTuple):
    """How a query is read.

    Attributes:
        d_qk: Dimensions of a head, 512 or 576.
        chunk16: Whether 16-chunks of the heads alternate; else heads follow each other.
        has_norm: Whether its norm joins the score scale.
        is_rotated: Whether its last 64 dimensions are rotated.
        half_pairing: Whether dimension i is paired with i + 32; else with its neighbour.
    """

    d_qk: int
    chunk16: bool = False
    has_norm: bool = False
    is_rotated: bool = False
    half_pairing: bool = False


class PoolConfig(NamedTuple):
    """How the tokens of one cache are read.

    Attributes:
        record: Name of the record format; for Hopper that of `hopper_pool_config`.
        is_inline: Whether scales stand beside each token; else behind those of a page.
        has_length: Whether rows of its index list have lengths of their own.
    """

    record: str
    is_inline: bool = False
    has_length: bool = False


class EndConfig(NamedTuple):
    """What follows the last key of a row.

    Attributes:
        has_sink: Whether a sink joins the denominator.
        rotates_back: Whether the last 64 dimensions of the output are rotated back.
        half_pairing: As in `QueryConfig`.
    """

    has_sink: bool = False
    rotates_back: bool = False
    half_pairing: bool = False


class ScaleConfig(NamedTuple):
    """Which scales are read on the device; the others are numbers.

    Attributes:
        sm_on_device: That of the scores.
        v_on_device: That of the values.
    """

    sm_on_device: bool = False
    v_on_device: bool = False


def query_config(
    d_qk: int, q_order: str = "head", q_norm_eps: float | None = None, rope: Rope | None = None
) -> QueryConfig:
    """Describe the query of a call; arguments as in ``mlacast.sparse_mla_decode``."""
    return QueryConfig(
        d_qk,
        chunk16=q_order == "chunk16",
        has_norm=q_norm_eps is not None,
        is_rotated=rope is not None and rope.rotate_query,
        half_pairing=rope is not None and rope.pairing == "half",
    )


def rows_config(lengths: torch.Tensor | None = None) -> PoolConfig:
    """Describe plain rows, which are no cache, and the lengths of the index lists over them."""
    return PoolConfig("rows", has_length=lengths is not None)


def pool_config(kv_format: KvFormat, lengths: torch.Tensor | None = None) -> PoolConfig:
    """Describe a cache and the lengths of its index lists."""
    return PoolConfig(
        _RECORDS[kv_format.name],
        is_inline=kv_format.placement == "inline",
        has_length=lengths is not None,
    )


def hopper_pool_config(
    kv_format: KvFormat, d_qk: int, lengths: torch.Tensor | None = None
) -> PoolConfig:
    """Describe a cache to the Hopper decode, for which FP8 is "fp8_512" or "fp8_576"."""
    pool = pool_config(kv_format, lengths)
    return pool._replace(record=f"fp8_{d_qk}") if kv_format.name == "FP8" else pool


def end_config(
    d_qk: int, attn_sink: torch.Tensor | None = None, rope: Rope | None = None
) -> EndConfig:
    """Describe the epilogue of a call: outputs of 576-wide queries are not rotated back."""
    return EndConfig(
        has_sink=attn_sink is not None,
        rotates_back=rope is not None and d_qk == 512,
        half_pairing=rope is not None and rope.pairing == "half",
    )

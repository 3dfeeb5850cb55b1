"""The program of ``decode_metadata``."""

from __future__ import annotations

from typing import NamedTuple


class MetadataConfig(NamedTuple):
    """The only program of a call.

    Attributes:
        block_b: Requests that it holds.
        num_warps: Its warps.
    """

    block_b: int
    num_warps: int


# Three variants whatever the batch.
SIZES = (MetadataConfig(64, 1), MetadataConfig(1024, 4), MetadataConfig(8192, 16))


def metadata_config(batch: int) -> MetadataConfig:
    """Pick the smallest program that holds ``batch`` requests."""
    assert batch <= SIZES[-1].block_b, "dispatch sends larger batches elsewhere"
    return next(size for size in SIZES if batch <= size.block_b)

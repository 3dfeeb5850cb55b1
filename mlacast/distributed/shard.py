"""``KvShard``: which tokens of every request one rank of a group keeps in its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from mlacast.errors import check_type, fail

OP = "KvShard"
# One integer, or an integer tensor of any shape.
Integers = TypeVar("Integers", int, Tensor)


@dataclass(frozen=True)
class KvShard:
    """The tokens that one rank keeps: every ``world_size``-th run of ``interleave`` positions.

    The token at position p is on rank ``p // interleave % world_size``. A rank keeps its tokens in
    order of position, without gaps; their number there is their local index.

    Attributes:
        rank: This rank, 0 to world_size - 1.
        world_size: Ranks that share a cache, at least 1. A world of 1 keeps everything.
        interleave: Neighbouring positions that stay together, at least 1.

    Raises:
        TypeError: A number is not an int.
        ValueError: A number is out of its range.
    """

    rank: int = 0
    world_size: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, number, lowest in (
            ("rank", self.rank, 0),
            ("world_size", self.world_size, 1),
            ("interleave", self.interleave, 1),
        ):
            check_type(OP, name, number, int, "an int")
            if number < lowest:
                fail(OP, name, f"be at least {lowest}", number)
        if self.rank >= self.world_size:
            fail(OP, "rank", f"be below world_size={self.world_size}", self.rank)

    def owner(self, positions: Integers) -> Integers:
        """Return the rank that keeps each position, positions from 0."""
        return positions // self.interleave % self.world_size

    def local_index(self, positions: Integers) -> Integers:
        """Return the local index of each position, positions from 0, on the rank that keeps it."""
        rounds = positions // (self.world_size * self.interleave)
        return rounds * self.interleave + positions % self.interleave

    def local_length(self, lengths: Integers) -> Integers:
        """Return how many of the first ``lengths`` positions this rank keeps, lengths from 0.

        They are its local indices 0 to that number: what a token at position p may see here is
        ``local_length(p + 1)``.
        """
        whole_rounds = lengths // (self.world_size * self.interleave)
        rest = lengths - whole_rounds * (self.world_size * self.interleave)
        own = rest - self.rank * self.interleave
        if isinstance(own, Tensor):
            own = own.clamp(0, self.interleave)
        else:
            own = min(max(own, 0), self.interleave)
        return whole_rounds * self.interleave + own

    def on_rank(self, rank: int) -> KvShard:
        """Return the shard of another rank of the same world."""
        return KvShard(rank, self.world_size, self.interleave)

"""Split-KV schedules: the contract's vectors, and its greedy walk as a plain loop over Python ints.

Rows are (first request, first block, last request, block after the last, split index).
"""

from __future__ import annotations

from dataclasses import dataclass

Row = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Vector:
    """Lengths, parts and overhead with the schedule that the contract prints for them.

    Attributes:
        lengths: Tokens of each request.
        num_parts: Parts.
        overhead: Blocks that a request costs beyond its own.
        rows: Rows of the parts that work; the other parts are idle.
        num_splits: Splits before each request.
    """

    lengths: tuple[int, ...]
    num_parts: int
    overhead: int
    rows: tuple[Row, ...]
    num_splits: tuple[int, ...]


VECTORS = (
    Vector(
        (2048, 64, 1),
        4,
        5,
        ((0, 0, 0, 13, 0), (0, 13, 0, 26, 1), (0, 26, 1, 1, 2), (2, 0, 2, 1, 0)),
        (0, 3, 4, 5),
    ),
    Vector(
        (2048, 2048),
        6,
        5,
        (
            (0, 0, 0, 13, 0),
            (0, 13, 0, 26, 1),
            (0, 26, 1, 2, 2),
            (1, 2, 1, 15, 1),
            (1, 15, 1, 28, 2),
            (1, 28, 1, 32, 3),
        ),
        (0, 3, 7),
    ),
    Vector(
        (2048, 2048),
        6,
        3,
        (
            (0, 0, 0, 12, 0),
            (0, 12, 0, 24, 1),
            (0, 24, 1, 1, 2),
            (1, 1, 1, 13, 1),
            (1, 13, 1, 25, 2),
            (1, 25, 1, 32, 3),
        ),
        (0, 3, 7),
    ),
    Vector(
        (64,) * 8,
        4,
        5,
        ((0, 0, 1, 1, 0), (2, 0, 3, 1, 0), (4, 0, 5, 1, 0), (6, 0, 7, 1, 0)),
        tuple(range(9)),
    ),
    Vector((640,), 132, 5, tuple((0, n, 0, n + 1, n) for n in range(10)), (0, 10)),
)


def walk(
    lengths: list[int], num_parts: int, topk: int | None, overhead: int
) -> tuple[list[Row], list[int]]:
    """Hand out blocks one part after the other, one request after the other."""
    batch = len(lengths)
    bounded = [max(length, 0) if topk is None else min(max(length, 0), topk) for length in lengths]
    blocks = [-(-max(length, 1) // 64) for length in bounded]
    payload = -(-sum(count + overhead for count in blocks) // num_parts) + overhead
    rows: list[Row] = []
    num_splits = [0] * (batch + 1)
    request = block = split = 0
    for _ in range(num_parts):
        if request == batch:
            rows.append((batch, 0, batch - 1, 0, 0))
            continue
        first, first_block, first_split = request, block, split
        left = payload
        while request < batch and left >= blocks[request] - block + overhead:
            left -= blocks[request] - block + overhead
            num_splits[request + 1] = num_splits[request] + split + 1
            request, block, split = request + 1, 0, 0
        if request < batch and left > overhead:
            block, split = block + left - overhead, split + 1
        last, stop = (request, block) if block else (request - 1, blocks[request - 1])
        rows.append((first, first_block, last, stop, first_split))
    assert request == batch, "the parts hold all blocks"
    return rows, num_splits

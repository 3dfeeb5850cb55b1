"""Where the Hopper decode of few heads keeps heads and values: registers, stages, the ring."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton to import kernels")

from mlacast.kernels.gluon.sm90 import sparse_mla_decode_few_layouts as layouts  # noqa: E402
from mlacast.kernels.gluon.sm90 import sparse_mla_decode_few_ring as ring  # noqa: E402

HEADS = pytest.mark.parametrize("heads", [16, 32])
Place = tuple[int, int]


def _reach(bases: list[list[int]]) -> list[Place]:
    """Coordinates by number: of every bit that is set the base, all combined by exclusive or."""
    places = [(0, 0)]
    for row, column in bases:
        places += [(r ^ row, c ^ column) for r, c in places]
    return places


@HEADS
@pytest.mark.parametrize("name", ["group", "pair", "partial", "chunk"])
def test_threads_share_heads_out(name: str, heads: int) -> None:
    """Every number has one thread, and a thread's heads are those of its warp in any layout."""
    layout: Any = getattr(layouts, f"make_{name}_layout")(heads)
    width = {"group": 64, "pair": 32, "partial": 8, "chunk": 128}[name]
    lanes, warps = layout.lane_bases, layout.warp_bases
    places = _reach([*layout.reg_bases, *lanes, *warps])
    assert sorted(places) == list(itertools.product(range(heads), range(width)))
    for warp, (row, _) in enumerate(_reach(warps)):
        assert row == 4 * warp
        rows = {row ^ r for r, _ in _reach([*layout.reg_bases, *lanes])}
        assert rows == {4 * warp + n + 16 * far for n in range(4) for far in range(heads // 16)}


@HEADS
@pytest.mark.parametrize("width", [64, 128])
def test_stages_keep_every_number_and_meet_in_no_bank(heads: int, width: int) -> None:
    stage: Any = layouts.make_stage_layout(heads, width)
    places = _reach(stage.offset_bases)
    assert sorted(places) == list(itertools.product(range(heads), range(width)))
    offsets = {place: offset for offset, place in enumerate(places)}
    for head, start in itertools.product(range(0, heads, 8), range(0, width, 8)):
        # A warp writes one of two columns of a product: lanes are eight rows by four pairs.
        written = [
            offsets[head + 2 * pair + odd, start + row]
            for odd in range(2)
            for row in range(8)
            for pair in range(4)
        ]
        assert len({offset % 32 for offset in written[:32]}) == 32
        assert len({offset % 32 for offset in written[32:]}) == 32
    for head, start, half in itertools.product(range(heads), range(0, width, 64), range(2)):
        # Eight lanes read 16 bytes each, 8 numbers apart.
        read = [offsets[head, start + 8 * lane + 4 * half] for lane in range(8)]
        assert all(offsets[head, start + 8 * n + 4 * half + 3] == read[n] + 3 for n in range(8))
        assert len({offset // 4 % 8 for offset in read}) == 8


@HEADS
def test_a_chunk_waits_for_what_had_its_place(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is of a block before: no role waits for what comes behind its own work."""
    find_place = ring.find_place.fn
    monkeypatch.setattr(ring, "find_place", find_place)
    chunks = ring.count_chunks(heads)
    held: dict[int, tuple[int, int, int, int]] = {}
    for block, number in itertools.product(range(12), range(4)):
        place, before = find_place(block, number, heads)
        chunk = ring.find_chunk.fn(block, number, heads)
        assert 0 <= chunk < chunks and 0 <= place < ring.count_places(heads)
        # Of the same half, the last that had the barrier.
        last = held.get(chunk, (-1, number // 2, place, -1))
        assert last[0] < block and last[1:] == (number // 2, place, before - 1)
        held[chunk] = (block, number // 2, place, before)
    assert len(held) == chunks


@HEADS
def test_a_chunk_of_the_output_has_the_memory_of_a_chunk_of_the_ring(heads: int) -> None:
    """Of the ring's chunk with its number: 64 keys of 128 bfloat16, [heads, 128] of float32."""
    for number in range(4):
        assert ring.find_output_piece(number, heads) * heads * 128 * 4 == number * 64 * 128 * 2

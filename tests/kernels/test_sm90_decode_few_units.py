"""How the decoding roles of few heads share a record, and which copies each waits for."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton to import kernels")

from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_decode import (  # noqa: E402
    PARTS,
    count_stages,
    list_units,
    list_waits,
)

NUM_PARTS = int(getattr(PARTS, "value", PARTS))


@pytest.mark.parametrize(("record", "units"), [("v4", 5), ("v41", 4)])
def test_every_unit_is_of_one_role(record: str, units: int) -> None:
    shared = [unit for part in range(NUM_PARTS) for unit in list_units(record, part)]
    assert shared == list(range(units))


@pytest.mark.parametrize(
    ("record", "part", "waits"),
    [
        # Two stages: when a block is read, the one after it has been asked for.
        ("v41", 0, (1,)),
        ("v4", 1, (1,)),
        # One stage: nothing has.
        ("v41", 3, (0,)),
        ("v4", 2, (0,)),
        # Codes and then unscaled dimensions, one stage each: always the other of the two.
        ("v4", 3, (1, 1)),
    ],
)
def test_copies_that_may_be_on_their_way(record: str, part: int, waits: tuple[int, ...]) -> None:
    assert list_waits(record, part) == waits


@pytest.mark.parametrize("record", ["v4", "v41"])
def test_stages_fit_beside_the_ring(record: str) -> None:
    """227 KB: ring 128, query 16, parts of scores 16, weights 4; 1 KB for all that is small."""
    words = {3: 16} if record == "v4" else {}
    staged = sum(
        count_stages(record, unit) * 64 * 4 * (words.get(unit, 32) + (2 if unit < 4 else 0))
        for part in range(NUM_PARTS)
        for unit in list_units(record, part)
    )
    assert staged + (128 + 16 + 16 + 4 + 1) * 1024 <= 227 * 1024

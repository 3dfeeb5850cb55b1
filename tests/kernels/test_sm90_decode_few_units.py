"""How both decoding roles of few heads share a record, and which copies each waits for."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton to import kernels")

from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_decode import (  # noqa: E402
    find_group,
    list_units,
    list_waits,
)


@pytest.mark.parametrize(("record", "units"), [("v4", 5), ("v41", 4)])
def test_every_unit_is_of_one_role(record: str, units: int) -> None:
    assert [*list_units(record, 0), *list_units(record, 1)] == list(range(units))


@pytest.mark.parametrize(("record", "groups"), [("v4", [2, 2, 2, 1, 1]), ("v41", [2, 2, 2, 2])])
def test_every_group_of_64_dimensions_is_of_one_unit(record: str, groups: list[int]) -> None:
    """Of V4 half of the last codes, then what is unscaled; the query is ordered by groups."""
    units = [*list_units(record, 0), *list_units(record, 1)]
    found = [find_group(unit, number) for unit in units for number in range(groups[unit])]
    assert found == list(range(8))


@pytest.mark.parametrize("record", ["v4", "v41"])
@pytest.mark.parametrize("half", [0, 1])
def test_copies_that_may_be_on_their_way(record: str, half: int) -> None:
    """As the role asks for them: two blocks at first, then one unit as often as one is read.

    There is one stage of the unscaled dimensions of V4, so they are asked for a block later.
    """
    units = list_units(record, half)
    ahead = {unit: 1 if unit == 4 else 2 for unit in units}
    copies = [(block, unit) for block in range(2) for unit in units if block < ahead[unit]]
    behind: dict[int, list[int]] = {unit: [] for unit in units}
    for block in range(6):
        for unit in units:
            behind[unit].append(len(copies) - 1 - copies.index((block, unit)))
            copies.append((block + ahead[unit], unit))
    # No more may be missing than were asked for later, in whichever block those were fewest.
    assert list_waits(record, half) == tuple(min(behind[unit]) for unit in units)

"""How many programs share a tile in the Hopper prefill: by hand, for 132 at a time."""

from __future__ import annotations

import pytest

from mlacast.kernels.config.sparse_attention import PrefillWork, prefill_work


@pytest.mark.parametrize(
    ("tokens", "heads", "work"),
    [
        (1, 64, PrefillWork(1, True, 2)),
        (1, 8, PrefillWork(1, False, 2)),
        (1, 65, PrefillWork(2, False, 2)),
        # 132 programs are there; tiles are tokens times begun 64 heads.
        (66, 64, PrefillWork(1, True, 2)),
        (67, 64, PrefillWork(1, True, 1)),
        (33, 128, PrefillWork(2, True, 2)),
        (34, 128, PrefillWork(2, True, 1)),
        (33, 65, PrefillWork(2, False, 2)),
        (4096, 64, PrefillWork(1, True, 1)),
    ],
)
def test_two_programs_share_a_tile_where_all_run_at_a_time(
    tokens: int, heads: int, work: PrefillWork
) -> None:
    assert prefill_work(tokens, heads, 132) == work


def test_a_smaller_device_shares_fewer_tiles() -> None:
    assert [prefill_work(tokens, 64, 8).parts for tokens in (4, 5)] == [2, 1]

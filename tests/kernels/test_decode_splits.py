"""How many programs share the keys of a row in the Hopper decode: by hand, for 132 at a time."""

from __future__ import annotations

import pytest

from mlacast.kernels.config.sparse_attention import choose_decode_splits


@pytest.mark.parametrize(
    ("tiles", "blocks", "splits"),
    [
        (1, 10, 10),
        # 8 could run, but 5 are as short: two blocks each.
        (16, 10, 5),
        (64, 10, 2),
        (67, 10, 1),
        (128, 18, 1),
        (1000, 18, 1),
        (0, 10, 10),
        (1, 0, 1),
    ],
)
def test_splits_by_batch(tiles: int, blocks: int, splits: int) -> None:
    assert choose_decode_splits(tiles, blocks, 132, batch_invariant=False) == splits


def test_batch_invariant_splits_do_not_look_at_the_batch() -> None:
    splits = {choose_decode_splits(tiles, 18, 132, batch_invariant=True) for tiles in (1, 64, 999)}
    assert splits == {3}

"""How many programs share the keys of a row in the Hopper decode: by hand, for 132 at a time."""

from __future__ import annotations

import pytest
import torch

from mlacast.kernels.config import sparse_attention
from mlacast.kernels.config.sparse_attention import (
    FEW,
    MANY,
    MergePlan,
    choose_decode_splits,
    combine_config,
    merge_plan,
    plan_hopper_decode,
)


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


@pytest.mark.parametrize(
    ("s_q", "h_q", "width", "splits"),
    # Tiles of 64 heads, the last one begun; blocks of 64 columns, the last one begun.
    [(64, 64, 640, 2), (64, 65, 640, 1), (16, 8, 640, 5), (16, 8, 641, 6), (1, 128, 640, 10)],
)
def test_a_plan_counts_tiles_and_blocks(
    s_q: int, h_q: int, width: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_attention, "num_multiprocessors", lambda device: 132)
    assert plan_hopper_decode(s_q, h_q, width, torch.device("cuda"), False) == splits


def test_programs_of_the_merge_by_rows() -> None:
    assert merge_plan(16, 64) == MergePlan(FEW, full_tiles=True, grid=(16, 64))
    assert merge_plan(17, 64) == MergePlan(MANY, full_tiles=True, grid=(17, 8))
    assert merge_plan(100, 65) == MergePlan(MANY, full_tiles=False, grid=(100, 9))
    assert merge_plan(1000, 4).program == FEW, "fewer heads than a large program takes"


def test_programs_of_the_portable_merge_by_rows() -> None:
    assert combine_config(16, 64) == (1, 128, 1)
    assert combine_config(17, 64) == (4, 128, 1)

"""How many programs share the keys of a row in the Hopper decode: by hand, for 132 at a time."""

from __future__ import annotations

import pytest
import torch

from mlacast.kernels.config import sparse_attention
from mlacast.kernels.config.sparse_attention import choose_decode_splits, plan_hopper_decode


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
    pytest.importorskip("triton", reason="the launcher imports triton")
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_merge import FEW, MANY, choose_program

    assert choose_program(16, 64) == FEW
    assert choose_program(17, 64) == MANY
    assert choose_program(1000, 4) == FEW, "fewer heads than a large program takes"

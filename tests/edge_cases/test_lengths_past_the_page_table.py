"""A sequence length past the page table counts as the table's width, also for the causal mask."""

from __future__ import annotations

import torch

import mlacast


def test_longer_lengths_do_not_widen_the_causal_mask() -> None:
    """Two query tokens, three pages of two: with zero logits exp(lse) counts the keys seen."""
    cache = torch.zeros(3, 2, 512, dtype=torch.bfloat16)
    q = torch.zeros(1, 2, 1, 512, dtype=torch.bfloat16)
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    for seq_len in (6, 7, 1000, 2**31 - 1):
        lengths = torch.tensor([seq_len], dtype=torch.int32)
        _, lse = mlacast.dense_mla_decode(
            q, cache, table, lengths, kv_format=mlacast.KvFormat.BF16, sm_scale=1.0
        )
        assert lse.exp().round().flatten().tolist() == [5.0, 6.0]

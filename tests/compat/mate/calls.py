"""Calls of MATE's sparse decode, with every nuisance the contract allows, and what they must give.

The expected values come from the float64 loops of ``tests.oracles`` over rows that the test wrote.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlacast.compat import mate
from tests import oracles
from tests.scenarios import CacheCase, draw_indices, used_rows

BMM1, BMM2 = 0.0625, 1.5


@dataclass(frozen=True)
class Call:
    """A decode and its oracle.

    Attributes:
        query: [B, Q, H, 576].
        kv_cache: [pages, page_size, 576]; rows that nothing selects are NaN.
        block_tables: [B, Q, K].
        seq_lens: [B].
        oracle: Results of the B * Q tokens, bmm2_scale included, lse -inf for empty rows.
    """

    query: Tensor
    kv_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    oracle: oracles.AttentionOracle

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments by name, for a call by keywords."""
        return {
            "query": self.query,
            "kv_cache": self.kv_cache,
            "workspace_buffer": None,
            "qk_nope_head_dim": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "max_seq_len": 4096,
            "sparse_mla_top_k": self.block_tables.shape[2],
            "bmm1_scale": BMM1,
            "bmm2_scale": BMM2,
        }

    def assert_right(self, out: Tensor, lse: Tensor) -> None:
        """Compare a result [B, Q, H, 512], and an lse of either shape, with the oracle."""
        assert out.shape == (*self.query.shape[:3], 512)
        heads = self.query.shape[2]
        flat = lse.reshape(-1, heads)
        empty = self.oracle.lse == -math.inf
        assert bool((flat[empty] == math.inf).all()), "an empty row has lse +inf"
        assert bool((flat[~empty] < math.inf).all())
        core = torch.where(empty, -math.inf, flat)
        oracles.assert_matches(out.reshape(-1, heads, 512), core, self.oracle)


def draw_call(
    lens: tuple[int, ...],
    *,
    q_len: int = 1,
    heads: int = 3,
    page_size: int = 53,
    topk: int = 64,
    pages: int = 2,
) -> Call:
    """A random call for requests with these lengths; ids are nasty in every place."""
    batch = len(lens)
    rows = pages * page_size
    indices = draw_indices(batch * q_len, topk, rows)
    per_token = torch.tensor(lens, dtype=torch.int32).repeat_interleave(q_len)
    filled = CacheCase("FP8", 576).fill(
        num_pages=pages,
        page_size=page_size,
        slots=sorted(used_rows(indices, rows, per_token)),
    )
    query = torch.randn(batch, q_len, heads, 576).to(torch.float8_e4m3fn)
    selected = oracles.select_rows(filled.rows, indices, per_token)
    plain = oracles.attend(query.float().flatten(0, 1), selected, sm_scale=BMM1)
    return Call(
        query,
        filled.cache.squeeze(2).view(torch.float8_e4m3fn),
        indices.view(batch, q_len, topk),
        torch.tensor(lens, dtype=torch.int32),
        dataclasses.replace(plain, out=plain.out * BMM2, out_error=plain.out_error * BMM2),
    )


def run(call: Call, **changes: Any) -> Any:
    """Call the function."""
    return mate.sparse_mla_fp8_decode(**{**call.arguments, **changes})

"""Calls of FlashInfer's MLA decode over caches that the test wrote, and what they must give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlacast.compat import flashinfer
from tests import oracles
from tests.scenarios import CacheCase, draw_indices, used_rows

SCALE = 0.0625
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Call:
    """Arguments by name, and the oracle of its tokens in order (natural lse without sink)."""

    arguments: dict[str, Any]
    oracle: oracles.AttentionOracle

    def run(self, **changes: Any) -> Any:
        """Call the function."""
        return flashinfer.trtllm_batch_decode_with_kv_cache_mla(**{**self.arguments, **changes})

    def assert_right(
        self, out: Tensor, lse: Tensor | None = None, sink: Tensor | None = None, scale: float = 1.0
    ) -> None:
        """Compare ``out [.., H, 512]`` and a base-2 lse of either shape.

        Args:
            out: Result.
            lse: Base-2 lse, or None.
            sink: [H] sinks of the call: the oracle has none.
            scale: Expected factor on the output.
        """
        heads = self.oracle.lse.shape[1]
        expected, natural = self.oracle.out * scale, self.oracle.lse
        if sink is not None:
            share = 1 / (1 + torch.exp(sink.double() - natural))
            expected = expected * torch.where(natural == -math.inf, 0.0, share)[..., None]
            natural = torch.logaddexp(natural, sink.double().expand_as(natural))
        error = (out.reshape(expected.shape).double() - expected).abs()
        # The scale is one more product in float32, and a sink four roundings of its share.
        allowed = self.oracle.out_error[..., None] * abs(scale)
        allowed = allowed + 5 * oracles.FLOAT32_UNIT * expected.abs()
        allowed = allowed + oracles.BF16_HALF_ULP * (expected.abs() + allowed)
        assert bool((error <= allowed).all())
        empty = self.oracle.lse == -math.inf
        assert not out.reshape(expected.shape)[empty].any(), "an empty row is zero"
        if lse is None:
            return
        wanted = (natural * LOG2_E).reshape(-1, heads)
        actual = lse.reshape(-1, heads).double()
        finite = wanted.isfinite()
        assert torch.equal(actual[~finite], wanted[~finite]), "an empty row has lse -inf"
        allowed = self.oracle.logit_error[finite] * LOG2_E + 2.0**-20 * (1 + wanted[finite].abs())
        assert bool(((actual - wanted)[finite].abs() <= allowed).all())


def _cache(name: str, d_qk: int, pages: int, page_size: int, slots: Sequence[int]) -> Any:
    filled = CacheCase(name, d_qk).fill(num_pages=pages, page_size=page_size, slots=list(slots))
    cache = filled.cache.squeeze(2)
    return (cache.view(torch.float8_e4m3fn) if name == "FP8" else cache), filled.rows


def _query(name: str, *shape: int) -> Tensor:
    if name == "FP8":
        return torch.randn(shape).to(torch.float8_e4m3fn)
    return oracles.exact_queries(*shape)


def _common(name: str, d_qk: int) -> dict[str, Any]:
    return {
        "workspace_buffer": None,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": d_qk - 512,
        "max_seq_len": 1024,
        "bmm1_scale": SCALE,
    }


def sparse_call(
    name: str = "BF16",
    *,
    batch: int = 3,
    q_len: int = 2,
    heads: int = 3,
    d_qk: int = 576,
    topk: int = 20,
    page_size: int = 8,
    lengths: Tensor | None = None,
    seq_lens: Sequence[int] = (9, 1, 200),
) -> Call:
    """A sparse call. ``lengths`` [T] bounds the columns that count, None counts all.

    Requests whose ``seq_lens`` are 0 are empty, unless the cache is packed.
    """
    tokens, rows_in_cache = batch * q_len, 3 * page_size
    indices = draw_indices(tokens, topk, rows_in_cache)
    counted = lengths
    is_packed = name == "V32"
    if not is_packed and lengths is None:
        live = torch.tensor(seq_lens).repeat_interleave(q_len) > 0
        counted = torch.where(live, topk, 0)
    cache, rows = _cache(
        name, d_qk, 3, page_size, sorted(used_rows(indices, rows_in_cache, counted))
    )
    query = _query(name, batch, q_len, heads, d_qk)
    selected = oracles.select_rows(rows, indices, counted)
    arguments = {
        **_common(name, d_qk),
        "query": query,
        "kv_cache": cache,
        "block_tables": indices.view(batch, q_len, topk),
        "seq_lens": lengths if is_packed else torch.tensor(seq_lens, dtype=torch.int32),
        "sparse_mla_top_k": topk,
    }
    if d_qk == 512:
        arguments["sparse_mla_top_k_lens"] = lengths
    return Call(arguments, oracles.attend(query.float().flatten(0, 1), selected, sm_scale=SCALE))


def dense_call(
    name: str = "BF16",
    *,
    q_lens: Sequence[int] = (2, 2, 2),
    seq_lens: Sequence[int] = (9, 2, 1),
    heads: int = 3,
    page_size: int = 4,
    ragged: bool = False,
) -> Call:
    """A dense call over shuffled pages; every token sees up to its own position."""
    batch, width = len(q_lens), -(-max(seq_lens) // page_size) + 1
    pages = batch * width
    table = torch.randperm(pages).view(batch, width).int()
    seen, slots = [], set()
    for request, (q_len, length) in enumerate(zip(q_lens, seq_lens, strict=True)):
        for token in range(q_len):
            positions = range(max(length - (q_len - 1 - token), 0))
            line = [
                int(table[request, at // page_size]) * page_size + at % page_size
                for at in positions
            ]
            seen.append(line)
            slots.update(line)
    cache, rows = _cache(name, 576, pages, page_size, sorted(slots))
    query = _query(name, sum(q_lens), heads, 576)
    selected = [rows[torch.tensor(line, dtype=torch.int64)].double() for line in seen]
    arguments = {
        **_common(name, 576),
        "query": query if ragged else query.view(batch, q_lens[0], heads, 576),
        "kv_cache": cache,
        "block_tables": table,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
    }
    if ragged:
        arguments["cum_seq_lens_q"] = torch.tensor([0, *q_lens]).cumsum(0).int()
    return Call(arguments, oracles.attend(query.float(), selected, sm_scale=SCALE))

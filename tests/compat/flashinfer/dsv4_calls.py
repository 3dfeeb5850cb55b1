"""Calls of the DeepSeek-V4 decode over two pools that the test wrote, and what they must give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlacast.compat import flashinfer
from tests import oracles
from tests.scenarios import CacheCase, draw_indices, used_rows

SCALE = 0.0625
WINDOW = 128


@dataclass(frozen=True)
class Call:
    """Arguments by name, and the oracle of its T tokens."""

    arguments: dict[str, Any]
    selected: list[Tensor]

    def run(self, **changes: Any) -> Tensor:
        """Call the function."""
        return flashinfer.trtllm_batch_decode_sparse_mla_dsv4(**{**self.arguments, **changes})

    def oracle(self, sinks: Tensor | None = None) -> oracles.AttentionOracle:
        """The result in float64."""
        query = self.arguments["query"]
        flat = query.float().reshape(-1, *query.shape[-2:])
        return oracles.attend(flat, self.selected, sm_scale=SCALE, attn_sink=sinks)

    def assert_right(self, out: Tensor, sinks: Tensor | None = None, scale: float = 1.0) -> None:
        """Compare bfloat16 ``out [.., H, 512]``."""
        assert out.dtype == torch.bfloat16
        expected = self.oracle(sinks)
        wanted = expected.out * scale
        error = (out.reshape(wanted.shape).double() - wanted).abs()
        # The scale is one more product in float32, and a sink four roundings of its share.
        allowed = expected.out_error[..., None] * abs(scale)
        allowed = allowed + 5 * oracles.FLOAT32_UNIT * wanted.abs()
        allowed = allowed + oracles.BF16_HALF_ULP * (wanted.abs() + allowed)
        assert bool((error <= allowed).all())
        assert not out.reshape(wanted.shape)[expected.lse.isneginf()].any()


def _pool(name: str, pages: int, page_size: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A pool [pages, 1, page_size, n] (HND) and its rows."""
    filled = CacheCase(name, 512).fill(num_pages=pages, page_size=page_size, slots=list(slots))
    cache = filled.cache.view(torch.float8_e4m3fn) if name == "FP8" else filled.cache
    return cache.transpose(1, 2), filled.rows


def _query(name: str, batch: int, q_len: int, heads: int) -> Tensor:
    if name == "FP8":
        return torch.randn(batch, q_len, heads, 512).to(torch.float8_e4m3fn)
    return oracles.exact_queries(batch, q_len, heads, 512)


def joint_call(
    name: str = "FP8",
    *,
    batch: int = 2,
    q_len: int = 2,
    heads: int = 8,
    width: int = 160,
    lengths: Sequence[int] = (160, 128, 133, 150),
    page_size: int = 8,
) -> Call:
    """Pools of the query's dtype: 128 window columns, then compressed ones."""
    tokens = batch * q_len
    window = draw_indices(tokens, WINDOW, 2 * page_size)
    rest = draw_indices(tokens, width - WINDOW, 3 * page_size)
    counted = torch.tensor(lengths, dtype=torch.int32)
    swa, swa_rows = _pool(name, 2, page_size, sorted(used_rows(window, 2 * page_size)))
    used = sorted(used_rows(rest, 3 * page_size, counted - WINDOW)) if width > WINDOW else []
    compressed, compressed_rows = _pool(name, 3, page_size, used or [0])
    selected = oracles.join_selections(
        oracles.select_rows(swa_rows, window),
        oracles.select_rows(compressed_rows, rest, counted - WINDOW),
    )
    arguments = {
        "query": _query(name, batch, q_len, heads),
        "swa_kv_cache": swa,
        "workspace_buffer": None,
        "sparse_indices": torch.cat((window, rest), 1),
        "compressed_kv_cache": compressed,
        "sparse_topk_lens": counted,
        "seq_lens": torch.tensor([7, 5][:batch], dtype=torch.int32),
        "bmm1_scale": SCALE,
    }
    return Call(arguments, selected)


def separate_call(*, heads: int = 8, has_extra: bool = True) -> Call:
    """584-byte pools, a list for each."""
    window, rest = draw_indices(4, 20, 16), draw_indices(4, 30, 24)
    lengths = torch.tensor([20, 0, 7, 3], dtype=torch.int32)
    extra_lengths = torch.tensor([30, 0, 0, 12], dtype=torch.int32)
    swa, swa_rows = _pool("V4", 2, 8, sorted(used_rows(window, 16, lengths)))
    compressed, rows = _pool("V4", 3, 8, sorted(used_rows(rest, 24, extra_lengths)))
    selected = oracles.select_rows(swa_rows, window, lengths)
    arguments: dict[str, Any] = {
        "query": _query("V4", 2, 2, heads),
        "swa_kv_cache": swa,
        "workspace_buffer": None,
        "sparse_indices": window,
        "swa_topk_lens": lengths,
        "bmm1_scale": SCALE,
    }
    if has_extra:
        selected = oracles.join_selections(selected, oracles.select_rows(rows, rest, extra_lengths))
        arguments.update(
            compressed_kv_cache=compressed,
            extra_sparse_indices=rest,
            extra_sparse_topk_lens=extra_lengths,
        )
    return Call(arguments, selected)

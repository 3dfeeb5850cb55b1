"""A prefill and a decode call of the fused step on the device, with inputs that can be replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.format_cases import storage_bytes
from tests.scenarios import CacheCase, draw_indices

CUDA = "cuda"
SM_SCALE = 0.05
# Backend of the calls; the fixture ``each_backend`` sets it.
BACKEND: str | None = "triton"


@dataclass
class Step:
    """Inputs of one call on the device; ``pool`` is kv or the cache, ``options`` the rest."""

    q: Tensor
    pool: Tensor
    indices: Tensor
    lengths: Tensor
    options: dict[str, Any]

    def copy_(self, other: Step) -> None:
        """Take over query, indices and lengths in place."""
        self.q.copy_(other.q)
        self.indices.copy_(other.indices)
        self.lengths.copy_(other.lengths)

    def rows(self, first: int, last: int) -> Step:
        """The same call for some of its rows."""
        options = dict(self.options)
        rope = options["rope"]
        options["rope"] = mlacast.Rope(rope.cos_sin_cache, rope.positions[first:last], rope.pairing)
        return Step(
            self.q[first:last],
            self.pool,
            self.indices[first:last],
            self.lengths[first:last],
            options,
        )

    def run(self, **more: Any) -> tuple[Any, ...]:
        """Call the public function; a step with a cache format decodes."""
        function: Any = mlacast.sparse_mla_prefill
        if "kv_format" in self.options:
            function = mlacast.sparse_mla_decode
        return tuple(
            function(
                self.q,
                self.pool,
                self.indices,
                topk_length=self.lengths,
                sm_scale=SM_SCALE,
                backend=BACKEND,
                **self.options,
                **more,
            )
        )


def _options(tokens: int, heads: int) -> dict[str, Any]:
    table = oracles.exact_rope_table(64).to(CUDA)
    positions = torch.arange(tokens, device=CUDA) % 64
    return {
        "attn_sink": torch.linspace(-1, 1, heads, device=CUDA),
        "q_norm_eps": 1e-6,
        "rope": mlacast.Rope(table, positions),
        "q_order": "chunk16",
    }


def _inputs(tokens: int, heads: int, topk: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(tokens, heads, 512, dtype=torch.bfloat16, device=CUDA)
    lengths = torch.randint(0, topk + 1, (tokens,), dtype=torch.int32, device=CUDA)
    return q, draw_indices(tokens, topk, rows).to(CUDA), lengths


def prefill_step(tokens: int, *, heads: int = 8, topk: int = 150) -> Step:
    """A prefill call with every option of the fused step."""
    q, indices, lengths = _inputs(tokens, heads, topk, 300)
    kv = torch.randn(300, 512, dtype=torch.bfloat16, device=CUDA)
    return Step(q, kv, indices, lengths, _options(tokens, heads))


def decode_step(tokens: int, *, heads: int = 8, topk: int = 150) -> Step:
    """A decode call with every option of the fused step over a 584-byte cache."""
    q, indices, lengths = _inputs(tokens, heads, topk, 128)
    filled = CacheCase("V4", 512).fill(num_pages=2, page_size=64, slots=range(128))
    options = {**_options(tokens, heads), "kv_format": mlacast.KvFormat.V4}
    return Step(q, copy_storage(filled.cache), indices, lengths, options)


def copy_storage(tensor: Tensor) -> Tensor:
    """Copy a view to the device with all that lies between its elements."""
    flat = storage_bytes(tensor).to(CUDA).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def same_bits(first: Any, second: Any) -> bool:
    """Equality of tensors, or of data and scales of buffers, bit for bit."""
    if isinstance(first, mlacast.QuantizedTensor):
        assert isinstance(second, mlacast.QuantizedTensor)
        data = torch.equal(first.data.view(torch.uint8), second.data.view(torch.uint8))
        if first.sf is None or second.sf is None:
            return data and first.sf is second.sf
        scales = [part.contiguous().reshape(-1).view(torch.uint8) for part in (first.sf, second.sf)]
        return data and torch.equal(*scales)
    return oracles.same_bits(first, second)


def all_same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """``same_bits`` of every result of two calls."""
    return all(same_bits(left, right) for left, right in zip(first, second, strict=True))

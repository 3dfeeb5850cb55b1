"""torch.compile of rope_quantize_fp8, plain and into the pages of a cache: the eager bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.compat.flashinfer import rope_quantize_fp8_append_paged_kv_cache
from tests.rope_quantize_cases import E4M3

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_any_number_of_tokens(backend: str) -> None:
    table = torch.randn(9, 64)

    def call(q: Tensor, k: Tensor, positions: Tensor) -> list[Tensor]:
        parts = (q[..., 512:], k[..., 512:], q[..., :512], k[..., :512])
        return list(mlacast.rope_quantize_fp8(*parts, table, positions, q_scale=2.0))

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (4, 0, 7):
        q, k = torch.randn(tokens, 2, 576).to(BF16), torch.randn(tokens, 576).to(BF16)
        positions = torch.arange(tokens)
        assert _equal(compiled(q, k, positions), call(q, k, positions))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("with_heads", [False, True])
def test_pages(with_heads: bool, backend: str) -> None:
    """With heads both parts of a key are views of one cache: two mutated arguments, one storage."""
    head = (1,) if with_heads else ()
    k_rope, k_nope = (torch.randn(3, *head, 64).to(BF16) for _ in range(2))
    q = torch.randn(3, 2, 64).to(BF16)
    v = torch.randn(3, 1, 8).to(BF16) if with_heads else None
    widths = (128, 8) if with_heads else (64, 64)
    options: dict[str, Any] = {
        "kv_indices": torch.tensor([1, 0], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 2], dtype=torch.int32),
        "batch_indices": torch.tensor([0, 0, -1], dtype=torch.int32),
        "positions": torch.tensor([15, 16, 17], dtype=torch.int32),
    }
    table, positions = torch.randn(9, 64), torch.arange(3)

    def call(first: Tensor, second: Tensor) -> Tensor:
        rope_quantize_fp8_append_paged_kv_cache(
            q, k_rope, q, k_nope, v, table, positions, (first, second), **options
        )
        return first.view(torch.uint8).clone()

    caches = []
    for function in (call, torch.compile(call, fullgraph=True, backend=backend)):
        pair = [torch.zeros(2, 16, *head, width, dtype=torch.uint8).view(E4M3) for width in widths]
        function(*pair)
        caches.append(pair)
    assert _equal(caches[0], caches[1])
    assert bool(caches[0][0].view(torch.uint8).any())

"""Kernels that start before the one in front of them has ended read and write nothing too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import projections
from tests.gpu.steps import CUDA

FORMAT = mlacast.KvFormat.V41
ROWS, TOKENS, HEADS, TOPK, ROUNDS = 4096, 24, 64, 512, 12


# What the buffer holds, and the weights that its consumer multiplies it by.
PROJECTIONS: dict[str, tuple[mlacast.OutFormat, str]] = {
    "bf16-weights": (mlacast.Fp8Group(128, "float32", "mn_major"), "bfloat16"),
    "few-tokens": (mlacast.Mxfp8(), "words_32"),
}


class Chain:
    """A step in which every kernel reads what the one before it wrote, over the same memory."""

    def __init__(self, projection: str) -> None:
        torch.manual_seed(3)
        self.latents = torch.randn(ROUNDS, ROWS, 512, device=CUDA).bfloat16()
        self.queries = torch.randn(ROUNDS, TOKENS, HEADS, 512, device=CUDA).bfloat16()
        self.cache = FORMAT.allocate(ROWS // 64, 64, d_qk=512, device=CUDA)
        self.slots = torch.arange(ROWS, device=CUDA)
        # The last rows too, which the last programs of the kernel before have written.
        indices = torch.randint(0, ROWS, (2 * TOKENS, TOPK), dtype=torch.int32, device=CUDA)
        indices[:, :8] = torch.arange(ROWS - 8, ROWS, device=CUDA)
        self.indices = indices
        self.latent = torch.empty(ROWS, 512, dtype=torch.bfloat16, device=CUDA)
        self.q = torch.empty(TOKENS, HEADS, 512, dtype=torch.bfloat16, device=CUDA)
        out_format, weights = PROJECTIONS[projection]
        self.out = mlacast.QuantizedTensor.empty(2 * TOKENS, 8, HEADS * 64, out_format, CUDA)
        self.weights = projections.draw_weights(weights, (8, 128, HEADS * 64), CUDA)

    def project(self) -> Tensor:
        """What consumes the buffer."""
        return mlacast.grouped_out_project(
            self.out, self.weights.weight, weight_sf=self.weights.weight_sf
        )

    def run(self, number: int, between: Callable[[], None]) -> Tensor:
        """One round; ``between`` is called after every kernel."""
        half: dict[str, Any] = {"sm_scale": 0.05, "num_groups": 8}
        self.latent.copy_(self.latents[number])
        between()
        self.q.copy_(self.queries[number])
        between()
        mlacast.kv_cache_append(self.latent, self.slots, self.cache, FORMAT)
        between()
        kv = mlacast.kv_cache_gather(self.cache, self.slots, FORMAT)
        between()
        mlacast.sparse_mla_prefill(
            self.q, kv[:, None], self.indices[:TOKENS, None], out=self.out[:TOKENS], **half
        )
        between()
        mlacast.sparse_mla_decode(
            self.q,
            self.cache,
            self.indices[TOKENS:],
            kv_format=FORMAT,
            out=self.out[TOKENS:],
            **half,
        )
        between()
        return self.project()


@pytest.fixture(scope="module", params=PROJECTIONS)
def chain(request: pytest.FixtureRequest) -> Chain:
    return Chain(request.param)


@pytest.fixture(scope="module")
def expected(chain: Chain) -> list[Tensor]:
    """Results with the device idle between kernels."""
    return [chain.run(number, torch.cuda.synchronize).clone() for number in range(ROUNDS)]


def test_rounds_differ(expected: list[Tensor]) -> None:
    for first, second in zip(expected, expected[1:], strict=False):
        assert not torch.equal(first, second)


def test_calls_in_a_row_see_what_was_written(chain: Chain, expected: list[Tensor]) -> None:
    for _ in range(4):
        found = [chain.run(number, lambda: None) for number in range(ROUNDS)]
        torch.cuda.synchronize()
        for result, wanted in zip(found, expected, strict=True):
            assert torch.equal(result, wanted)


def test_one_graph_of_all_rounds(chain: Chain, expected: list[Tensor]) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [chain.run(number, lambda: None) for number in range(ROUNDS)]
    for _ in range(4):
        graph.replay()
    torch.cuda.synchronize()
    for result, wanted in zip(found, expected, strict=True):
        assert torch.equal(result, wanted)


def test_a_graph_whose_kernel_has_two_predecessors(chain: Chain, expected: list[Tensor]) -> None:
    """The query comes from another stream, and a fill, no kernel of ours, stands in front."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)  # type: ignore[no-untyped-call]
            chain.q.copy_(chain.queries[1])
        chain.latent.copy_(chain.latents[1])
        mlacast.kv_cache_append(chain.latent, chain.slots, chain.cache, FORMAT)
        kv = mlacast.kv_cache_gather(chain.cache, chain.slots, FORMAT)
        chain.out.data.view(torch.uint8).zero_()
        main.wait_stream(side)
        options: dict[str, Any] = {"sm_scale": 0.05, "num_groups": 8}
        indices = chain.indices
        mlacast.sparse_mla_prefill(
            chain.q, kv[:, None], indices[:TOKENS, None], out=chain.out[:TOKENS], **options
        )
        mlacast.sparse_mla_decode(
            chain.q,
            chain.cache,
            indices[TOKENS:],
            kv_format=FORMAT,
            out=chain.out[TOKENS:],
            **options,
        )
        found = chain.project()
    for _ in range(3):
        chain.q.zero_()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected[1])


def test_dense_prefill_behind_copies() -> None:
    """What sets its counter of tiles starts early too, and so does the kernel that counts."""
    torch.manual_seed(4)
    heads, tokens = 4, 640
    drawn = torch.randn(ROUNDS, 3, tokens, heads, 192, device=CUDA).bfloat16()
    q, k, v = torch.empty_like(drawn[0]).unbind()
    starts = torch.tensor([0, 100, 100, tokens], dtype=torch.int32, device=CUDA)

    def run(number: int, between: Callable[[], None]) -> Tensor:
        for target, source in zip((q, k, v), drawn[number], strict=True):
            target.copy_(source)
        between()
        out, _ = mlacast.dense_mla_prefill(
            q,
            k,
            v[..., :128],
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=tokens,
            max_seqlen_k=tokens,
            out_format=mlacast.Mxfp8(),
        )
        between()
        assert isinstance(out, mlacast.QuantizedTensor)
        return out.data.view(torch.uint8)

    expected = [run(number, torch.cuda.synchronize).clone() for number in range(ROUNDS)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [run(number, lambda: None) for number in range(ROUNDS)]
    for _ in range(4):
        graph.replay()
    found += [run(number, lambda: None) for number in range(ROUNDS)]
    torch.cuda.synchronize()
    for result, wanted in zip(found, [*expected, *expected], strict=True):
        assert torch.equal(result, wanted)

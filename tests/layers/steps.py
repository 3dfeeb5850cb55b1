"""Steps of an MLA layer: their inputs, and what they give in float64 without absorption."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import mlacast
from mlacast.layers import MLAAttention, MLAMetadata

HEADS = 2
PAGE = 4
SCALE = 192**-0.5
K_SCALE = 0.05


@dataclass(frozen=True)
class Step:
    """One step: new and cached tokens of each request, and how the layer is set up.

    Attributes:
        query_lens: New tokens of each request.
        context_lens: Cached tokens of each request.
        threshold: Most new tokens of a request that decodes.
        padding: Rows behind the tokens.
        workspace: Cached tokens up-projected at a time.
        kv_format: Name of the cache format.
    """

    id: str
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    threshold: int = 1
    padding: int = 0
    workspace: int = 65536
    kv_format: str = "BF16"


@dataclass(frozen=True)
class Inputs:
    """Tensors of a step; ``rows`` holds the latents [n, 576] that each request attends to."""

    layer: MLAAttention
    metadata: MLAMetadata
    q: Tensor
    kv_c: Tensor
    k_pe: Tensor
    kv_cache: Tensor
    rows: list[Tensor]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, MLAMetadata]:
        return self.q, self.kv_c, self.k_pe, self.kv_cache, self.metadata


def slots_of(block_table: Tensor, request: int, positions: Tensor) -> Tensor:
    pages = block_table[request].long()[positions // PAGE]
    return pages * PAGE + positions % PAGE


def picking_weight(heads: int) -> Tensor:
    """A kv_b_proj that picks entries of the latent, some times -2, so that no sum is rounded."""
    weight = torch.zeros(heads, 2, 128, 512)
    for head in range(heads):
        for part in range(2):
            weight[head, part, torch.arange(128), torch.randperm(512)[:128]] = torch.tensor(
                [1.0, -2.0]
            ).repeat(64)
    return weight.view(heads * 256, 512).bfloat16()


def draw(step: Step, heads: int = HEADS, weight: Tensor | None = None) -> Inputs:
    """Draw a step. What no request may read is NaN: other slots, rows of padding."""
    kv_format = mlacast.KvFormat.from_name(step.kv_format)
    is_fp8 = step.kv_format == "FP8"
    if weight is None:
        weight = (torch.randn(heads * 256, 512) / 512**0.5).bfloat16()
    total = sum(step.query_lens)
    requests = len(step.query_lens)
    most = max((n + c for n, c in zip(step.query_lens, step.context_lens, strict=True)), default=0)
    pages = math.ceil(most / PAGE) + 1
    block_table = torch.randperm(requests * pages + 1)[: requests * pages].view(requests, pages)
    block_table = block_table.to(torch.int32)
    cache = kv_format.allocate(requests * pages + 1, PAGE, d_qk=None if kv_format.d_qk else 576)
    cache.view(torch.uint8).fill_(0xFF)
    q = torch.full((total + step.padding, heads, 192), float("nan"))
    q[:total] = 2 * torch.randn(total, heads, 192)
    new = torch.full((total + step.padding, 576), float("nan"))
    new[:total] = torch.randn(total, 576)
    q, new = q.bfloat16(), new.bfloat16()
    rows, first = [], 0
    for request, (fresh, cached) in enumerate(zip(step.query_lens, step.context_lens, strict=True)):
        latent = torch.cat((torch.randn(cached, 576).bfloat16(), new[first : first + fresh]))
        slots = slots_of(block_table, request, torch.arange(fresh + cached))
        stored = latent.float() / K_SCALE if is_fp8 else latent
        kv_format.append(stored, slots, cache)
        rows.append(latent.double())
        first += fresh
    layer = MLAAttention(
        heads,
        scale=SCALE,
        kv_b_proj=weight,
        kv_format=kv_format,
        k_scale=K_SCALE if is_fp8 else 1.0,
        context_workspace_tokens=step.workspace,
    )
    metadata = MLAMetadata.build(
        step.query_lens, step.context_lens, block_table, PAGE, step.threshold
    )
    return Inputs(layer, metadata, q, new[:, :512], new[:, None, 512:], cache, rows)


def expected(inputs: Inputs, selected: list[list[int]] | None = None) -> tuple[Tensor, Tensor]:
    """Output [T, N, 128] and lse [T, N] in float64; padding gives 0 and -inf.

    A token attends to the tokens of its request up to itself, or to the positions of ``selected``.
    Decodes read every key from the cache, prefills those of their context.
    """
    metadata, layer = inputs.metadata, inputs.layer
    heads = layer.num_heads
    out = torch.zeros(inputs.q.shape[0], heads, 128, dtype=torch.float64)
    lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float64)
    weight = layer.kv_b_proj.double().view(heads, 256, 512)
    token = 0
    for request, fresh in enumerate(metadata.query_lens):
        cached = metadata.context_lens[request]
        rows = inputs.rows[request]
        slots = slots_of(metadata.block_table, request, torch.arange(fresh + cached))
        stored = layer.kv_format.gather(inputs.kv_cache, slots).double()
        stored = stored * K_SCALE if layer.kv_format == mlacast.KvFormat.FP8 else stored
        absorbed = request < metadata.num_decodes or selected is not None
        read = stored if absorbed else torch.cat((stored[:cached], rows[cached:]))
        for own in range(fresh):
            seen = list(range(cached + own + 1)) if selected is None else selected[token]
            for head in range(heads):
                keys = read[seen, :512] @ weight[head, :128].T
                values = read[seen, :512] @ weight[head, 128:].T
                query = inputs.q[token, head].double()
                logits = SCALE * (keys @ query[:128] + read[seen, 512:] @ query[128:])
                if seen:
                    lse[token, head] = torch.logsumexp(logits, 0)
                    out[token, head] = torch.softmax(logits, 0) @ values
            token += 1
    return out, lse


# Relative error of a row in the 2-norm. Keys, values, absorbed queries, latent outputs, parts of a
# merge and outputs are rounded to bfloat16 once each (2**-9), and a logit of size 5 that is off by
# 2**-9 of itself moves its weight by 1 %. One key too many or too few moves a row by more than that
# at these lengths.
ROW_ERROR = 2**-6
# A logit has 512 products of a rounded bfloat16 (absorbed query, or 128 of an up-projected key with
# a query twice as long) with numbers of size one. Roundings are 2**-9.2 of a number in the mean
# square, so the logit is off by SCALE * sqrt(512) * 2**-9.2 = 0.0028 in the mean square, and the
# logarithm of a sum by no more than the worst of its logits. The bound is 5.6 times that.
LSE_ERROR = 2**-6


def assert_close(out: Tensor, lse: Tensor, inputs: Inputs) -> None:
    wanted, wanted_lse = expected(inputs)
    assert_rows(out, wanted)
    live = wanted_lse.isfinite()
    assert torch.equal(lse.isfinite(), live)
    assert bool((lse[~live] == -math.inf).all())
    assert float((lse[live] - wanted_lse[live]).abs().max() if live.any() else 0) <= LSE_ERROR


def assert_rows(out: Tensor, wanted: Tensor) -> None:
    error = (out.double().view(wanted.shape) - wanted).norm(dim=-1)
    assert bool((error <= ROW_ERROR * wanted.norm(dim=-1)).all()), error / wanted.norm(dim=-1)

"""Small DeepSeek-V4 models and the measures by which a fused one is compared with the original."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

from mlacast.cli.demo_model import PAD, build_model, passage_tokens

LAYER_TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
)


@cache
def _built(continuous: bool) -> Any:
    overrides: dict[str, Any] = {"layer_types": list(LAYER_TYPES)}
    if continuous:
        overrides["mlp_layer_types"] = ["hash_moe"] * len(LAYER_TYPES)
        overrides["index_topk"] = 512
    return build_model(seed=11, **overrides)


def original(*, continuous: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """A fresh copy of the model with transformers' own attention.

    ``continuous`` removes the model's two discontinuous choices, expert routing and the indexer's
    top-k, which turn a rounding difference into another expert or another set of keys: routing is
    by token id alone and the indexer keeps every entry. Without them tolerances mean something.
    """
    return copy.deepcopy(_built(continuous)).to(dtype)


def tokens(count: int, batch: int = 1) -> Tensor:
    """[batch, count] ids, every row another part of the passage."""
    stream = passage_tokens(count * batch)
    return stream.view(batch, count)


def left_padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [len(lengths), max(lengths)], padded on the left."""
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros((len(lengths), width), dtype=torch.long)
    stream = passage_tokens(sum(lengths))[0]
    start = 0
    for row, length in enumerate(lengths):
        ids[row, width - length :] = stream[start : start + length]
        mask[row, width - length :] = 1
        start += length
    return ids, mask


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two tensors as vectors."""
    return float(
        torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), 0)
    )


def relative_error(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of ``b``."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def logits(model: Any, **inputs: Any) -> Tensor:
    """Logits of one forward pass, without a graph."""
    with torch.no_grad():
        output: Tensor = model(**inputs).logits
    return output


def stepwise_logits(model: Any, chunks: list[int], stream: Tensor, mask: Tensor | None) -> Tensor:
    """Feed the stream in chunks through one cache and return the logits of every token."""
    past, parts, start = None, [], 0
    for size in chunks:
        stop = start + size
        inputs: dict[str, Any] = {"input_ids": stream[:, start:stop], "use_cache": True}
        if past is not None:
            inputs["cache"] = past
        if mask is not None:
            inputs["attention_mask"] = mask[:, :stop]
        with torch.no_grad():
            output = model(**inputs)
        past, start = output.cache, stop
        parts.append(output.logits)
    return torch.cat(parts, dim=1)

"""What a call's strides and numbers ask of a backend, beyond formats and options."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlacast.errors import FLOAT32_LEAST
from mlacast.ops.output import D_V


def layout_features(
    rows: Sequence[torch.Tensor],
    group_features: int,
    sm_scale: float | torch.Tensor,
    caches: Sequence[torch.Tensor | None] = (),
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> frozenset[str]:
    """Features that a backend needs for layout and score scale.

    Args:
        rows: Tensors whose rows, all dimensions but the last, should start at multiples of 16
            elements, and the heads of a token within 2**31 of each other. Strides of dimensions of
            size 1 mean nothing and ask for nothing.
        group_features: Features of an output group; whole heads are multiples of 512.
        sm_scale: Score scale; one that is not above zero, or may be zero as a number of float32,
            does not keep the order of the logits.
        caches: Paged caches whose pages should start at multiples of 16 bytes, with nothing between
            the tokens, and have fewer than 2**31 words of 4 bytes.
        codes: Output; if its elements are bytes, rows should start at multiples of 4.
        scales: Its scales [T, g, words], if they have strides; those of a token's group should be
            within 2**31 of each other, bytes if four are a word. One behind the other for all
            tokens, a million tokens of 128 heads in one group are too many.
    """
    features = set()
    for tensor in rows:
        steps = [tensor.stride(dim) for dim in range(tensor.dim() - 1) if tensor.shape[dim] > 1]
        if tensor.data_ptr() % 16 or any(step % 16 for step in steps):
            features.add("rows:unaligned")
        heads = tensor.shape[1] if tensor.dim() == 3 else 1
        if heads > 1 and heads * tensor.stride(1) >= 2**31:
            features.add("heads:far_apart")
    for cache in caches:
        if cache is None:
            continue
        apart = cache.shape[1] > 1 and cache.stride(1) != cache.shape[-1]
        step = cache.stride(0) * cache.element_size() if cache.shape[0] > 1 else 0
        # An empty cache has no address; kernels view it as words of 4 bytes all the same.
        first = cache.storage_offset() * cache.element_size()
        if apart or cache.data_ptr() % 16 or step % 16 or first % 4:
            features.add("rows:unaligned")
        if cache.shape[1] * cache.shape[-1] * cache.element_size() >= 2**33:
            features.add("pages:large")
    if codes is not None and codes.element_size() == 1:
        apart = any(codes.stride(dim) % 4 for dim in (0, 1) if codes.shape[dim] > 1)
        if codes.data_ptr() % 4 or apart:
            features.add("rows:unaligned")
    if scales is not None and scales.dim() == 3:
        per_word = 4 if scales.dtype == torch.int32 else 1
        if scales.shape[2] * scales.stride(2) * per_word >= 2**31:
            features.add("scales:far_apart")
    if group_features % D_V:
        features.add("groups:partial_heads")
    if not isinstance(sm_scale, torch.Tensor) and sm_scale < FLOAT32_LEAST:
        features.add("sm_scale:not_positive")
    return frozenset(features)


def plain_rows(tensor: torch.Tensor) -> torch.Tensor:
    """View the same elements with no stride that means nothing and would break an alignment.

    Kernels learn from strides how their addresses are aligned, those of dimensions of size 1 too.
    A tensor without such strides is returned itself: known calls recognise it.
    """
    return _without_idle_strides(tensor, [16] * (tensor.dim() - 1))


def plain_pages(cache: torch.Tensor) -> torch.Tensor:
    """`plain_rows` of a paged cache, of which pages start at 16 bytes and words are 4 bytes long.

    Records have other sizes than rows: what lies between two of them is no sign of anything.
    """
    page, word = (max(unit // cache.element_size(), 1) for unit in (16, 4))
    return _without_idle_strides(cache, [page] + [word] * (cache.dim() - 2))


def _without_idle_strides(tensor: torch.Tensor, units: Sequence[int]) -> torch.Tensor:
    strides = [
        0 if size == 1 and step % unit else step
        for size, step, unit in zip(tensor.shape[:-1], tensor.stride()[:-1], units, strict=True)
    ]
    if strides == list(tensor.stride()[:-1]):
        return tensor
    return tensor.as_strided(tensor.shape, (*strides, tensor.stride(-1)))


def pool_features(kv_format: str, extra_kv_format: str | None) -> frozenset[str]:
    """Features that a backend needs for the formats of one or two pools."""
    features = {f"kv:{kv_format}"}
    if extra_kv_format is not None:
        features.add(f"extra_kv:{extra_kv_format}")
        if extra_kv_format != kv_format:
            features.add(f"pools:{kv_format}+{extra_kv_format}")
    return frozenset(features)

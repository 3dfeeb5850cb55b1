"""Run one step of dense or selected MLA through the core ops, into a caller's quantised buffer.

Prompts with ranges of keys attend to up-projected keys and values of each head. Single tokens and
selected keys attend in absorbed form to the latents, and the product with W_UV is what quantises.
"""

from __future__ import annotations

from typing import Any

import torch

import mlacast
from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.integrations.transformers.key_ranges import KeyRanges
from mlacast.integrations.transformers.mla_inputs import MlaInputs
from mlacast.integrations.transformers.mla_weights import LATENT, NOPE, up_weights
from mlacast.integrations.transformers.selection import to_rows

# Tokens of a page of the caches that are made for one decode step.
PAGE = 64


def attend(
    step: MlaInputs, kv_b_proj: Any, out: QuantizedTensor, *, backend: str | None = None
) -> None:
    """Write the attention output of every query token of the step.

    Args:
        step: What ``mla_inputs`` collected.
        kv_b_proj: The model's up-projection of latents.
        out: Buffer or token range with ``batch * s_q`` tokens of N * 128 features. Queries that
            attend nothing (padding) become zeros.
        backend: None, "reference", "triton" or "hopper".
    """
    if step.s_q > 1 and isinstance(step.keys, KeyRanges):
        _dense_prefill(step, step.keys, kv_b_proj, out, backend)
        return
    w_uk, w_uv = up_weights(kv_b_proj, step.latent)
    q = _absorbed(step.q.flatten(0, 1), w_uk)
    if isinstance(step.keys, KeyRanges):
        latent = _dense_decode(step, step.keys, q, backend)
    elif step.s_q > 1:
        latent = _sparse_prefill(step, step.keys, q, backend)
    else:
        latent = _sparse_decode(step, step.keys, q, backend)
    mlacast.v_up_project(latent, w_uv.to(torch.bfloat16), out=out, backend=backend)


def _dense_prefill(
    step: MlaInputs, keys: KeyRanges, kv_b_proj: Any, out: QuantizedTensor, backend: str | None
) -> None:
    latent, k_pe = step.latent.flatten(0, 1), step.k_pe.flatten(0, 1)
    if keys.packed_rows is not None:
        latent, k_pe = latent[keys.packed_rows], k_pe[keys.packed_rows]
    heads = step.q.shape[2]
    up = kv_b_proj(latent).view(latent.shape[0], heads, -1).to(torch.bfloat16)
    rotary = k_pe.to(torch.bfloat16).unsqueeze(1).expand(-1, heads, -1)
    mlacast.dense_mla_prefill(
        step.q.flatten(0, 1).to(torch.bfloat16),
        torch.cat((up[..., :NOPE], rotary), dim=-1),
        up[..., NOPE:],
        cu_seqlens_q=keys.cu_seqlens_q,
        cu_seqlens_k=keys.cu_seqlens_k,
        max_seqlen_q=step.s_q,
        max_seqlen_k=max(keys.lengths, default=0),
        softmax_scale=step.sm_scale,
        out=out,
        backend=backend,
    )


def _dense_decode(
    step: MlaInputs, keys: KeyRanges, q: torch.Tensor, backend: str | None
) -> torch.Tensor:
    rows = keys.aligned_rows
    latent, k_pe = step.latent, step.k_pe
    if rows is not None:
        latent, k_pe = latent.flatten(0, 1)[rows], k_pe.flatten(0, 1)[rows]
    cache, pages = _paged(latent, k_pe)
    numbers = torch.arange(cache.shape[0], dtype=torch.int32, device=cache.device)
    attended, _ = mlacast.dense_mla_decode(
        q.unsqueeze(1),
        cache,
        numbers.view(-1, pages),
        keys.seq_lens,
        kv_format=KvFormat.BF16,
        sm_scale=step.sm_scale,
        backend=backend,
    )
    assert isinstance(attended, torch.Tensor), "an output without a format is a tensor"
    return attended.flatten(0, 1)


def _sparse_prefill(
    step: MlaInputs, columns: torch.Tensor, q: torch.Tensor, backend: str | None
) -> torch.Tensor:
    kv = torch.cat((step.latent, step.k_pe), dim=-1).to(torch.bfloat16)
    attended, _, _ = mlacast.sparse_mla_prefill(
        q,
        kv.flatten(0, 1),
        to_rows(columns, kv.shape[1]),
        sm_scale=step.sm_scale,
        backend=backend,
    )
    assert isinstance(attended, torch.Tensor), "an output without a format is a tensor"
    return attended


def _sparse_decode(
    step: MlaInputs, columns: torch.Tensor, q: torch.Tensor, backend: str | None
) -> torch.Tensor:
    latent, k_pe, width = step.latent, step.k_pe, columns.shape[-1]
    if width < latent.shape[1]:
        # Join only the selected rows: the cache may be far longer.
        chosen = columns[:, 0].clamp_min(0).to(torch.int64).unsqueeze(-1)
        latent, k_pe = (rows.take_along_dim(chosen, dim=1) for rows in (latent, k_pe))
        places = torch.arange(width, dtype=torch.int32, device=columns.device)
        columns = torch.where(columns >= 0, places, -1)
    cache, pages = _paged(latent, k_pe)
    attended, _ = mlacast.sparse_mla_decode(
        q,
        cache,
        to_rows(columns, pages * PAGE),
        kv_format=KvFormat.BF16,
        sm_scale=step.sm_scale,
        backend=backend,
    )
    assert isinstance(attended, torch.Tensor), "an output without a format is a tensor"
    return attended


def _absorbed(q: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """Return queries [T, N, 576] bfloat16 that can be compared with latents."""
    nope = torch.bmm(q[..., :NOPE].transpose(0, 1), w_uk.to(q.dtype)).transpose(0, 1)
    return torch.cat((nope, q[..., NOPE:]), dim=-1).to(torch.bfloat16)


def _paged(latent: torch.Tensor, k_pe: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Join latents and rotary keys, which the model's cache keeps apart, to rows of a cache.

    Args:
        latent: [batch, n, 512].
        k_pe: [batch, n, 64].

    Returns:
        ([batch * pages, PAGE, 576] bfloat16, pages of a request). Rows behind n are not written.
    """
    batch, length = latent.shape[:2]
    pages = max(-(-length // PAGE), 1)
    rows = latent.new_empty(batch, pages * PAGE, LATENT + k_pe.shape[-1], dtype=torch.bfloat16)
    rows[:, :length, :LATENT] = latent
    rows[:, :length, LATENT:] = k_pe
    return rows.view(batch * pages, PAGE, -1), pages

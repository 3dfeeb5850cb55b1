"""Run one attention step through the core ops, into a caller's quantised buffer."""

from __future__ import annotations

import torch

import mlacast
from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.integrations.transformers.inputs import AttentionInputs
from mlacast.integrations.transformers.selection import to_rows


def attend(step: AttentionInputs, out: QuantizedTensor, *, backend: str | None = None) -> None:
    """Write the attention output of every query token of the step.

    One new token per request goes through ``sparse_mla_decode`` on the model's own cache tensors (a
    page is a request, nothing is copied), more than one through ``sparse_mla_prefill``.

    Args:
        step: What ``attention_inputs`` collected.
        out: Buffer or token range with ``batch * s_q`` tokens.
        backend: None, "reference", "triton" or "hopper".
    """
    if step.s_q == 1:
        _decode(step, out, backend)
    else:
        _prefill(step, out, backend)


def _prefill(step: AttentionInputs, out: QuantizedTensor, backend: str | None) -> None:
    kv, window_len = step.window_kv, step.window_kv.shape[1]
    if step.num_entries:
        kv = torch.cat((kv, step.compressed_kv), dim=1)
    indices = to_rows(step.window_columns, kv.shape[1])
    if step.num_entries:
        entries = to_rows(step.compressed_columns, kv.shape[1], first_row=window_len)
        indices = torch.cat((indices, entries), dim=1)
    mlacast.sparse_mla_prefill(
        step.q,
        kv.reshape(-1, kv.shape[-1]),
        indices,
        sm_scale=step.sm_scale,
        attn_sink=step.attn_sink,
        q_norm_eps=step.q_norm_eps,
        rope=step.rope,
        out=out,
        backend=backend,
    )


def _decode(step: AttentionInputs, out: QuantizedTensor, backend: str | None) -> None:
    extra_cache, extra_indices, extra_format = None, None, None
    if step.num_entries:
        extra_cache = step.compressed_kv.unsqueeze(2)
        extra_indices = to_rows(step.compressed_columns, step.num_entries)
        extra_format = KvFormat.BF16
    mlacast.sparse_mla_decode(
        step.q,
        step.window_kv.unsqueeze(2),
        to_rows(step.window_columns, step.window_kv.shape[1]),
        kv_format=KvFormat.BF16,
        sm_scale=step.sm_scale,
        extra_k_cache=extra_cache,
        extra_indices=extra_indices,
        extra_kv_format=extra_format,
        attn_sink=step.attn_sink,
        q_norm_eps=step.q_norm_eps,
        rope=step.rope,
        out=out,
        backend=backend,
    )

"""The reference as a backend: run it, then store the result in the caller's buffers."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.reference.decode_metadata import decode_metadata as _metadata
from mlacast.reference.dense_mla_decode import dense_mla_decode as _dense
from mlacast.reference.dense_mla_prefill import dense_mla_prefill as _dense_prefill
from mlacast.reference.grouped_out_project import grouped_out_project as _project
from mlacast.reference.kv_cache_append import prepare_latent
from mlacast.reference.merge_attention_states import merge_attention_states as _merge
from mlacast.reference.quantize_output import quantize_output as _quantize
from mlacast.reference.quantized_linear import quantized_linear as _linear
from mlacast.reference.rope_quantize_fp8 import rope_quantize_fp8 as _rope_quantize
from mlacast.reference.sparse_mla_decode import sparse_mla_decode as _decode
from mlacast.reference.sparse_mla_prefill import sparse_mla_prefill as _prefill
from mlacast.reference.v_up_project import v_up_project as _v_up


def _store(values: torch.Tensor, out: QuantizedTensor) -> None:
    """Regroup [T, h, d] (or [B, Q, h, d]) heads into the buffer's groups and store them."""
    _quantize(values.reshape(out.num_tokens, out.num_groups, out.features), out)


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    out: QuantizedTensor,
    max_logits: torch.Tensor,
    lse: torch.Tensor,
    **options: Any,
) -> None:
    """Fill ``out``, ``max_logits`` and ``lse``; options are those of the reference function."""
    values, row_max, row_lse = _prefill(q, kv, indices, **options)
    _store(values, out)
    max_logits.copy_(row_max)
    lse.copy_(row_lse)


def sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    out: QuantizedTensor,
    lse: torch.Tensor,
    batch_invariant: bool,
    workspace: torch.Tensor | None,
    **options: Any,
) -> None:
    """Fill ``out`` and ``lse``.

    The reference always is batch invariant and keeps its partials itself, so those two arguments
    change nothing here.
    """
    del batch_invariant, workspace
    values, row_lse = _decode(q, k_cache, indices, **options)
    _store(values, out)
    lse.copy_(row_lse)


def dense_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: QuantizedTensor,
    lse: torch.Tensor,
    **options: Any,
) -> None:
    """Fill ``out`` (one row per token of the flattened batch) and ``lse``."""
    values, row_lse = _dense(q, k_cache, page_table, seq_lens, **options)
    _store(values, out)
    lse.copy_(row_lse)


def dense_mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    out: QuantizedTensor,
    lse: torch.Tensor,
    **options: Any,
) -> None:
    """Fill ``out`` and ``lse``.

    The reference reads the lengths themselves, so their upper bounds change nothing here.
    """
    del max_seqlen_q, max_seqlen_k
    values, row_lse = _dense_prefill(q, k, v, **options)
    _store(values, out)
    lse.copy_(row_lse)


def decode_metadata(
    lengths: torch.Tensor,
    *,
    parts: torch.Tensor,
    num_splits: torch.Tensor,
    **options: Any,
) -> None:
    """Fill ``parts`` and ``num_splits``."""
    rows, splits = _metadata(lengths, num_parts=parts.shape[0], **options)
    parts.copy_(rows)
    num_splits.copy_(splits)


def merge_attention_states(
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    *,
    lse_layout: str,
    out: QuantizedTensor,
    lse: torch.Tensor,
) -> None:
    """Fill ``out`` and ``lse``."""
    values, merged_lse = _merge(outs, lses, lse_layout=lse_layout)
    _store(values, out)
    lse.copy_(merged_lse)


def v_up_project(latent_out: torch.Tensor, w_uv: torch.Tensor, *, out: QuantizedTensor) -> None:
    """Fill ``out``."""
    _store(_v_up(latent_out, w_uv), out)


def quantize_output(x: torch.Tensor, *, out: QuantizedTensor) -> None:
    """Fill ``out`` from rows [T, K]."""
    _store(x, out)


def rope_quantize_fp8(*inputs: Any, **options: Any) -> None:
    """Fill the outputs; arguments are those of the reference function."""
    _rope_quantize(*inputs, **options)


def kv_cache_append(
    latent: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    kv_format: KvFormat,
    norm_weight: torch.Tensor | None,
    norm_eps: float | None,
    rope: Rope | None,
) -> None:
    """Write the addressed records of ``cache``."""
    kv_format.append(prepare_latent(latent, norm_weight, norm_eps, rope), slots, cache)


def kv_cache_gather(
    cache: torch.Tensor, slots: torch.Tensor, *, kv_format: KvFormat
) -> torch.Tensor:
    """Dequantise the addressed records to bfloat16."""
    return kv_format.gather(cache, slots)


def grouped_out_project(
    out: QuantizedTensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor | None,
    *,
    projected: torch.Tensor,
) -> None:
    """Fill ``projected``: a float32 product, rounded once."""
    projected.copy_(_project(out, weight, weight_sf))


def quantized_linear(
    out: QuantizedTensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor | None,
    *,
    projected: torch.Tensor,
) -> None:
    """Fill ``projected``: a float32 product, rounded once."""
    projected.copy_(_linear(out, weight, weight_sf))

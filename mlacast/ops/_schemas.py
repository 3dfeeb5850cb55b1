"""All ``torch.ops.mlacast`` contracts of the core operations, registered before anything is traced.

Every output is an argument that the caller allocated and the schema marks as mutated, so no
operation returns an alias, its fake kernel has nothing to compute, and strides are the same under
``torch.compile`` as in eager mode. The public functions of ``mlacast`` check arguments, allocate,
and call these.

An output buffer is described by four arguments: ``out_data`` (the rows of the range), ``out_sf``
(their scale factors; rows beyond those of ``out_data`` are padding to be zeroed; for Nvfp4 the
whole swizzled buffer), ``out_format`` (key of the descriptor), ``out_scale`` (its scale, if it has
one), with ``row_start`` and ``total_tokens`` placing the range.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

_OUT = "str out_format, Tensor? out_scale, SymInt row_start, SymInt total_tokens, str backend"

SCHEMAS: dict[str, str] = {
    "sparse_mla_prefill": (
        "(Tensor q, Tensor kv, Tensor indices, Tensor(a!) out_data, Tensor(b!)? out_sf, "
        "Tensor(c!) max_logits, Tensor(d!) lse, float sm_scale, Tensor? topk_length, "
        "Tensor? attn_sink, float? q_norm_eps, Tensor? cos_sin_cache, Tensor? positions, "
        f"str pairing, str q_order, {_OUT}) -> ()"
    ),
    "sparse_mla_decode": (
        "(Tensor q, Tensor k_cache, Tensor indices, Tensor(a!) out_data, Tensor(b!)? out_sf, "
        "Tensor(c!) lse, str kv_format, float sm_scale, Tensor? topk_length, "
        "Tensor? extra_k_cache, Tensor? extra_indices, Tensor? extra_topk_length, "
        "str? extra_kv_format, Tensor? attn_sink, float? q_norm_eps, Tensor? cos_sin_cache, "
        "Tensor? positions, str pairing, str q_order, SymInt? num_splits, bool batch_invariant, "
        f"Tensor(d!)? workspace, {_OUT}) -> ()"
    ),
    "dense_mla_decode": (
        "(Tensor q, Tensor k_cache, Tensor page_table, Tensor seq_lens, Tensor(a!) out_data, "
        "Tensor(b!)? out_sf, Tensor(c!) lse, str kv_format, float sm_scale, bool causal, "
        f"Tensor? attn_sink, {_OUT}) -> ()"
    ),
    "merge_attention_states": (
        "(Tensor[] outs, Tensor[] lses, Tensor(a!) out_data, Tensor(b!)? out_sf, Tensor(c!) lse, "
        f"str lse_layout, {_OUT}) -> ()"
    ),
    "quantize_output": f"(Tensor x, Tensor(a!) out_data, Tensor(b!)? out_sf, {_OUT}) -> ()",
    "kv_cache_append": (
        "(Tensor latent, Tensor slots, Tensor(a!) cache, str kv_format, str backend) -> ()"
    ),
    "kv_cache_gather": (
        "(Tensor cache, Tensor slots, str kv_format, SymInt d_qk, str backend) -> Tensor"
    ),
    "grouped_out_project": (
        "(Tensor data, Tensor? sf, Tensor weight, str format, Tensor? scale, SymInt row_start, "
        "SymInt total_tokens, str backend) -> Tensor"
    ),
}


def _fake_nothing(*args: Any, **kwargs: Any) -> None:
    """Fake of an operation whose outputs are all mutated arguments."""


def _fake_kv_cache_gather(
    cache: torch.Tensor, slots: torch.Tensor, kv_format: str, d_qk: int, backend: str
) -> torch.Tensor:
    return torch.empty((slots.shape[0], d_qk), dtype=torch.bfloat16, device=cache.device)


def _fake_grouped_out_project(
    data: torch.Tensor,
    sf: torch.Tensor | None,
    weight: torch.Tensor,
    format: str,
    scale: torch.Tensor | None,
    row_start: int,
    total_tokens: int,
    backend: str,
) -> torch.Tensor:
    shape = (data.shape[0], weight.shape[0], weight.shape[1])
    return torch.empty(shape, dtype=weight.dtype, device=weight.device)


_FAKES: dict[str, Callable[..., Any]] = {
    "kv_cache_gather": _fake_kv_cache_gather,
    "grouped_out_project": _fake_grouped_out_project,
}


def _eager_body(op: str) -> Callable[..., Any]:
    """The body of ``op``, imported on first use so that registering costs nothing."""

    def body(*args: Any, **kwargs: Any) -> Any:
        # Forward only: without this, some outputs would carry a graph and others not.
        with torch.no_grad():
            return importlib.import_module(f"mlacast.ops.{op}").run(*args, **kwargs)

    return body


# The library object owns the registrations: it lives as long as the module does.
_LIBRARY: Any = torch.library.Library("mlacast", "FRAGMENT")  # type: ignore[no-untyped-call]


def _register() -> None:
    for op, schema in SCHEMAS.items():
        _LIBRARY.define(op + schema, tags=(torch.Tag.needs_exact_strides,))
        _LIBRARY.impl(op, _eager_body(op), "CompositeExplicitAutograd")
        torch.library.register_fake(f"mlacast::{op}", _FAKES.get(op, _fake_nothing), lib=_LIBRARY)


_register()

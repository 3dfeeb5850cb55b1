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

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

_OUT = "str out_format, Tensor? out_scale, SymInt row_start, SymInt total_tokens, str backend"
_PROJECT = (
    "(Tensor data, Tensor? sf, Tensor weight, Tensor? weight_sf, Tensor(a!) projected, "
    "str format, Tensor? scale, SymInt row_start, SymInt total_tokens, str backend) -> ()"
)

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
        "Tensor(d!)? workspace, float v_scale, Tensor? sm_scale_tensor, Tensor? v_scale_tensor, "
        f"bool rotate_query, {_OUT}) -> ()"
    ),
    "dense_mla_decode": (
        "(Tensor q, Tensor k_cache, Tensor page_table, Tensor seq_lens, Tensor(a!) out_data, "
        "Tensor(b!)? out_sf, Tensor(c!) lse, str kv_format, float sm_scale, bool causal, "
        "Tensor? attn_sink, float v_scale, Tensor? sm_scale_tensor, Tensor? v_scale_tensor, "
        f"{_OUT}) -> ()"
    ),
    "dense_mla_prefill": (
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "Tensor(a!) out_data, Tensor(b!)? out_sf, Tensor(c!) lse, SymInt max_seqlen_q, "
        f"SymInt max_seqlen_k, float softmax_scale, bool causal, {_OUT}) -> ()"
    ),
    "decode_metadata": (
        "(Tensor lengths, Tensor(a!) parts, Tensor(b!) num_splits, SymInt? topk, SymInt overhead, "
        "str backend) -> ()"
    ),
    "merge_attention_states": (
        "(Tensor[] outs, Tensor[] lses, Tensor(a!) out_data, Tensor(b!)? out_sf, Tensor(c!) lse, "
        f"str lse_layout, {_OUT}) -> ()"
    ),
    "v_up_project": (
        f"(Tensor latent_out, Tensor w_uv, Tensor(a!) out_data, Tensor(b!)? out_sf, {_OUT}) -> ()"
    ),
    "quantize_output": f"(Tensor x, Tensor(a!) out_data, Tensor(b!)? out_sf, {_OUT}) -> ()",
    "rope_quantize_fp8": (
        "(Tensor q_rope, Tensor k_rope, Tensor q_nope, Tensor k_nope, Tensor? v, "
        "Tensor cos_sin_cache, Tensor positions, Tensor(a!) q_rope_out, Tensor(b!) k_rope_out, "
        "Tensor(c!) q_nope_out, Tensor(d!) k_nope_out, Tensor(e!)? v_out, Tensor[]? page_table, "
        "str pairing, float q_scale, float kv_scale, str backend) -> ()"
    ),
    "kv_cache_append": (
        "(Tensor latent, Tensor slots, Tensor(a!) cache, str kv_format, Tensor? norm_weight, "
        "float? norm_eps, Tensor? cos_sin_cache, Tensor? positions, str pairing, str backend) "
        "-> ()"
    ),
    "kv_cache_gather": (
        "(Tensor cache, Tensor slots, str kv_format, SymInt d_qk, str backend) -> Tensor"
    ),
    "grouped_out_project": _PROJECT,
    "quantized_linear": _PROJECT,
}


def _fake_nothing(*args: Any, **kwargs: Any) -> None:
    """Fake of an operation whose outputs are all mutated arguments."""


def _fake_kv_cache_gather(
    cache: torch.Tensor, slots: torch.Tensor, kv_format: str, d_qk: int, backend: str
) -> torch.Tensor:
    return torch.empty((slots.shape[0], d_qk), dtype=torch.bfloat16, device=cache.device)


_FAKES: dict[str, Callable[..., Any]] = {
    "kv_cache_gather": _fake_kv_cache_gather,
}


def _eager_body(op: str) -> Callable[..., Any]:
    """The kernel of ``op``, imported on first use so that registering costs nothing."""

    def body(*arguments: Any) -> Any:
        return _run_operator()(op, _body(op), arguments)

    return body


@functools.cache
def _run_operator() -> Callable[..., Any]:
    run_operator: Callable[..., Any] = importlib.import_module(
        "mlacast.ops.known_calls"
    ).run_operator
    return run_operator


@functools.cache
def _body(op: str) -> Callable[..., Any]:
    run: Callable[..., Any] = importlib.import_module(f"mlacast.ops.{op}").run
    return run


# The library object owns the registrations: it lives as long as the module does.
_LIBRARY: Any = torch.library.Library("mlacast", "FRAGMENT")  # type: ignore[no-untyped-call]


def _register() -> None:
    for op, schema in SCHEMAS.items():
        _LIBRARY.define(op + schema, tags=(torch.Tag.needs_exact_strides,))
        _LIBRARY.impl(op, _eager_body(op), "CompositeExplicitAutograd")
        # Forward only; the key's default kernel would look at every argument to find that out.
        _LIBRARY.impl(op, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"mlacast::{op}", _FAKES.get(op, _fake_nothing), lib=_LIBRARY)


_register()

"""The fused functions as ``torch.ops.mlacast``: schemas, kernels and fake kernels.

The arguments are those of the Python functions, in the same order. An op may not return an argument
that it wrote, so a call with ``out_fp8`` and ``out_sf`` returns two zero-size tensors in their
places and the Python function hands the caller's objects on. The kernels are registered for every
device: the core ops that they call choose the backend.
"""

from __future__ import annotations

from typing import Any

import torch

from mlacast.compat.flash_mla import _fused_checks as checks
from mlacast.compat.flash_mla._empty_rows import mark_empty_rows_
from mlacast.compat.flash_mla._fused_calls import DecodeCall, FusedCall, PrefillCall
from mlacast.descriptors.out_format import Mxfp8
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.layouts.sf_mn_major import allocate_mn_major
from mlacast.ops.sparse_mla_decode import sparse_mla_decode
from mlacast.ops.sparse_mla_prefill import sparse_mla_prefill

Pair = tuple[torch.Tensor, torch.Tensor]

_FORMAT = Mxfp8("chunk32")

_LEADING = (
    "bool enable_q_norm, float rms_norm_eps, Tensor token_positions, bool is_rope_neox_style, "
    "int rope_dim, Tensor cos_sin_cache, int n_wv_group, int num_per_channels, "
    "bool use_tma_aligned_col_major_sf, bool round_sf, bool use_packed_ue8m0, Tensor q"
)
_TRAILING = "Tensor(d!)? out_fp8=None, Tensor(e!)? out_sf=None"
_PREFILL_SCHEMA = (
    f"fused_norm_rope_attn_rope_cast_prefill({_LEADING}, Tensor kv, Tensor indices, "
    "float sm_scale, int d_v=512, Tensor? attn_sink=None, Tensor? topk_length=None, "
    f"{_TRAILING}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_DECODE_SCHEMA = (
    f"fused_norm_rope_attn_rope_cast_decode({_LEADING}, Tensor k_cache, "
    "Tensor indices_in_kvcache, float sm_scale, int d_v=512, Tensor? attn_sink=None, "
    "Tensor? topk_length=None, Tensor? extra_k_cache=None, "
    "Tensor? extra_indices_in_kvcache=None, Tensor? extra_topk_length=None, "
    f"str? v41_placement=None, {_TRAILING}) -> (Tensor, Tensor, Tensor)"
)


def _fresh_pair(call: FusedCall) -> Pair:
    s_q, width = call.q.shape[0], call.group_width
    codes = call.q.new_empty((s_q, call.n_wv_group, width), dtype=torch.float8_e4m3fn)
    words = _FORMAT.sf_words(width)
    return codes, allocate_mn_major(s_q, call.n_wv_group, words, torch.int32, call.q.device)


def _zero_size_pair(call: FusedCall) -> Pair:
    return (
        call.q.new_empty(0, dtype=torch.float8_e4m3fn),
        call.q.new_empty(0, dtype=torch.int32),
    )


def _buffer(
    call: FusedCall, out_fp8: torch.Tensor | None, out_sf: torch.Tensor | None
) -> tuple[QuantizedTensor, Pair]:
    """What the core op writes, and the pair that this op returns."""
    if out_fp8 is None or out_sf is None:
        pair = _fresh_pair(call)
        return QuantizedTensor(*pair, _FORMAT), pair
    # One token more than the range: it does not end the buffer, so its writer owns no padding.
    total_tokens = call.q.shape[0] + 1
    buffer = QuantizedTensor(out_fp8, out_sf, _FORMAT, total_tokens=total_tokens)
    return buffer, _zero_size_pair(call)


def _rope(call: FusedCall) -> Rope:
    return Rope(call.cos_sin_cache, call.token_positions, call.rope_pairing)


def _per_head(call: FusedCall) -> torch.Tensor:
    return call.q.new_empty(call.q.shape[:2], dtype=torch.float32)


def _prefill(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
    call = PrefillCall(*arguments, **keywords)
    checks.check_prefill(call)
    checks.check_memory(checks.PREFILL, call)
    buffer, pair = _buffer(call, call.out_fp8, call.out_sf)
    _, max_logits, lse = sparse_mla_prefill(
        call.q,
        call.kv,
        call.indices,
        sm_scale=call.sm_scale,
        topk_length=call.topk_length,
        attn_sink=call.attn_sink,
        q_norm_eps=call.q_norm_eps,
        rope=_rope(call),
        q_order="chunk16",
        out=buffer,
    )
    return *pair, max_logits, mark_empty_rows_(lse)


def _fake_prefill(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
    call = PrefillCall(*arguments, **keywords)
    checks.check_prefill(call)
    pair = _fresh_pair(call) if call.out_fp8 is None else _zero_size_pair(call)
    return *pair, _per_head(call), _per_head(call)


def _decode(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
    call = DecodeCall(*arguments, **keywords)
    kv_format, extra_kv_format = checks.check_decode(call)
    checks.check_memory(checks.DECODE, call)
    buffer, pair = _buffer(call, call.out_fp8, call.out_sf)
    _, lse = sparse_mla_decode(
        call.q,
        call.k_cache,
        call.indices_in_kvcache,
        kv_format=kv_format,
        sm_scale=call.sm_scale,
        topk_length=call.topk_length,
        extra_k_cache=call.extra_k_cache,
        extra_indices=call.extra_indices_in_kvcache,
        extra_topk_length=call.extra_topk_length,
        extra_kv_format=extra_kv_format,
        attn_sink=call.attn_sink,
        q_norm_eps=call.q_norm_eps,
        rope=_rope(call),
        q_order="chunk16",
        out=buffer,
    )
    return *pair, mark_empty_rows_(lse)


def _fake_decode(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
    call = DecodeCall(*arguments, **keywords)
    checks.check_decode(call)
    pair = _fresh_pair(call) if call.out_fp8 is None else _zero_size_pair(call)
    return *pair, _per_head(call)


# The library object owns the registrations: it lives as long as the module does.
_LIBRARY = torch.library.Library("mlacast", "FRAGMENT")  # type: ignore[no-untyped-call]


def _register() -> None:
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    for schema, kernel, fake in (
        (_PREFILL_SCHEMA, _prefill, _fake_prefill),
        (_DECODE_SCHEMA, _decode, _fake_decode),
    ):
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=tags)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"mlacast::{name}", fake, lib=_LIBRARY)


_register()

"""The fused functions as ``torch.ops.mlacast``: schemas, kernels and fake kernels.

The arguments are those of the Python functions, in the same order. An op may not return an argument
that it wrote, so a call with ``out_fp8`` and ``out_sf`` returns two zero-size tensors in their
places and the Python function hands the caller's objects on. The kernels are registered for every
device: the core ops that they call choose the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mlacast.compat.flash_mla import _fused_checks as checks
from mlacast.compat.flash_mla._empty_rows import mark_empty_rows_
from mlacast.compat.flash_mla._fused_calls import DecodeCall, FusedCall, PrefillCall
from mlacast.compat.flash_mla.placement import v41_placement
from mlacast.descriptors.out_format import Mxfp8
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.layouts.sf_mn_major import allocate_mn_major_padded
from mlacast.ops.known_call import KnownCall, Repeated
from mlacast.ops.known_calls import OPERATORS, PUBLIC, learn
from mlacast.ops.output import to_arguments
from mlacast.ops.sparse_mla_decode import operator_arguments as decode_arguments
from mlacast.ops.sparse_mla_decode import sparse_mla_decode
from mlacast.ops.sparse_mla_prefill import operator_arguments as prefill_arguments
from mlacast.ops.sparse_mla_prefill import sparse_mla_prefill

Pair = tuple[torch.Tensor, torch.Tensor]

_FORMAT = Mxfp8("chunk32")

_LEADING = (
    "bool enable_q_norm, float rms_norm_eps, Tensor token_positions, bool is_rope_neox_style, "
    "int rope_dim, Tensor cos_sin_cache, int n_wv_group, int num_per_channels, "
    "bool use_tma_aligned_col_major_sf, bool round_sf, bool use_packed_ue8m0, Tensor q"
)
_TRAILING = "Tensor(d!)? out_fp8=None, Tensor(e!)? out_sf=None"
_PREFILL_NAME = "fused_norm_rope_attn_rope_cast_prefill"
_DECODE_NAME = "fused_norm_rope_attn_rope_cast_decode"
_PREFILL_SCHEMA = (
    f"{_PREFILL_NAME}({_LEADING}, Tensor kv, Tensor indices, "
    "float sm_scale, int d_v=512, Tensor? attn_sink=None, Tensor? topk_length=None, "
    f"{_TRAILING}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_DECODE_SCHEMA = (
    f"{_DECODE_NAME}({_LEADING}, Tensor k_cache, "
    "Tensor indices_in_kvcache, float sm_scale, int d_v=512, Tensor? attn_sink=None, "
    "Tensor? topk_length=None, Tensor? extra_k_cache=None, "
    "Tensor? extra_indices_in_kvcache=None, Tensor? extra_topk_length=None, "
    f"str? v41_placement=None, {_TRAILING}) -> (Tensor, Tensor, Tensor)"
)


def _fresh_pair(call: FusedCall) -> tuple[Pair, Pair]:
    """A pair that the op allocates: with padding, as the core op writes it, and as it returns."""
    s_q, width = call.q.shape[0], call.group_width
    codes = call.q.new_empty((s_q, call.n_wv_group, width), dtype=torch.float8_e4m3fn)
    words = _FORMAT.sf_words(width)
    rows = allocate_mn_major_padded(s_q, call.n_wv_group, words, torch.int32, call.q.device)
    return (codes, rows), (codes, rows[:s_q])


def _memory(
    call: FusedCall, out_fp8: torch.Tensor | None, out_sf: torch.Tensor | None
) -> tuple[Pair, Pair]:
    """What the core op writes, and the pair that the caller sees."""
    if out_fp8 is None or out_sf is None:
        return _fresh_pair(call)
    return (out_fp8, out_sf), (out_fp8, out_sf)


def _returned(call: PrefillCall | DecodeCall, pair: Sequence[torch.Tensor]) -> Pair:
    """The pair that the op returns: it may not be the caller's."""
    if call.out_fp8 is None:
        return pair[0], pair[1]
    return (
        call.q.new_empty(0, dtype=torch.float8_e4m3fn),
        call.q.new_empty(0, dtype=torch.int32),
    )


def _buffer(
    call: FusedCall, out_fp8: torch.Tensor | None, out_sf: torch.Tensor | None
) -> tuple[QuantizedTensor, Pair]:
    """`_memory` as a checked buffer."""
    (codes, rows), pair = _memory(call, out_fp8, out_sf)
    if out_fp8 is None:
        return QuantizedTensor(*pair, _FORMAT).with_sf_rows(rows), pair
    # One token more than the range: it does not end the buffer, so its writer owns no padding.
    total_tokens = call.q.shape[0] + 1
    return QuantizedTensor(codes, rows, _FORMAT, total_tokens=total_tokens), pair


def _rope(call: FusedCall) -> Rope:
    return Rope(call.cos_sin_cache, call.token_positions, call.rope_pairing)


def _per_head(call: FusedCall) -> torch.Tensor:
    return call.q.new_empty(call.q.shape[:2], dtype=torch.float32)


def _prefill(*arguments: Any) -> tuple[torch.Tensor, ...]:
    # The dispatcher leaves trailing defaults out.
    call = PrefillCall(*arguments)
    repeated = repeat_prefill(tuple(vars(call).values()))
    if repeated is None:
        return _first_prefill(call)
    return *_returned(call, repeated[:2]), *repeated[2:]


def _first_prefill(call: PrefillCall) -> tuple[torch.Tensor, ...]:
    """Check and run a prefill, and keep how it was done."""
    checks.check_prefill(call)
    checks.check_memory(checks.PREFILL, call)
    buffer, pair = _buffer(call, call.out_fp8, call.out_sf)
    options: dict[str, Any] = {
        "sm_scale": call.sm_scale,
        "topk_length": call.topk_length,
        "attn_sink": call.attn_sink,
        "q_norm_eps": call.q_norm_eps,
        "rope": _rope(call),
        "q_order": "chunk16",
    }
    _, max_logits, lse = sparse_mla_prefill(call.q, call.kv, call.indices, out=buffer, **options)
    target = to_arguments(buffer)
    core = prefill_arguments(
        call.q, call.kv, call.indices, target, max_logits, lse, backend=None, **options
    )
    fresh = (max_logits, lse, *(() if call.out_fp8 is not None else (target.data, target.sf)))
    tensors = _prefill_tensors(call, target.data, target.sf, max_logits, lse)
    values = tuple(vars(call).values())
    learn(OPERATORS, _PREFILL_NAME, values, "sparse_mla_prefill", core, tensors, fresh)
    return *_returned(call, pair), max_logits, mark_empty_rows_(lse)


def _prefill_tensors(
    call: PrefillCall,
    data: torch.Tensor,
    sf: torch.Tensor | None,
    max_logits: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Tensors of the core operator, in its order."""
    return (
        call.q,
        call.kv,
        call.indices,
        data,
        sf,
        max_logits,
        lse,
        call.topk_length,
        call.attn_sink,
        call.cos_sin_cache,
        call.token_positions,
    )


def repeat_prefill(
    arguments: Sequence[Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Run a prefill whose like was run before.

    Args:
        arguments: Those of the op, all of them.

    Returns:
        out_fp8, out_sf, max_logits and lse; None if nothing was run.
    """
    known = OPERATORS.find(_PREFILL_NAME, arguments)
    if known is None or known.plan is None:
        return None
    call = PrefillCall(*arguments)
    rows, pair = _memory(call, call.out_fp8, call.out_sf)
    max_logits, lse = _per_head(call), _per_head(call)
    tensors = _prefill_tensors(call, *rows, max_logits, lse)
    if not known.repeat(tensors):
        return None
    returned = (*pair, max_logits, mark_empty_rows_(lse))
    _keep(checks.PREFILL, arguments, known, tensors, (max_logits, lse), returned)
    return returned


def _keep(
    op: str,
    values: Sequence[Any],
    known: KnownCall,
    tensors: Sequence[torch.Tensor | None],
    fresh: Sequence[torch.Tensor],
    returned: Sequence[torch.Tensor],
) -> None:
    """Let ``PUBLIC.repeat(op, values)`` find a call that was repeated: one into a given pair.

    Scales that are allocated here come with zeroed padding, so they are not ``fresh``.
    """
    repeated = Repeated(known, tensors, fresh)
    after = [(mark_empty_rows_, fresh[-1])]
    PUBLIC.keep(op, values, known, [repeated], returned, after)


def _fake_prefill(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
    call = PrefillCall(*arguments, **keywords)
    checks.check_prefill(call)
    _, pair = _memory(call, call.out_fp8, call.out_sf)
    return *_returned(call, pair), _per_head(call), _per_head(call)


def _decode(*arguments: Any) -> tuple[torch.Tensor, ...]:
    call = DecodeCall(*arguments)
    repeated = repeat_decode(tuple(vars(call).values()))
    if repeated is None:
        return _first_decode(call)
    return *_returned(call, repeated[:2]), *repeated[2:]


def _first_decode(call: DecodeCall) -> tuple[torch.Tensor, ...]:
    """Check and run a decode, and keep how it was done."""
    kv_format, extra_kv_format = checks.check_decode(call)
    checks.check_memory(checks.DECODE, call)
    buffer, pair = _buffer(call, call.out_fp8, call.out_sf)
    options: dict[str, Any] = {
        "kv_format": kv_format,
        "sm_scale": call.sm_scale,
        "topk_length": call.topk_length,
        "extra_k_cache": call.extra_k_cache,
        "extra_indices": call.extra_indices_in_kvcache,
        "extra_topk_length": call.extra_topk_length,
        "extra_kv_format": extra_kv_format,
        "attn_sink": call.attn_sink,
        "q_norm_eps": call.q_norm_eps,
        "rope": _rope(call),
        "q_order": "chunk16",
    }
    _, lse = sparse_mla_decode(call.q, call.k_cache, call.indices_in_kvcache, out=buffer, **options)
    target = to_arguments(buffer)
    core = decode_arguments(
        call.q,
        call.k_cache,
        call.indices_in_kvcache,
        target,
        lse,
        num_splits=None,
        batch_invariant=False,
        workspace=None,
        v_scale=1.0,
        backend=None,
        **options,
    )
    fresh = (lse, *(() if call.out_fp8 is not None else (target.data, target.sf)))
    tensors = _decode_tensors(call, target.data, target.sf, lse)
    learn(OPERATORS, _DECODE_NAME, _placed(call), "sparse_mla_decode", core, tensors, fresh)
    return *_returned(call, pair), mark_empty_rows_(lse)


def _decode_tensors(
    call: DecodeCall, data: torch.Tensor, sf: torch.Tensor | None, lse: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Tensors of the core operator, in its order."""
    return (
        call.q,
        call.k_cache,
        call.indices_in_kvcache,
        data,
        sf,
        lse,
        call.topk_length,
        call.extra_k_cache,
        call.extra_indices_in_kvcache,
        call.extra_topk_length,
        call.attn_sink,
        call.cos_sin_cache,
        call.token_positions,
    )


def _placed(call: DecodeCall) -> tuple[Any, ...]:
    """What a decode depends on: its arguments and the setting that stands in for one."""
    return (*vars(call).values(), v41_placement())


def repeat_decode(
    arguments: Sequence[Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Run a decode whose like was run before.

    Args:
        arguments: Those of the op, all of them.

    Returns:
        out_fp8, out_sf and lse; None if nothing was run.
    """
    call = DecodeCall(*arguments)
    known = OPERATORS.find(_DECODE_NAME, _placed(call))
    if known is None or known.plan is None:
        return None
    rows, pair = _memory(call, call.out_fp8, call.out_sf)
    lse = _per_head(call)
    tensors = _decode_tensors(call, *rows, lse)
    if not known.repeat(tensors):
        return None
    returned = (*pair, mark_empty_rows_(lse))
    _keep(checks.DECODE, (*arguments, v41_placement()), known, tensors, (lse,), returned)
    return returned


def _fake_decode(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
    call = DecodeCall(*arguments, **keywords)
    checks.check_decode(call)
    _, pair = _memory(call, call.out_fp8, call.out_sf)
    return *_returned(call, pair), _per_head(call)


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

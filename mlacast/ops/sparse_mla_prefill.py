"""``sparse_mla_prefill``: sparse MLA over un-paged rows, from query norm to output cast."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.out_format import OutFormat
from mlacast.descriptors.rope import Rope
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.errors import check_tensor, fail
from mlacast.ops import value_checks
from mlacast.ops.known_calls import PUBLIC, call_operator
from mlacast.ops.layout import layout_features, plain_rows
from mlacast.ops.output import (
    D_V,
    Output,
    OutputArguments,
    features_of,
    from_arguments,
    prepare_output,
)
from mlacast.ops.overlap import check_no_overlap
from mlacast.ops.query import (
    check_backend,
    check_lengths,
    check_prologue,
    check_query,
    check_sink,
    check_sm_scale,
    query_features,
)

OP = "sparse_mla_prefill"


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    q_norm_eps: float | None = None,
    rope: Rope | None = None,
    q_order: str = "head",
    out: Output | None = None,
    out_format: OutFormat | None = None,
    num_groups: int = 1,
    backend: str | None = None,
) -> tuple[Output, torch.Tensor, torch.Tensor]:
    """Attend each query token to the rows of ``kv`` that ``indices`` names; optionally quantise.

    For one (token, head) over its valid entries i, in float32::

        r       = rsqrt(mean(q ** 2) + q_norm_eps)  (1 without norm)
        q'      = q with its last 64 dimensions rotated and rounded to bfloat16 (q without rope)
        logit_i = sm_scale * r * (q' . kv_i);   lse = log(sum_i exp(logit_i))
        out     = sum_i exp(logit_i - logaddexp(lse, attn_sink)) * kv_i[:512]
        out     = out with its last 64 dimensions rotated back (with rope, d_qk = 512 only)

    An entry is valid if its column is below ``topk_length`` and ``0 <= index < s_kv``; repeats
    count each time. Rows of ``kv`` that nothing selects may hold NaN.

    Args:
        q: [s_q, h_q, d_qk] bfloat16, h_q 1..128, d_qk 512 or 576, last dimension contiguous.
        kv: [s_kv, d_qk] or [s_kv, 1, d_qk] bfloat16, last dimension contiguous.
        indices: [s_q, topk] or [s_q, 1, topk] int32, rows of ``kv``. topk may be 0.
        sm_scale: Multiplies q.k before the softmax. No default: MLA keeps the scale of the
            un-absorbed head.
        topk_length: [s_q] int32 or None: entries of each row that count, clamped to [0, topk]. None
            means all.
        attn_sink: [h_q] float32 or None: joins the softmax denominator only. -inf has no effect,
            +inf gives zeros; max_logits and lse are unaffected.
        q_norm_eps: Epsilon of a weightless RMSNorm of each query head, or None. Not for d_qk = 576.
        rope: Rotation of the last 64 query dimensions, or None. Positions past the table are
            clamped.
        q_order: "head", or "chunk16" when a token's elements lie at (d // 16) * (h_q * 16) + h * 16
            + d % 16.
        out: Buffer to fill: a bfloat16 tensor [s_q, h_q, 512], or a QuantizedTensor of any format
            with s_q tokens.
        out_format: Format of the output; None means bfloat16, or that of ``out``.
        num_groups: Groups of the QuantizedTensor allocated when ``out`` is None; each has h_q * 512
            / num_groups features.
        backend: "reference", "triton", "hopper", or None for the best that covers the call. A named
            backend never falls back; MLACAST_BACKEND applies to None.

    Returns:
        out: ``out`` itself if given, else a bfloat16 tensor [s_q, h_q, 512] or a QuantizedTensor
            (any other format, or num_groups > 1).
        max_logits: [s_q, h_q] float32, largest logit (scaled, after the norm, without the sink).
        lse: [s_q, h_q] float32, natural log, without the sink.
        A row without valid entries gives zeros, -inf, -inf. Zero tokens give empty results.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract; nothing has been
            written.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call gives the same bits, and a row does not depend on the other rows.

    Source: FlashMLA 9241ae3 (sparse prefill); there lse of an empty row is +inf.
    """
    values = (
        q,
        kv,
        indices,
        sm_scale,
        topk_length,
        attn_sink,
        q_norm_eps,
        rope,
        q_order,
        out,
        out_format,
        num_groups,
        backend,
    )
    repeated: tuple[Output, torch.Tensor, torch.Tensor] | None = PUBLIC.repeat(OP, values)
    if repeated is not None:
        return repeated
    known = PUBLIC.find(OP, values)
    if known is None:
        _check(q, kv, indices, sm_scale, topk_length, attn_sink, q_norm_eps, rope, q_order, backend)
    device = q.device
    s_q, h_q = q.shape[:2]
    result, target = prepare_output(
        OP, out, out_format, num_groups, shape=(s_q, h_q, D_V), device=device, known=known
    )
    max_logits = torch.empty((s_q, h_q), dtype=torch.float32, device=device)
    lse = torch.empty((s_q, h_q), dtype=torch.float32, device=device)
    arguments = operator_arguments(
        q,
        kv,
        indices,
        target,
        max_logits,
        lse,
        sm_scale,
        topk_length,
        attn_sink,
        q_norm_eps,
        rope,
        q_order,
        backend,
    )
    fresh = (max_logits, lse, *target.fresh)
    returned = (result, max_logits, lse)
    call_operator(
        torch.ops.mlacast.sparse_mla_prefill, OP, known, values, arguments, fresh, returned
    )
    return returned


def operator_arguments(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    target: OutputArguments,
    max_logits: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    q_norm_eps: float | None,
    rope: Rope | None,
    q_order: str,
    backend: str | None,
) -> tuple[Any, ...]:
    """Arguments of ``torch.ops.mlacast.sparse_mla_prefill`` for checked arguments of a call."""
    return (
        q,
        kv[:, 0] if kv.dim() == 3 else kv,
        indices[:, 0] if indices.dim() == 3 else indices,
        target.data,
        target.sf,
        max_logits,
        lse,
        float(sm_scale),
        topk_length,
        attn_sink,
        None if q_norm_eps is None else float(q_norm_eps),
        None if rope is None else rope.cos_sin_cache,
        None if rope is None else rope.positions,
        "interleaved" if rope is None else rope.pairing,
        q_order,
        target.out_format,
        target.scale,
        target.row_start,
        target.total_tokens,
        backend or "",
    )


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    q_norm_eps: float | None,
    rope: Rope | None,
    q_order: str,
    backend: str | None,
) -> None:
    """Check the arguments of ``sparse_mla_prefill``, those about its output apart."""
    sizes: dict[str, Any] = {}
    check_query(OP, q, "s_q h_q d_qk", sizes)
    device = q.device
    check_tensor(
        OP,
        "kv",
        kv,
        ("s_kv d_qk", "s_kv 1 d_qk"),
        sizes,
        dtype=torch.bfloat16,
        device=device,
        last_dim_contiguous=True,
    )
    check_tensor(
        OP,
        "indices",
        indices,
        ("s_q topk", "s_q 1 topk"),
        sizes,
        dtype=torch.int32,
        device=device,
        last_dim_contiguous=True,
    )
    check_sm_scale(OP, sm_scale)
    check_lengths(OP, "topk_length", topk_length, sizes, device)
    check_sink(OP, attn_sink, sizes, device)
    check_prologue(OP, q, sizes, q_norm_eps, rope, q_order)
    check_backend(OP, backend)


def required_features(
    q: torch.Tensor,
    kv: torch.Tensor,
    sm_scale: float,
    q_norm_eps: float | None,
    rope_pairing: str | None,
    q_order: str,
    attn_sink: torch.Tensor | None,
    out_format: str,
    group_features: int,
    out_data: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
) -> frozenset[str]:
    """Features that a backend needs for this call."""
    queries = query_features(q.shape[-1], q_norm_eps, rope_pairing, q_order, attn_sink is not None)
    latents = kv[:, 0] if kv.dim() == 3 else kv
    layout = layout_features((q, latents), group_features, sm_scale, codes=out_data, scales=out_sf)
    return queries | features_of(out_format) | layout


def run(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    out_data: torch.Tensor,
    out_sf: torch.Tensor | None,
    max_logits: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    q_norm_eps: float | None,
    cos_sin_cache: torch.Tensor | None,
    positions: torch.Tensor | None,
    pairing: str,
    q_order: str,
    out_format: str,
    out_scale: torch.Tensor | None,
    row_start: int,
    total_tokens: int,
    backend: str,
) -> Any:
    """Eager body of ``torch.ops.mlacast.sparse_mla_prefill``."""
    if (cos_sin_cache is None) != (positions is None):
        fail(OP, "cos_sin_cache", "come with positions", "one without the other")
    features = required_features(
        q,
        kv,
        sm_scale,
        q_norm_eps,
        None if positions is None else pairing,
        q_order,
        attn_sink,
        out_format,
        out_data.shape[2] * (2 if out_format == "nvfp4" else 1),
        out_data,
        out_sf,
    )
    impl = select(OP, features, arch_of(q.device), requested_backend(OP, backend))
    if q.shape[0] == 0:
        return None
    q, kv = plain_rows(q), plain_rows(kv)
    check_no_overlap(
        OP,
        [("out", out_data), ("out.sf", out_sf), ("max_logits", max_logits), ("lse", lse)],
        [
            ("q", q),
            ("kv", kv),
            ("indices", indices),
            ("topk_length", topk_length),
            ("attn_sink", attn_sink),
            ("rope.cos_sin_cache", cos_sin_cache),
            ("rope.positions", positions),
        ],
    )
    if value_checks.validation_requested(OP, q.device):
        value_checks.check_lengths(OP, "topk_length", topk_length, indices.shape[-1])
        value_checks.check_indices(OP, "indices", indices, topk_length, kv.shape[0])
        live = value_checks.live_rows(indices, topk_length)
        value_checks.check_positions(OP, positions, cos_sin_cache, live)
    rope = None
    if cos_sin_cache is not None and positions is not None:
        rope = Rope(cos_sin_cache, positions, pairing)
    return load(impl.target)(
        q,
        kv,
        indices,
        sm_scale=sm_scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
        q_norm_eps=q_norm_eps,
        rope=rope,
        q_order=q_order,
        out=from_arguments(out_data, out_sf, out_format, out_scale, row_start, total_tokens),
        max_logits=max_logits,
        lse=lse,
    )

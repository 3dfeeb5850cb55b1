"""``sparse_mla_decode``: sparse MLA over paged caches, from query norm to output cast."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.out_format import OutFormat
from mlacast.descriptors.rope import Rope
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.errors import fail
from mlacast.ops.known_calls import PUBLIC, call_operator
from mlacast.ops.layout import layout_features, plain_pages, plain_rows, pool_features
from mlacast.ops.output import (
    D_V,
    Output,
    OutputArguments,
    features_of,
    from_arguments,
    prepare_output,
)
from mlacast.ops.overlap import check_no_overlap
from mlacast.ops.query import decode_features, number_or_tensor, query_features
from mlacast.ops.schedule import SparseDecodeSchedule
from mlacast.ops.sparse_decode_checks import (
    check_sparse_decode,
    check_sparse_decode_values,
    check_workspace,
)
from mlacast.ops.value_checks import validation_requested

OP = "sparse_mla_decode"


def sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    kv_format: KvFormat,
    sm_scale: float | torch.Tensor,
    topk_length: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_kv_format: KvFormat | None = None,
    attn_sink: torch.Tensor | None = None,
    q_norm_eps: float | None = None,
    rope: Rope | None = None,
    q_order: str = "head",
    schedule: SparseDecodeSchedule | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    workspace: torch.Tensor | None = None,
    v_scale: float | torch.Tensor = 1.0,
    out: Output | None = None,
    out_format: OutFormat | None = None,
    num_groups: int = 1,
    backend: str | None = None,
) -> tuple[Output, torch.Tensor]:
    """Attend each query token to the cache slots that ``indices`` names; optionally quantise.

    The formula is that of ``sparse_mla_prefill``, over the dequantised slots of the main list
    followed by those of the extra list, under one softmax. Cached values are ``code * scale``,
    rounded once to bfloat16. The batch is flattened into s_q: a request with several query tokens
    has several rows.

    Args:
        q: [s_q, h_q, d_qk] bfloat16, h_q 1..128, last dimension contiguous; d_qk is that of the
            cache format. float8_e4m3fn over per-tensor FP8 caches, without norm or rotation of the
            query: its scale belongs in ``sm_scale``.
        k_cache: [num_pages, page_size, bytes] or [num_pages, page_size, 1, bytes] in ``kv_format``;
            any page_size and any page stride that holds a page. Unselected memory may hold NaN.
        indices: [s_q, topk] int32 slots (``page * page_size + offset``). topk may be 0.
        kv_format: Format of ``k_cache``; never inferred.
        sm_scale: Multiplies q.k before the softmax. The scales of a per-tensor FP8 cache and query
            belong in here. A number, or a float32 tensor of one element, read on the device.
        topk_length: [s_q] int32 or None: entries of each row that count, clamped to [0, topk].
        extra_k_cache: Second pool, or None. Comes with ``extra_indices`` and ``extra_kv_format``.
        extra_indices: [s_q, extra_topk] int32 slots of the second pool.
        extra_topk_length: [s_q] int32 or None.
        extra_kv_format: Format of the second pool.
        attn_sink: [h_q] float32 or None: joins the softmax denominator once, whatever the splits.
        q_norm_eps: Epsilon of a weightless RMSNorm of each query head, or None. Not for d_qk = 576.
        rope: Rotation of the last 64 query dimensions (and of the output, back, for d_qk = 512), or
            None.
        q_order: "head" or "chunk16".
        schedule: From ``plan_sparse_decode``, made for exactly these shapes, or None.
        num_splits: Ranges of index columns attended apart and merged; None leaves it to schedule
            and backend.
        batch_invariant: A row's chunk boundaries depend on that row and the configuration only.
        workspace: uint8 [n] scratch of at least ``workspace_size(schedule)`` bytes, from a multiple
            of 16 on, or None to allocate.
        v_scale: Multiplies the output in float32, before its rotation and cast: the scale of a
            per-tensor FP8 cache. A number or a float32 tensor of one element.
        out: Buffer to fill: a bfloat16 tensor [s_q, h_q, 512], or a QuantizedTensor of any format
            with s_q tokens.
        out_format: Format of the output; None means bfloat16, or that of ``out``.
        num_groups: Groups of the QuantizedTensor allocated when ``out`` is None.
        backend: "reference", "triton", "hopper", or None for the best that covers the call.

    Returns:
        out: ``out`` itself if given, else a bfloat16 tensor [s_q, h_q, 512] or a QuantizedTensor
            (any other format, or num_groups > 1).
        lse: [s_q, h_q] float32, natural log, without the sink. Of an e4m3 query on hopper, with
            errors of a few 1e-3: docs/ops/sparse_mla_decode.md.
        A row without valid entries gives zeros and -inf. Zero tokens give empty results.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract; nothing has been
            written.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call gives the same bits. Partials are float32 and merged in ascending
        order; norm, sink,
    rotation and cast are applied once, after the merge.

    Source: FlashMLA 9241ae3 (sparse decode with extra cache); there lse is [b, h_q, s_q] and +inf
        for an empty row.
    """
    values = (
        q,
        k_cache,
        indices,
        kv_format,
        sm_scale,
        topk_length,
        extra_k_cache,
        extra_indices,
        extra_topk_length,
        extra_kv_format,
        attn_sink,
        q_norm_eps,
        rope,
        q_order,
        schedule,
        num_splits,
        batch_invariant,
        workspace,
        v_scale,
        out,
        out_format,
        num_groups,
        backend,
    )
    repeated: tuple[Output, torch.Tensor] | None = PUBLIC.repeat(OP, values)
    if repeated is not None:
        return repeated
    known = PUBLIC.find(OP, values)
    if known is None:
        check_sparse_decode(
            q,
            k_cache,
            indices,
            kv_format,
            sm_scale,
            topk_length,
            extra_k_cache,
            extra_indices,
            extra_topk_length,
            extra_kv_format,
            attn_sink,
            q_norm_eps,
            rope,
            q_order,
            schedule,
            num_splits,
            batch_invariant,
            workspace,
            v_scale,
            backend,
        )
    if schedule is not None:
        num_splits = schedule.num_splits
        batch_invariant = batch_invariant or schedule.batch_invariant
    s_q, h_q, device = q.shape[0], q.shape[1], q.device
    result, target = prepare_output(
        OP, out, out_format, num_groups, shape=(s_q, h_q, D_V), device=device, known=known
    )
    lse = torch.empty((s_q, h_q), dtype=torch.float32, device=device)
    arguments = operator_arguments(
        q,
        k_cache,
        indices,
        target,
        lse,
        kv_format,
        sm_scale,
        topk_length,
        extra_k_cache,
        extra_indices,
        extra_topk_length,
        extra_kv_format,
        attn_sink,
        q_norm_eps,
        rope,
        q_order,
        num_splits,
        batch_invariant,
        workspace,
        v_scale,
        backend,
    )
    fresh = (lse, *target.fresh)
    returned = (result, lse)
    call_operator(
        torch.ops.mlacast.sparse_mla_decode, OP, known, values, arguments, fresh, returned
    )
    return returned


def operator_arguments(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    target: OutputArguments,
    lse: torch.Tensor,
    kv_format: KvFormat,
    sm_scale: float | torch.Tensor,
    topk_length: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    extra_kv_format: KvFormat | None,
    attn_sink: torch.Tensor | None,
    q_norm_eps: float | None,
    rope: Rope | None,
    q_order: str,
    num_splits: int | None,
    batch_invariant: bool,
    workspace: torch.Tensor | None,
    v_scale: float | torch.Tensor,
    backend: str | None,
) -> tuple[Any, ...]:
    """Arguments of ``torch.ops.mlacast.sparse_mla_decode`` for checked arguments of a call."""
    score_factor, score_tensor = number_or_tensor(sm_scale)
    value_factor, value_tensor = number_or_tensor(v_scale)
    return (
        q,
        k_cache,
        indices,
        target.data,
        target.sf,
        lse,
        kv_format.name,
        score_factor,
        topk_length,
        extra_k_cache,
        extra_indices,
        extra_topk_length,
        None if extra_kv_format is None else extra_kv_format.name,
        attn_sink,
        None if q_norm_eps is None else float(q_norm_eps),
        None if rope is None else rope.cos_sin_cache,
        None if rope is None else rope.positions,
        "interleaved" if rope is None else rope.pairing,
        q_order,
        num_splits,
        batch_invariant,
        workspace,
        value_factor,
        score_tensor,
        value_tensor,
        rope is None or rope.rotate_query,
        target.out_format,
        target.scale,
        target.row_start,
        target.total_tokens,
        backend or "",
    )


def required_features(
    q: torch.Tensor,
    kv_format: str,
    extra_kv_format: str | None,
    q_norm_eps: float | None,
    rope_pairing: str | None,
    q_order: str,
    attn_sink: torch.Tensor | None,
    out_format: str,
    group_features: int,
    k_cache: torch.Tensor,
    extra_k_cache: torch.Tensor | None = None,
    sm_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    rotates_query: bool = True,
    out_data: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
) -> frozenset[str]:
    """Features that a backend needs for this call."""
    queries = query_features(q.shape[-1], q_norm_eps, rope_pairing, q_order, attn_sink is not None)
    pools = pool_features(kv_format, extra_kv_format)
    decode = decode_features(q, sm_scale, v_scale, rotates_query)
    caches = (k_cache, extra_k_cache)
    layout = layout_features((q,), group_features, sm_scale, caches, out_data, out_sf)
    return queries | decode | pools | layout | features_of(out_format)


def run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    out_data: torch.Tensor,
    out_sf: torch.Tensor | None,
    lse: torch.Tensor,
    kv_format: str,
    sm_scale: float,
    topk_length: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    extra_kv_format: str | None,
    attn_sink: torch.Tensor | None,
    q_norm_eps: float | None,
    cos_sin_cache: torch.Tensor | None,
    positions: torch.Tensor | None,
    pairing: str,
    q_order: str,
    num_splits: int | None,
    batch_invariant: bool,
    workspace: torch.Tensor | None,
    v_scale: float,
    sm_scale_tensor: torch.Tensor | None,
    v_scale_tensor: torch.Tensor | None,
    rotate_query: bool,
    out_format: str,
    out_scale: torch.Tensor | None,
    row_start: int,
    total_tokens: int,
    backend: str,
) -> Any:
    """Eager body of ``torch.ops.mlacast.sparse_mla_decode``."""
    if (cos_sin_cache is None) != (positions is None):
        fail(OP, "cos_sin_cache", "come with positions", "one without the other")
    features = required_features(
        q,
        kv_format,
        extra_kv_format,
        q_norm_eps,
        None if positions is None else pairing,
        q_order,
        attn_sink,
        out_format,
        out_data.shape[2] * (2 if out_format == "nvfp4" else 1),
        k_cache,
        extra_k_cache,
        sm_scale if sm_scale_tensor is None else sm_scale_tensor,
        v_scale if v_scale_tensor is None else v_scale_tensor,
        rotate_query,
        out_data,
        out_sf,
    )
    impl = select(OP, features, arch_of(q.device), requested_backend(OP, backend))
    if q.shape[0] == 0:
        return None
    q, k_cache = plain_rows(q), plain_pages(k_cache)
    if extra_k_cache is not None:
        extra_k_cache = plain_pages(extra_k_cache)
    if workspace is not None:
        width = indices.shape[1] + (0 if extra_indices is None else extra_indices.shape[1])
        check_workspace(workspace, impl.planner, q, width, num_splits, batch_invariant)
    check_no_overlap(
        OP,
        [("out", out_data), ("out.sf", out_sf), ("lse", lse), ("workspace", workspace)],
        [
            ("q", q),
            ("k_cache", k_cache),
            ("indices", indices),
            ("topk_length", topk_length),
            ("extra_k_cache", extra_k_cache),
            ("extra_indices", extra_indices),
            ("extra_topk_length", extra_topk_length),
            ("attn_sink", attn_sink),
            ("sm_scale", sm_scale_tensor),
            ("v_scale", v_scale_tensor),
            ("rope.cos_sin_cache", cos_sin_cache),
            ("rope.positions", positions),
        ],
    )
    if validation_requested(OP, q.device):
        check_sparse_decode_values(
            (k_cache, indices, topk_length),
            (extra_k_cache, extra_indices, extra_topk_length),
            positions,
            cos_sin_cache,
        )
    rope = None
    if cos_sin_cache is not None and positions is not None:
        rope = Rope(cos_sin_cache, positions, pairing, rotate_query)
    options: dict[str, Any] = {}
    if "scale:value" in features:
        # Backends without the feature have no such parameter.
        options["v_scale"] = v_scale if v_scale_tensor is None else v_scale_tensor
    return load(impl.target)(
        q,
        k_cache,
        indices,
        kv_format=KvFormat.from_name(kv_format),
        sm_scale=sm_scale if sm_scale_tensor is None else sm_scale_tensor,
        topk_length=topk_length,
        extra_k_cache=extra_k_cache,
        extra_indices=extra_indices,
        extra_topk_length=extra_topk_length,
        extra_kv_format=None if extra_kv_format is None else KvFormat.from_name(extra_kv_format),
        attn_sink=attn_sink,
        q_norm_eps=q_norm_eps,
        rope=rope,
        q_order=q_order,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        workspace=workspace,
        out=from_arguments(out_data, out_sf, out_format, out_scale, row_start, total_tokens),
        lse=lse,
        **options,
    )

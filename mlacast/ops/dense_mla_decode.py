"""``dense_mla_decode``: MLA attention over every cached token of a request."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.out_format import OutFormat
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.errors import check_tensor, check_type, fail
from mlacast.ops import value_checks
from mlacast.ops.known_calls import PUBLIC, call_operator
from mlacast.ops.output import D_V, Output, features_of, from_arguments, prepare_output
from mlacast.ops.overlap import check_no_overlap
from mlacast.ops.query import (
    DECODE_QUERY_DTYPES,
    check_backend,
    check_decode_scale,
    check_fp8_query,
    check_query,
    check_sink,
    decode_features,
    number_or_tensor,
    query_features,
)

OP = "dense_mla_decode"


def dense_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormat,
    sm_scale: float | torch.Tensor,
    causal: bool = True,
    attn_sink: torch.Tensor | None = None,
    v_scale: float | torch.Tensor = 1.0,
    out: Output | None = None,
    out_format: OutFormat | None = None,
    num_groups: int = 1,
    backend: str | None = None,
) -> tuple[Output, torch.Tensor]:
    """Attend the last Q tokens of each request to its cached tokens; optionally quantise.

    With causal=True token i of Q sees positions below ``seq_len - (Q - 1 - i)`` (bottom-right
    alignment: the cache already holds the Q tokens), else all below ``seq_len``.

    Args:
        q: [B, Q, h_q, d_qk] bfloat16, h_q 1..128, d_qk that of the cache format, last dimension
            contiguous; float8_e4m3fn over a per-tensor FP8 cache, its scale in ``sm_scale``.
        k_cache: [num_pages, page_size, bytes] or [num_pages, page_size, 1, bytes] in ``kv_format``.
        page_table: [B, max_pages] int32. Pages outside the cache do not count.
        seq_lens: [B] int32, cached tokens per request; clamped to [0, max_pages * page_size].
        kv_format: Format of ``k_cache``.
        sm_scale: Multiplies q.k before the softmax. A number, or a float32 tensor of one element,
            read on the device.
        causal: Apply the causal mask above.
        attn_sink: [h_q] float32 or None: joins the softmax denominator only.
        v_scale: Multiplies the output in float32 before its cast; likewise a number or a tensor.
        out: Buffer to fill: a bfloat16 tensor [B, Q, h_q, 512] whose B * Q tokens lie at one
            stride (stride(0) = Q * stride(1)), or a QuantizedTensor with B * Q tokens.
        out_format: Format of the output; None means bfloat16, or that of ``out``.
        num_groups: Groups of the QuantizedTensor allocated when ``out`` is None.
        backend: "reference", "triton", "hopper", or None for the best that covers the call.

    Returns:
        out: ``out`` itself if given, else a bfloat16 tensor [B, Q, h_q, 512] or a QuantizedTensor
            of B * Q tokens.
        lse: [B, Q, h_q] float32, natural log, without the sink.
        A token that sees nothing gives zeros and -inf. An empty batch gives empty results.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract; nothing has been
            written.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call gives the same bits.

    Source: FlashMLA 9241ae3 (dense decode); there lse is [b, h_q, s_q] and +inf for an empty row.
    """
    values = (
        q,
        k_cache,
        page_table,
        seq_lens,
        kv_format,
        sm_scale,
        causal,
        attn_sink,
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
        _check(
            q,
            k_cache,
            page_table,
            seq_lens,
            kv_format,
            sm_scale,
            causal,
            attn_sink,
            v_scale,
            backend,
        )
    device = q.device
    batch, per_request, h_q = q.shape[:3]
    result, target = prepare_output(
        OP,
        out,
        out_format,
        num_groups,
        shape=(batch, per_request, h_q, D_V),
        device=device,
        known=known,
    )
    lse = torch.empty((batch, per_request, h_q), dtype=torch.float32, device=device)
    score_factor, score_tensor = number_or_tensor(sm_scale)
    value_factor, value_tensor = number_or_tensor(v_scale)
    arguments = (
        q,
        k_cache,
        page_table,
        seq_lens,
        target.data,
        target.sf,
        lse,
        kv_format.name,
        score_factor,
        causal,
        attn_sink,
        value_factor,
        score_tensor,
        value_tensor,
        target.out_format,
        target.scale,
        target.row_start,
        target.total_tokens,
        backend or "",
    )
    fresh = (lse, *target.fresh)
    returned = (result, lse)
    call_operator(torch.ops.mlacast.dense_mla_decode, OP, known, values, arguments, fresh, returned)
    return returned


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_format: KvFormat,
    sm_scale: float | torch.Tensor,
    causal: bool,
    attn_sink: torch.Tensor | None,
    v_scale: float | torch.Tensor,
    backend: str | None,
) -> None:
    """Check the arguments of ``dense_mla_decode``, those about its output apart."""
    sizes: dict[str, Any] = {}
    check_query(OP, q, "B Q h_q d_qk", sizes, DECODE_QUERY_DTYPES)
    device = q.device
    check_type(OP, "kv_format", kv_format, KvFormat, "a mlacast.KvFormat such as KvFormat.V4")
    if not isinstance(k_cache, torch.Tensor):
        raise TypeError(f"{OP}: k_cache must be a torch.Tensor, got {type(k_cache).__name__}")
    if k_cache.device != device:
        fail(OP, "k_cache", f"be on {device} like the other arguments", k_cache.device)
    _, _, d_qk = kv_format.check_cache(OP, "k_cache", k_cache)
    if d_qk != sizes["d_qk"]:
        fail(OP, "k_cache", f"hold rows of d_qk={sizes['d_qk']} like q", f"{d_qk} ({kv_format!r})")
    check_tensor(
        OP,
        "page_table",
        page_table,
        "B max_pages",
        sizes,
        dtype=torch.int32,
        device=device,
        last_dim_contiguous=True,
    )
    check_tensor(OP, "seq_lens", seq_lens, "B", sizes, dtype=torch.int32, device=device)
    check_fp8_query(OP, q, kv_format=kv_format)
    check_decode_scale(OP, "sm_scale", sm_scale, device)
    check_decode_scale(OP, "v_scale", v_scale, device)
    check_type(OP, "causal", causal, bool, "a bool")
    check_sink(OP, attn_sink, sizes, device)
    check_backend(OP, backend)


def required_features(
    q: torch.Tensor,
    kv_format: str,
    attn_sink: torch.Tensor | None,
    out_format: str,
    sm_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
) -> frozenset[str]:
    """Features that a backend needs for this call."""
    queries = query_features(q.shape[-1], None, None, "head", attn_sink is not None)
    decode = decode_features(q, sm_scale, v_scale)
    return queries | decode | {f"kv:{kv_format}"} | features_of(out_format)


def run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out_data: torch.Tensor,
    out_sf: torch.Tensor | None,
    lse: torch.Tensor,
    kv_format: str,
    sm_scale: float,
    causal: bool,
    attn_sink: torch.Tensor | None,
    v_scale: float,
    sm_scale_tensor: torch.Tensor | None,
    v_scale_tensor: torch.Tensor | None,
    out_format: str,
    out_scale: torch.Tensor | None,
    row_start: int,
    total_tokens: int,
    backend: str,
) -> Any:
    """Eager body of ``torch.ops.mlacast.dense_mla_decode``."""
    score = sm_scale if sm_scale_tensor is None else sm_scale_tensor
    value = v_scale if v_scale_tensor is None else v_scale_tensor
    features = required_features(q, kv_format, attn_sink, out_format, score, value)
    impl = select(OP, features, arch_of(q.device), requested_backend(OP, backend))
    if q.shape[0] * q.shape[1] == 0:
        return None
    check_no_overlap(
        OP,
        [("out", out_data), ("out.sf", out_sf), ("lse", lse)],
        [
            ("q", q),
            ("k_cache", k_cache),
            ("page_table", page_table),
            ("seq_lens", seq_lens),
            ("attn_sink", attn_sink),
            ("sm_scale", sm_scale_tensor),
            ("v_scale", v_scale_tensor),
        ],
    )
    if value_checks.validation_requested(OP, q.device):
        page_size = k_cache.shape[1]
        value_checks.check_lengths(OP, "seq_lens", seq_lens, page_table.shape[1] * page_size)
        pages_used = (seq_lens + page_size - 1) // max(page_size, 1)
        value_checks.check_indices(OP, "page_table", page_table, pages_used, k_cache.shape[0])
    return load(impl.target)(
        q,
        k_cache,
        page_table,
        seq_lens,
        kv_format=KvFormat.from_name(kv_format),
        sm_scale=score,
        v_scale=value,
        causal=causal,
        attn_sink=attn_sink,
        out=from_arguments(out_data, out_sf, out_format, out_scale, row_start, total_tokens),
        lse=lse,
    )

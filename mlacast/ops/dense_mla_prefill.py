"""``dense_mla_prefill``: attention of packed sequences before absorption, then quantise."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.out_format import OutFormat
from mlacast.descriptors.quantized_tensor import INTS
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.errors import FLOAT32_LEAST, check_count, check_finite, check_tensor, check_type, fail
from mlacast.ops import value_checks
from mlacast.ops.known_calls import PUBLIC, call_operator
from mlacast.ops.output import Output, features_of, from_arguments, prepare_output
from mlacast.ops.overlap import check_no_overlap
from mlacast.ops.query import check_backend

OP = "dense_mla_prefill"
D_QK = 192
D_V = 128


def dense_mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    out: Output | None = None,
    out_format: OutFormat | None = None,
    num_groups: int = 1,
    backend: str | None = None,
) -> tuple[Output, torch.Tensor]:
    """Attend the tokens of packed sequences to the keys of their sequence; optionally quantise.

    This is MLA with keys and values up-projected for each head, as a prefill computes it. In
    float32, for token i of the n query tokens of a sequence with m keys::

        logit_j = softmax_scale * (q_i . k_j);   lse_i = log(sum_j exp(logit_j))
        out_i   = sum_j exp(logit_j - lse_i) * v_j

    over the keys j below ``m - (n - 1 - i)`` with causal=True (the last token sees every key), else
    over all m.

    Args:
        q: [T, h, 192] bfloat16, last dimension contiguous; every row already rotated.
        k: [T_k, h_kv, 192] bfloat16, likewise. h is a multiple of h_kv, and head i of q reads head
            ``i // (h / h_kv)`` of k and v.
        v: [T_k, h_kv, 128] bfloat16, likewise: a view into wider rows will do. Values that the mask
            hides from a token of their own sequence have to be finite all the same.
        cu_seqlens_q: [B + 1] int32, contiguous, ascending from 0 to at most T: sequence b has the
            query tokens from cu_seqlens_q[b] up to cu_seqlens_q[b + 1]. Read on the device only.
        cu_seqlens_k: [B + 1] int32, likewise up to T_k. Keys past its last element are not read.
        max_seqlen_q: The most query tokens of a sequence, or more: sizes the launch. Rows beyond a
            smaller number may be left out.
        max_seqlen_k: The most keys of a sequence, or more.
        softmax_scale: Multiplies q.k; None means ``192 ** -0.5``. A model with YaRN has another.
        causal: Apply the mask above.
        out: Buffer to fill: a bfloat16 tensor [T, h, 128], or a QuantizedTensor with T tokens.
        out_format: Format of the output; None means bfloat16, or that of ``out``.
        num_groups: Groups of the QuantizedTensor allocated when ``out`` is None.
        backend: "reference", "triton", "hopper", or None for the best that covers the call.

    Returns:
        out: ``out`` itself if given, else a bfloat16 tensor [T, h, 128] or a QuantizedTensor.
        lse: [h, T] float32, natural log.
        A token that sees no key gives zeros and -inf. So does a token of no sequence, past the last
        element of ``cu_seqlens_q``: a batch padded for a CUDA graph has a defined result in every
        row. No tokens give empty results.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract; nothing has been
            written.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call gives the same bits, and those of a sequence do not depend on the
        others.

    Source: FlashAttention's ``flash_attn_varlen_func``, which does not write rows of no sequence.
    """
    values = (
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
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
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale,
            causal,
            backend,
        )
    device = q.device
    num_tokens, heads = q.shape[0], q.shape[1]
    result, target = prepare_output(
        OP, out, out_format, num_groups, shape=(num_tokens, heads, D_V), device=device, known=known
    )
    lse = torch.empty((heads, num_tokens), dtype=torch.float32, device=device)
    arguments = (
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        target.data,
        target.sf,
        lse,
        max_seqlen_q,
        max_seqlen_k,
        D_QK**-0.5 if softmax_scale is None else float(softmax_scale),
        causal,
        target.out_format,
        target.scale,
        target.row_start,
        target.total_tokens,
        backend or "",
    )
    fresh = (lse, *target.fresh)
    returned = (result, lse)
    call_operator(
        torch.ops.mlacast.dense_mla_prefill, OP, known, values, arguments, fresh, returned
    )
    return returned


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    backend: str | None,
) -> None:
    """Check the arguments of ``dense_mla_prefill``, those about its output apart."""
    sizes: dict[str, Any] = {}
    device = q.device if isinstance(q, torch.Tensor) else None
    for name, tensor, dims in (
        ("q", q, f"T h {D_QK}"),
        ("k", k, f"T_k h_kv {D_QK}"),
        ("v", v, f"T_k h_kv {D_V}"),
    ):
        check_tensor(
            OP,
            name,
            tensor,
            dims,
            sizes,
            dtype=torch.bfloat16,
            device=device,
            last_dim_contiguous=True,
        )
    if sizes["h"] < 1:
        fail(OP, "q", "have at least one head", sizes["h"])
    if sizes["h_kv"] < 1 or sizes["h"] % sizes["h_kv"]:
        fail(OP, "k", f"have a number of heads that divides h={sizes['h']}", sizes["h_kv"])
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(
            OP, name, tensor, "B+1", sizes, dtype=torch.int32, device=device, contiguous=True
        )
    if sizes["B+1"] < 1:
        fail(OP, "cu_seqlens_q", "have at least one element", sizes["B+1"])
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        check_type(OP, name, longest, INTS, "an int")
        check_count(OP, name, longest)
    if softmax_scale is not None:
        check_type(OP, "softmax_scale", softmax_scale, (int, float), "a number or None")
        check_finite(OP, "softmax_scale", softmax_scale)
    check_type(OP, "causal", causal, bool, "a bool")
    check_backend(OP, backend)


def required_features(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    out_format: str,
    group_features: int,
    out_data: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
) -> frozenset[str]:
    """Features that a backend needs for this call.

    Beside the format: rows that do not start at multiples of 16 bytes, scales that do not start at
    one of 4 (those of Nvfp4 are bytes, and stored as words), heads of a token that are 2**31
    elements apart, output groups that are not whole heads, and a score scale that does not keep
    the order of the logits, as ``layout_features`` has it.
    """
    layout = set()
    tensors = (q, k, v)
    steps = [x.stride(dim) for x in tensors for dim in (0, 1) if x.shape[dim] > 1]
    if any(x.data_ptr() % 16 for x in tensors) or any(step % 8 for step in steps):
        layout.add("rows:unaligned")
    if any(x.shape[1] > 1 and x.shape[1] * x.stride(1) >= 2**31 for x in tensors):
        layout.add("heads:far_apart")
    if out_data is not None and (
        out_data.data_ptr() % 16 or any(step % 16 for step in out_data.stride()[:-1])
    ):
        layout.add("rows:unaligned")
    if out_sf is not None and out_sf.data_ptr() % 4:
        layout.add("rows:unaligned")
    if group_features % D_V:
        layout.add("groups:partial_heads")
    if softmax_scale is not None and softmax_scale < FLOAT32_LEAST:
        layout.add("sm_scale:not_positive")
    return features_of(out_format) | layout


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    out_data: torch.Tensor,
    out_sf: torch.Tensor | None,
    lse: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out_format: str,
    out_scale: torch.Tensor | None,
    row_start: int,
    total_tokens: int,
    backend: str,
) -> Any:
    """Eager body of ``torch.ops.mlacast.dense_mla_prefill``."""
    group_features = out_data.shape[2] * (2 if out_format == "nvfp4" else 1)
    features = required_features(
        q, k, v, softmax_scale, out_format, group_features, out_data, out_sf
    )
    impl = select(OP, features, arch_of(q.device), requested_backend(OP, backend))
    if q.shape[0] == 0:
        return None
    check_no_overlap(
        OP,
        [("out", out_data), ("out.sf", out_sf), ("lse", lse)],
        [
            ("q", q),
            ("k", k),
            ("v", v),
            ("cu_seqlens_q", cu_seqlens_q),
            ("cu_seqlens_k", cu_seqlens_k),
        ],
    )
    if value_checks.validation_requested(OP, q.device):
        for name, bounds, total, longest in (
            ("q", cu_seqlens_q, q.shape[0], max_seqlen_q),
            ("k", cu_seqlens_k, k.shape[0], max_seqlen_k),
        ):
            value_checks.check_cu_seqlens(OP, f"cu_seqlens_{name}", bounds, total)
            value_checks.check_longest(OP, f"max_seqlen_{name}", longest, bounds)
    return load(impl.target)(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        out=from_arguments(out_data, out_sf, out_format, out_scale, row_start, total_tokens),
        lse=lse,
    )

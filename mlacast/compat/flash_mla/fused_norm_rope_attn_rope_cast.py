"""Query norm, RoPE, sparse attention, inverse RoPE and the FP8 cast in one call.

The query comes in the permuted order of ``permute_q_b_proj`` and the output leaves in that of
``permute_wv_proj``, so the output projection runs straight on the result: one grouped FP8 GEMM, no
cast and no transpose in between. Maths, limits and an example:
``docs/ops/fused_norm_rope_attn_rope_cast.md``.
"""

from __future__ import annotations

import torch

# Importing the module registers the ops.
from mlacast.compat.flash_mla import _fused_ops
from mlacast.compat.flash_mla._checks import (
    check_flags,
    check_integers,
    check_numbers,
    check_optional_tensors,
    check_tensors,
)
from mlacast.compat.flash_mla._fused_checks import DECODE, PREFILL
from mlacast.compat.flash_mla.placement import v41_placement
from mlacast.compat.flash_mla.weight_permutation import permute_q_b_proj, permute_wv_proj
from mlacast.errors import fail
from mlacast.ops.known_calls import PUBLIC
from mlacast.ops.signature import nobody_listens

__all__ = ["decode", "permute_q_b_proj", "permute_wv_proj", "prefill"]


def __dir__() -> list[str]:
    """List the public names: the module stands in for a namespace of functions."""
    return __all__


OutPair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Quartet = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _pair_or_nothing(out: object) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The two buffers of ``out``, None for both unless it is a pair."""
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    return None, None


def _check_out(op: str, out: object) -> None:
    """Check that ``out`` is None or two tensors."""
    if out is None:
        return
    if not isinstance(out, (tuple, list)):
        raise TypeError(
            f"{op}: out must be a pair (out_fp8, out_sf) or None, got {type(out).__name__}; "
            "that of a QuantizedTensor is (buffer.data, buffer.sf)"
        )
    if len(out) != 2:
        fail(op, "out", "be a pair (out_fp8, out_sf)", f"{len(out)} values")
    out_fp8, out_sf = out
    if (out_fp8 is None) != (out_sf is None):
        missing, present = ("out_fp8", "out_sf") if out_fp8 is None else ("out_sf", "out_fp8")
        fail(op, missing, f"be given together with {present}", None, "pass both or neither")
    check_optional_tensors(op, out_fp8=out_fp8, out_sf=out_sf)


def prefill(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: torch.Tensor,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: torch.Tensor,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: OutPair | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend un-paged rows and write the quantised input of the output projection.

    With w = h_q / n_wv_group heads per group. An entry of ``indices`` counts if its column is below
    ``topk_length`` and ``0 <= index < s_kv``; repeats count each time and rows that nothing selects
    may hold NaN.

    Args:
        enable_q_norm: Apply the weightless RMSNorm to each query head.
        rms_norm_eps: Its epsilon; not read without the norm.
        token_positions: [s_q] int32 or int64 rows of ``cos_sin_cache``, clamped to it.
        is_rope_neox_style: Rotate pairs (i, i + 32) if True, (2i, 2i + 1) if False.
        rope_dim: 64.
        cos_sin_cache: [max_pos, 64] float32, 32 cosines then 32 sines a row.
        n_wv_group: Groups of the output projection; divides h_q.
        num_per_channels: 32, output channels per scale.
        use_tma_aligned_col_major_sf: True.
        round_sf: True.
        use_packed_ue8m0: True.
        q: [s_q, h_q, 512] bfloat16, h_q a multiple of 8 up to 128, contiguous within a token,
            elements of a token at ``(d // 16) * (h_q * 16) + h * 16 + d % 16``.
        kv: [s_kv, 1, 512] bfloat16, last dimension contiguous.
        indices: [s_q, 1, topk] int32, topk may be 0.
        sm_scale: Multiplies q.k before the softmax.
        d_v: 512.
        attn_sink: [h_q] float32 or None: joins the denominator only; max_logits and lse do not see
            it.
        topk_length: [s_q] int32 or None: columns that count, clamped to [0, topk].
        out: ``(out_fp8, out_sf)`` to write, or None. out_fp8 of exactly the shape below,
            contiguous, 32-byte aligned (a token range of a longer buffer is); out_sf of exactly the
            shape below, stride(0) == 1 unless s_q == 1, stride(2) >= s_q and
            stride(1) >= size(2) * stride(2). Nothing outside the two views is written, padding of
            the scales included, and the bits are those of the allocating call.

    Returns:
        out_fp8: [s_q, n_wv_group, w*512] float8_e4m3fn. Inside a group, channel 32*c + i of head h
            is at position ``32 * (c * w + h) + i``.
        out_sf: [s_q, n_wv_group, w*4] int32, four ue8m0 bytes a word in the same order. When
            allocated here: strides (1, 4*w*a, a) with a = s_q rounded up to 4, padding zero.
        max_logits: [s_q, h_q] float32.
        lse: [s_q, h_q] float32, natural log.
        A row with nothing to attend gives zeros, max_logits -inf and lse +inf.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A flag, shape, dtype, stride, alignment or device breaks the contract; nothing
            has been written.
        UnsupportedError: No backend covers the call.
    """
    op = PREFILL
    given_fp8, given_sf = _pair_or_nothing(out)
    arguments = (
        enable_q_norm,
        rms_norm_eps,
        token_positions,
        is_rope_neox_style,
        rope_dim,
        cos_sin_cache,
        n_wv_group,
        num_per_channels,
        use_tma_aligned_col_major_sf,
        round_sf,
        use_packed_ue8m0,
        q,
        kv,
        indices,
        sm_scale,
        d_v,
        attn_sink,
        topk_length,
        given_fp8,
        given_sf,
    )
    if out is None or given_fp8 is not None:
        kept: Quartet | None = PUBLIC.repeat(op, arguments)
        if kept is not None:
            return kept
        repeated = _fused_ops.repeat_prefill(arguments) if nobody_listens() else None
        if repeated is not None:
            return repeated
    check_flags(
        op,
        enable_q_norm=enable_q_norm,
        is_rope_neox_style=is_rope_neox_style,
        use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        round_sf=round_sf,
        use_packed_ue8m0=use_packed_ue8m0,
    )
    check_numbers(op, rms_norm_eps=rms_norm_eps, sm_scale=sm_scale)
    check_integers(
        op, rope_dim=rope_dim, n_wv_group=n_wv_group, num_per_channels=num_per_channels, d_v=d_v
    )
    check_tensors(
        op,
        token_positions=token_positions,
        cos_sin_cache=cos_sin_cache,
        q=q,
        kv=kv,
        indices=indices,
    )
    check_optional_tensors(op, attn_sink=attn_sink, topk_length=topk_length)
    _check_out(op, out)
    operator = torch.ops.mlacast.fused_norm_rope_attn_rope_cast_prefill
    out_fp8, out_sf, max_logits, lse = operator(*arguments)
    if given_fp8 is not None and given_sf is not None:
        return given_fp8, given_sf, max_logits, lse
    return out_fp8, out_sf, max_logits, lse


def decode(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: torch.Tensor,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: torch.Tensor,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices_in_kvcache: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: OutPair | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend paged quantised caches and write the quantised input of the output projection.

    Requests are flattened into s_q. The format of a cache follows from its bytes per token: 584 is
    V4, 528 is V4.1 and, as the extra cache beside 528, 288 is V4.1 FP4; ``set_v41_placement`` says
    where V4.1 keeps its scales. Both caches share one softmax.

    Args:
        enable_q_norm: As in ``prefill``, like every argument that is not explained here.
        rms_norm_eps: As in ``prefill``.
        token_positions: As in ``prefill``.
        is_rope_neox_style: As in ``prefill``.
        rope_dim: 64.
        cos_sin_cache: As in ``prefill``.
        n_wv_group: As in ``prefill``.
        num_per_channels: 32.
        use_tma_aligned_col_major_sf: True.
        round_sf: True.
        use_packed_ue8m0: True.
        q: As in ``prefill``.
        k_cache: [num_pages, page_size, 1, 584 or 528] uint8, int8 or float8_e4m3fn, packed inside a
            page.
        indices_in_kvcache: [s_q, topk] int32 slots, ``page * page_size + offset``; topk may be 0.
        sm_scale: Multiplies q.k before the softmax.
        d_v: 512.
        attn_sink: As in ``prefill``.
        topk_length: [s_q] int32 or None, per row and not per request.
        extra_k_cache: [pages, page size, 1, bytes] or None: the format of ``k_cache``, or 288
            beside 528 bytes.
        extra_indices_in_kvcache: [s_q, extra_topk] int32; given exactly when ``extra_k_cache`` is.
        extra_topk_length: [s_q] int32 or None.
        out: As in ``prefill``.

    Returns:
        out_fp8, out_sf and lse as in ``prefill``.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A flag, shape, dtype, stride, alignment, device or format breaks the contract;
            nothing has been written.
        UnsupportedError: No backend covers the call.
    """
    op = DECODE
    given_fp8, given_sf = _pair_or_nothing(out)
    arguments = (
        enable_q_norm,
        rms_norm_eps,
        token_positions,
        is_rope_neox_style,
        rope_dim,
        cos_sin_cache,
        n_wv_group,
        num_per_channels,
        use_tma_aligned_col_major_sf,
        round_sf,
        use_packed_ue8m0,
        q,
        k_cache,
        indices_in_kvcache,
        sm_scale,
        d_v,
        attn_sink,
        topk_length,
        extra_k_cache,
        extra_indices_in_kvcache,
        extra_topk_length,
        v41_placement(),
        given_fp8,
        given_sf,
    )
    if out is None or given_fp8 is not None:
        kept: Triple | None = PUBLIC.repeat(op, (*arguments, v41_placement()))
        if kept is not None:
            return kept
        repeated = _fused_ops.repeat_decode(arguments) if nobody_listens() else None
        if repeated is not None:
            return repeated
    check_flags(
        op,
        enable_q_norm=enable_q_norm,
        is_rope_neox_style=is_rope_neox_style,
        use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        round_sf=round_sf,
        use_packed_ue8m0=use_packed_ue8m0,
    )
    check_numbers(op, rms_norm_eps=rms_norm_eps, sm_scale=sm_scale)
    check_integers(
        op, rope_dim=rope_dim, n_wv_group=n_wv_group, num_per_channels=num_per_channels, d_v=d_v
    )
    check_tensors(
        op,
        token_positions=token_positions,
        cos_sin_cache=cos_sin_cache,
        q=q,
        k_cache=k_cache,
        indices_in_kvcache=indices_in_kvcache,
    )
    check_optional_tensors(
        op,
        attn_sink=attn_sink,
        topk_length=topk_length,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length,
    )
    _check_out(op, out)
    operator = torch.ops.mlacast.fused_norm_rope_attn_rope_cast_decode
    out_fp8, out_sf, lse = operator(*arguments)
    if given_fp8 is not None and given_sf is not None:
        return given_fp8, given_sf, lse
    return out_fp8, out_sf, lse

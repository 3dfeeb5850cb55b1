"""The contract of the fused functions, checked in one place for the real and the fake kernels.

Every rule about flags, shapes, dtypes, strides and devices is here. The checks run before the first
write, also when an op of ``torch.ops.mlacast`` is called directly and while a graph is traced. Only
alignment and overlap of the caller's buffers need addresses, so the real kernels alone check them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from mlacast.compat.flash_mla._checks import (
    MAX_HEADS,
    check_d_v,
    check_extra_arguments,
    check_indices,
    check_lengths,
    check_scale,
    check_sink,
)
from mlacast.compat.flash_mla._fused_calls import D_QK, DecodeCall, FusedCall, PrefillCall
from mlacast.compat.flash_mla.placement import (
    infer_extra_kv_format,
    infer_kv_format,
    v41_placement,
)
from mlacast.descriptors.kv_format import KvFormat
from mlacast.errors import check_choice, check_finite, check_tensor, fail
from mlacast.ops.overlap import check_no_overlap

PREFILL = "fused_norm_rope_attn_rope_cast.prefill"
DECODE = "fused_norm_rope_attn_rope_cast.decode"

_CORE_OPS = {PREFILL: "mlacast.sparse_mla_prefill", DECODE: "mlacast.sparse_mla_decode"}
_D_ROPE = 64
_SF_GROUP = 32
_CHANNELS_PER_WORD = 4 * _SF_GROUP
_ALIGNMENT_BYTES = 32


def _check_flags(op: str, call: FusedCall, d_v: int) -> None:
    remedy = f"{_CORE_OPS[op]} writes other formats with out_format= and rotates with rope="
    if call.num_per_channels != _SF_GROUP:
        fail(op, "num_per_channels", f"be {_SF_GROUP}", call.num_per_channels, remedy)
    for name in ("use_tma_aligned_col_major_sf", "round_sf", "use_packed_ue8m0"):
        if not getattr(call, name):
            fail(op, name, "be True", getattr(call, name), remedy)
    if call.rope_dim != _D_ROPE:
        fail(op, "rope_dim", f"be {_D_ROPE}", call.rope_dim, remedy)
    check_d_v(op, "d_v", d_v, remedy)


def _check_query(op: str, call: FusedCall, sizes: dict[str, Any]) -> None:
    """Check the query, its norm and its rotation; binds s_q and h_q."""
    q = call.q
    check_tensor(
        op, "q", q, f"s_q h_q {D_QK}", sizes, dtype=torch.bfloat16, last_dim_contiguous=True
    )
    h_q = q.shape[1]
    if h_q < 8 or h_q % 8 or h_q > MAX_HEADS:
        requirement = f"have a multiple of 8 from 8 to {MAX_HEADS} as its number of heads"
        fail(op, "q", requirement, h_q, f"{_CORE_OPS[op]} takes any number from 1")
    if q.numel() > 0 and q.stride(1) != D_QK:
        remedy = "the permuted order runs over all heads of a token"
        fail(op, "q", "be contiguous within a token", f"strides {list(q.stride())}", remedy)
    if call.n_wv_group < 1 or h_q % call.n_wv_group:
        fail(op, "n_wv_group", f"be positive and divide h_q={h_q}", call.n_wv_group)
    if call.enable_q_norm:
        check_finite(op, "rms_norm_eps", call.rms_norm_eps, signed=False)
    check_tensor(
        op,
        "token_positions",
        call.token_positions,
        "s_q",
        sizes,
        dtype=(torch.int32, torch.int64),
        device=q.device,
    )
    check_tensor(
        op,
        "cos_sin_cache",
        call.cos_sin_cache,
        f"max_pos {_D_ROPE}",
        sizes,
        dtype=torch.float32,
        device=q.device,
        last_dim_contiguous=True,
        remedy="a row is 32 cosines then 32 sines",
    )
    if call.cos_sin_cache.shape[0] < 1:
        fail(op, "cos_sin_cache", "have at least one row", 0)


def _check_output_pair(
    op: str, call: FusedCall, out_fp8: torch.Tensor | None, out_sf: torch.Tensor | None
) -> None:
    """Check the caller's buffers: what writing them needs, nothing that only a consumer needs."""
    if out_fp8 is None and out_sf is None:
        return
    if out_fp8 is None:
        fail(op, "out_fp8", "be given together with out_sf", None)
    if out_sf is None:
        fail(op, "out_sf", "be given together with out_fp8", None)
    sizes: dict[str, Any] = {
        "s_q": call.q.shape[0],
        "n_wv_group": call.n_wv_group,
        "w*512": call.group_width,
        "w*4": call.group_width // _CHANNELS_PER_WORD,
    }
    check_tensor(
        op,
        "out_fp8",
        out_fp8,
        "s_q n_wv_group w*512",
        sizes,
        dtype=torch.float8_e4m3fn,
        device=call.q.device,
        contiguous=True,
    )
    check_tensor(
        op,
        "out_sf",
        out_sf,
        "s_q n_wv_group w*4",
        sizes,
        dtype=torch.int32,
        device=call.q.device,
        remedy="a word holds four scale bytes",
    )
    _check_sf_strides(op, out_sf)


def _check_sf_strides(op: str, out_sf: torch.Tensor) -> None:
    s_q, groups, words = out_sf.shape
    if s_q == 0:
        return
    token_stride, group_stride, word_stride = out_sf.stride()
    actual = f"strides [{token_stride}, {group_stride}, {word_stride}]"
    # The stride of a dimension of size 1 addresses nothing.
    if s_q > 1 and token_stride != 1:
        fail(op, "out_sf", f"have stride(0) == 1 with s_q={s_q}", actual, "scales are MN-major")
    if word_stride < s_q:
        remedy = "the words of a group overlap"
        fail(op, "out_sf", f"have stride(2) >= s_q with s_q={s_q}", actual, remedy)
    if groups > 1 and group_stride < words * word_stride:
        requirement = f"have stride(1) >= size(2) * stride(2) = {words * word_stride}"
        fail(op, "out_sf", requirement, actual, "the groups overlap")


def check_memory(op: str, call: PrefillCall | DecodeCall) -> None:
    """Raise ValueError unless the caller's buffers are aligned and apart from all other tensors.

    Needs real tensors.
    """
    out_fp8 = call.out_fp8
    if out_fp8 is None or out_fp8.numel() == 0:
        return
    tensors = [
        (field.name, getattr(call, field.name))
        for field in fields(call)
        if isinstance(getattr(call, field.name), torch.Tensor)
    ]
    outputs = [entry for entry in tensors if entry[0] in ("out_fp8", "out_sf")]
    check_no_overlap(
        op, outputs, [entry for entry in tensors if entry[0] not in ("out_fp8", "out_sf")]
    )
    excess = out_fp8.data_ptr() % _ALIGNMENT_BYTES
    if excess:
        fail(
            op,
            "out_fp8",
            f"start at a multiple of {_ALIGNMENT_BYTES} bytes",
            f"an address {excess} bytes past one",
            "a token range of an aligned buffer always does",
        )


def check_prefill(call: PrefillCall) -> None:
    """Raise the error of the first rule of the fused prefill that the call breaks."""
    op = PREFILL
    sizes: dict[str, Any] = {}
    _check_flags(op, call, call.d_v)
    _check_query(op, call, sizes)
    device = call.q.device
    check_tensor(
        op,
        "kv",
        call.kv,
        f"s_kv 1 {D_QK}",
        sizes,
        dtype=torch.bfloat16,
        device=device,
        last_dim_contiguous=True,
    )
    check_indices(op, "indices", call.indices, "s_q 1 topk", sizes, device)
    check_scale(op, "sm_scale", call.sm_scale)
    check_sink(op, call.attn_sink, sizes, device)
    check_lengths(op, "topk_length", call.topk_length, "s_q", sizes, device)
    _check_output_pair(op, call, call.out_fp8, call.out_sf)


def check_decode(call: DecodeCall) -> tuple[KvFormat, KvFormat | None]:
    """Raise the error of the first rule of the fused decode that the call breaks.

    Returns:
        The format of the cache and that of the extra cache, None without one.
    """
    op = DECODE
    sizes: dict[str, Any] = {}
    _check_flags(op, call, call.d_v)
    _check_query(op, call, sizes)
    device = call.q.device
    placement = v41_placement() if call.v41_placement is None else call.v41_placement
    check_choice(op, "v41_placement", placement, ("footer", "inline"))
    kv_format = infer_kv_format(op, "k_cache", call.k_cache, D_QK, placement, device)
    check_indices(op, "indices_in_kvcache", call.indices_in_kvcache, "s_q topk", sizes, device)
    check_scale(op, "sm_scale", call.sm_scale)
    check_sink(op, call.attn_sink, sizes, device)
    check_lengths(op, "topk_length", call.topk_length, "s_q", sizes, device)
    check_extra_arguments(
        op, call.extra_k_cache, call.extra_indices_in_kvcache, call.extra_topk_length
    )
    extra_format = None
    if call.extra_k_cache is not None and call.extra_indices_in_kvcache is not None:
        extra_format = infer_extra_kv_format(
            op, "extra_k_cache", call.extra_k_cache, kv_format, placement, device
        )
        name = "extra_indices_in_kvcache"
        check_indices(op, name, call.extra_indices_in_kvcache, "s_q extra_topk", sizes, device)
        check_lengths(op, "extra_topk_length", call.extra_topk_length, "s_q", sizes, device)
    _check_output_pair(op, call, call.out_fp8, call.out_sf)
    return kv_format, extra_format

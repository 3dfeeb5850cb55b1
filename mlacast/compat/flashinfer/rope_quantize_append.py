"""``rope_quantize_fp8_append_paged_kv_cache`` with FlashInfer's signature."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlacast.compat._rope_quantize import (
    check_float_inputs,
    check_host_scales,
    check_integers,
    check_table,
    output_dtype,
)
from mlacast.compat.flashinfer.rope_quantize import INPUT_DTYPES
from mlacast.errors import check_tensor, check_type, dtype_name, fail
from mlacast.ops.repeatable import repeatable
from mlacast.ops.rope_quantize_fp8 import FP8_DTYPES
from mlacast.ops.rope_quantize_fp8_append import rope_quantize_fp8_append

_OP = "rope_quantize_fp8_append_paged_kv_cache"
_LAYOUTS = ("NHD", "HND")


@repeatable("flashinfer.rope_quantize_fp8_append_paged_kv_cache")
def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: Sequence[torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `rope_quantize_fp8` does; keys and values go to their pages in the same launch.

    Token i goes to entry ``p % page_size`` of page ``kv_indices[kv_indptr[b] + p // page_size]``
    with ``b = batch_indices[i]`` and ``p = positions[i]``. A negative b leaves the token out: its
    rows of the query outputs are not written either. A token outside the tables or the cache writes
    no key and no value. No two tokens of a call may have the same place.

    Args:
        q_rope: [n, h_q, r] bfloat16 or float16, the dtype of all inputs; last dimension contiguous
            here and below.
        k_rope: [n, r] (MLA) or [n, h_kv, r].
        q_nope: [n, h_q, d] or None.
        k_nope: [n, d] or [n, h_kv, d], or None.
        v: [n, h_kv, d_v]; None for MLA.
        cos_sin_cache: [max_pos, r] float32, contiguous, r / 2 cosines then r / 2 sines.
        pos_ids: [n] int32 or int64, contiguous, rows of the table; clamped to it.
        paged_kv_cache: MLA: (ckv [pages, page_size, d], kpe [pages, page_size, r]). Otherwise (k,
            v): [pages, page_size, h_kv, .] for "NHD", [pages, h_kv, page_size, .] for "HND"; a row
            of k is the r rotated dimensions, then the d others.
        kv_indices: [entries] int32 or int64, pages of all requests in turn.
        kv_indptr: [B + 1], where each request starts in ``kv_indices``.
        batch_indices: [n], request of each token.
        positions: [n], place of each token in its request.
        is_neox: True pairs (i, i + r/2), False pairs (2i, 2i + 1).
        quantize_dtype: torch.float8_e4m3fn or torch.float8_e5m2; None for the dtype of the first
            given output, else e4m3. The caches have it.
        quant_scale_q: Multiplies the query before the cast.
        quant_scale_kv: Multiplies keys and values.
        page_size: Tokens of a page, as in the shape of the caches.
        kv_layout: "NHD" or "HND"; the caches of MLA have no head axis and look the same.
        q_rope_out: FP8 tensor like ``q_rope``, or None.
        q_nope_out: Like ``q_nope``, or None.
        enable_pdl: A hint for launches, without effect.

    Returns:
        (q_rope_out, q_nope_out), the given objects or new tensors.

    Raises:
        KeyError: ``kv_layout`` is no layout.
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride or device breaks the contract; nothing has been written.
        UnsupportedError: No backend of mlacast covers the call.
    """
    check_table(_OP, cos_sin_cache, (torch.float32,))
    inputs = {"q_rope": q_rope, "k_rope": k_rope, "q_nope": q_nope, "k_nope": k_nope}
    check_float_inputs(_OP, {**inputs, "v": v}, INPUT_DTYPES)
    if kv_layout not in _LAYOUTS:
        raise KeyError(f"{_OP}: kv_layout must be 'NHD' or 'HND', got {kv_layout!r}")
    check_integers(_OP, "pos_ids", pos_ids)
    tables = {
        "kv_indices": kv_indices,
        "kv_indptr": kv_indptr,
        "batch_indices": batch_indices,
        "positions": positions,
    }
    for name, table in tables.items():
        check_integers(_OP, name, table)
    check_host_scales(_OP, quant_scale_q=quant_scale_q, quant_scale_kv=quant_scale_kv)
    check_type(_OP, "is_neox", is_neox, bool, "a bool")
    dtype = output_dtype(_OP, quantize_dtype, (q_rope_out, q_nope_out), FP8_DTYPES)
    check_type(_OP, "q_rope", q_rope, torch.Tensor, "a torch.Tensor")
    check_type(_OP, "k_rope", k_rope, torch.Tensor, "a torch.Tensor")
    k_rope_cache, k_nope_cache, v_cache = _cache_parts(
        paged_kv_cache, k_rope, v, dtype, page_size, kv_layout
    )
    return rope_quantize_fp8_append(
        _OP,
        (q_rope, k_rope, q_nope, k_nope),
        v,
        cos_sin_cache,
        pos_ids,
        k_rope_cache=k_rope_cache,
        k_nope_cache=k_nope_cache,
        v_cache=v_cache,
        page_table=list(tables.values()),
        pairing="half" if is_neox else "interleaved",
        q_scale=quant_scale_q,
        kv_scale=quant_scale_kv,
        q_rope_out=q_rope_out,
        q_nope_out=q_nope_out,
    )


def _cache_parts(
    paged_kv_cache: Sequence[torch.Tensor],
    k_rope: torch.Tensor,
    v: torch.Tensor | None,
    dtype: torch.dtype,
    page_size: int,
    kv_layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the caches of rotated keys, other keys and values as [pages, page_size, h_kv, .]."""
    check_type(_OP, "paged_kv_cache", paged_kv_cache, (tuple, list), "a tuple of two tensors")
    check_type(_OP, "page_size", page_size, int, "an int")
    if len(paged_kv_cache) != 2:
        fail(_OP, "paged_kv_cache", "have two tensors", len(paged_kv_cache))
    is_mla = k_rope.dim() == 2
    if is_mla and v is not None:
        fail(_OP, "v", "be None for k_rope [n, r], whose cache has no values", "a tensor")
    if not is_mla and v is None:
        fail(_OP, "v", "be given for k_rope [n, h_kv, r]", None)
    if is_mla:
        dims = "num_pages page_size width"
    else:
        order = "page_size h_kv" if kv_layout == "NHD" else "h_kv page_size"
        dims = f"num_pages {order} width"
    for number, cache in enumerate(paged_kv_cache):
        name = f"paged_kv_cache[{number}]"
        sizes = {"page_size": page_size}
        check_tensor(_OP, name, cache, dims, sizes, last_dim_contiguous=True)
        if cache.dtype != dtype:
            wanted = f"have dtype {dtype_name(dtype)} like the outputs"
            fail(_OP, name, wanted, dtype_name(cache.dtype))
    first, second = paged_kv_cache
    if is_mla:
        return second.unsqueeze(2), first.unsqueeze(2), None
    if kv_layout == "HND":
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    width = k_rope.shape[-1]
    return first[..., :width], first[..., width:], second

"""``rope_quantize_fp8`` whose keys and values go to the pages of a cache, in the same launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlacast.errors import check_tensor, fail
from mlacast.ops.known_calls import PUBLIC, call_operator
from mlacast.ops.overlap import check_apart
from mlacast.ops.rope_quantize_fp8 import (
    Inputs,
    check_inputs,
    check_options,
    check_row_tensor,
    prepare_output,
    sources_of,
)

_INDEX_DTYPES = (torch.int32, torch.int64)


def rope_quantize_fp8_append(
    op: str,
    inputs: Inputs,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    *,
    k_rope_cache: torch.Tensor,
    k_nope_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    page_table: Sequence[torch.Tensor],
    pairing: str,
    q_scale: float,
    kv_scale: float,
    q_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate, scale and cast queries and keys, and write keys and values into paged caches.

    A token whose request is negative is left out: no part of it is written. A token whose place
    lies outside the tables or the cache writes no key and no value. Two tokens of a call must not
    have the same place.

    Args:
        op: Name that opens a message; arguments are named as in FlashInfer's function.
        inputs: q_rope, k_rope, q_nope, k_nope as in ``mlacast.rope_quantize_fp8``.
        v: [n, h_kv, d_v] or None.
        cos_sin_cache: As there.
        positions: As there: rows of the table, not places in the cache.
        k_rope_cache: [num_pages, page_size, h_kv, r] in an FP8 dtype, the dtype of every output;
            any strides but 1 on the last dimension.
        k_nope_cache: [num_pages, page_size, h_kv, d_k].
        v_cache: [num_pages, page_size, h_kv, d_v], None with ``v``.
        page_table: Four contiguous int32 or int64 tensors: the pages of all requests in turn, where
            each request starts among them [B + 1], the request of each token [n], and its place in
            that request [n].
        pairing: As there.
        q_scale: As there.
        kv_scale: Multiplies keys and values before the cast.
        q_rope_out: As there.
        q_nope_out: As there.
        backend: As there.

    Returns:
        (q_rope_out, q_nope_out); the caches are written in place.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride or device breaks the contract; nothing has been written.
        UnsupportedError: No (or not the named) backend covers the call.
    """
    values = (
        *inputs,
        v,
        cos_sin_cache,
        positions,
        k_rope_cache,
        k_nope_cache,
        v_cache,
        *page_table,
        pairing,
        q_scale,
        kv_scale,
        q_rope_out,
        q_nope_out,
        backend,
    )
    repeated: tuple[torch.Tensor, torch.Tensor] | None = PUBLIC.repeat(op, values)
    if repeated is not None:
        return repeated
    known = PUBLIC.find(op, values)
    dtype = k_rope_cache.dtype
    if known is None:
        _check(
            op,
            inputs,
            v,
            cos_sin_cache,
            positions,
            k_rope_cache,
            k_nope_cache,
            v_cache,
            page_table,
            pairing,
            q_scale,
            kv_scale,
            backend,
        )
    sources = sources_of(inputs)
    q_rope, q_nope = sources[0], sources[2]
    keys = [part if part.dim() == 3 else part.unsqueeze(1) for part in (sources[1], sources[3])]
    queries = (("q_rope_out", q_rope_out, q_rope), ("q_nope_out", q_nope_out, q_nope))
    outputs = [prepare_output(op, name, out, source, dtype) for name, out, source in queries]
    arguments = (
        q_rope,
        keys[0],
        q_nope,
        keys[1],
        v,
        cos_sin_cache,
        positions,
        outputs[0],
        k_rope_cache,
        outputs[1],
        k_nope_cache,
        v_cache,
        list(page_table),
        pairing,
        q_scale,
        kv_scale,
        backend or "",
    )
    fresh = [new for new, given in zip(outputs, values[-3:-1], strict=True) if given is None]
    returned = (outputs[0], outputs[1])
    operator = torch.ops.mlacast.rope_quantize_fp8
    call_operator(operator, op, known, values, arguments, fresh, returned, "rope_quantize_fp8")
    return returned


def _check(
    op: str,
    inputs: Inputs,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    k_rope_cache: torch.Tensor,
    k_nope_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    page_table: Sequence[torch.Tensor],
    pairing: str,
    q_scale: float,
    kv_scale: float,
    backend: str | None,
) -> None:
    """Check the arguments of ``rope_quantize_fp8_append``, those about its outputs apart."""
    sources = check_inputs(op, inputs, cos_sin_cache, positions, "pos_ids")
    q_rope = sources[0]
    device = q_rope.device
    keys = [part if part.dim() == 3 else part.unsqueeze(1) for part in (sources[1], sources[3])]
    if (v is None) != (v_cache is None):
        fail(op, "v", "be given together with its cache", "one of the two")
    sizes = {"n": q_rope.shape[0], "h_kv": keys[0].shape[1]}
    if v is not None:
        check_tensor(op, "v", v, "n h_kv d_v", sizes)
        check_row_tensor(op, "v", v, q_rope.dtype, device)
    caches = {"k_rope": (keys[0], k_rope_cache), "k_nope": (keys[1], k_nope_cache)}
    if v is not None and v_cache is not None:
        caches["v"] = (v, v_cache)
    dtype = k_rope_cache.dtype
    pages: dict[str, int] = {}
    for name, (part, cache) in caches.items():
        dims = f"num_pages page_size {part.shape[1]} {part.shape[2]}"
        argument = f"paged_kv_cache (its {name} part)"
        check_tensor(
            op, argument, cache, dims, pages, dtype=dtype, device=device, last_dim_contiguous=True
        )
        check_apart(op, argument, cache)
    scales = {"quant_scale_q": q_scale, "quant_scale_kv": kv_scale}
    check_options(op, pairing, dtype, scales, backend)
    names = ("kv_indices", "kv_indptr", "batch_indices", "positions")
    for name, table, dims in zip(names, page_table, ("entries", "starts", "n", "n"), strict=True):
        check_tensor(
            op, name, table, dims, sizes, dtype=_INDEX_DTYPES, device=device, contiguous=True
        )
    if page_table[1].shape[0] < 1:
        fail(op, "kv_indptr", "have at least one element", "shape [0]")

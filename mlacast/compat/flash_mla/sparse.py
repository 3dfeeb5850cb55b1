"""``flash_mla_sparse_fwd``: sparse attention over un-paged bfloat16 rows, bfloat16 output."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.compat.flash_mla._checks import (
    D_V,
    check_bf16_out,
    check_d_v,
    check_indices,
    check_integers,
    check_lengths,
    check_numbers,
    check_optional_tensors,
    check_query,
    check_scale,
    check_sink,
    check_tensors,
)
from mlacast.compat.flash_mla._empty_rows import mark_empty_rows_
from mlacast.errors import check_tensor
from mlacast.ops.known_calls import PUBLIC, recorded
from mlacast.ops.sparse_mla_prefill import sparse_mla_prefill

OP = "flash_mla_sparse_fwd"


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend each query token to the rows of ``kv`` that ``indices`` names.

    An entry counts if its column is below ``topk_length`` and ``0 <= index < s_kv``; repeats count
    each time and rows that nothing selects may hold NaN. Natural element order, no norm, no RoPE.

    Args:
        q: [s_q, h_q, d_qk] bfloat16, h_q 1..128, d_qk 512 or 576, last dimension contiguous.
        kv: [s_kv, 1, d_qk] bfloat16, last dimension contiguous.
        indices: [s_q, 1, topk] int32; topk may be 0.
        sm_scale: Multiplies q.k before the softmax.
        d_v: 512.
        attn_sink: [h_q] float32 or None: joins the denominator only (-inf no effect, +inf zeros);
            max_logits and lse do not see it.
        topk_length: [s_q] int32 or None: columns that count, clamped to [0, topk].
        out: [s_q, h_q, 512] bfloat16 to write, last dimension contiguous, or None.

    Returns:
        out: ``out`` itself if given, else a new tensor of that shape.
        max_logits: [s_q, h_q] float32, scaled.
        lse: [s_q, h_q] float32, natural log.
        A row with nothing to attend gives zeros, max_logits -inf and lse +inf.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride or device breaks the contract; nothing has been written.
        UnsupportedError: No backend covers the call.
    """
    values = (q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out)
    repeated: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = PUBLIC.repeat(OP, values)
    if repeated is not None:
        return repeated
    known = PUBLIC.check_once(OP, _check, values)
    with recorded() as calls:
        result, max_logits, lse = sparse_mla_prefill(
            q,
            kv,
            indices,
            sm_scale=sm_scale,
            topk_length=topk_length,
            attn_sink=attn_sink,
            out=out,
        )
    assert isinstance(result, torch.Tensor), "a bfloat16 call returns a tensor"
    returned = (result, max_logits, mark_empty_rows_(lse))
    PUBLIC.keep(OP, values, known, calls, returned, [(mark_empty_rows_, lse)])
    return returned


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Check the arguments of ``flash_mla_sparse_fwd``."""
    check_tensors(OP, q=q, kv=kv, indices=indices)
    check_optional_tensors(OP, attn_sink=attn_sink, topk_length=topk_length, out=out)
    check_numbers(OP, sm_scale=sm_scale)
    check_integers(OP, d_v=d_v)
    check_d_v(OP, "d_v", d_v)
    sizes: dict[str, Any] = {}
    check_query(OP, q, "s_q h_q d_qk", sizes)
    device = q.device
    check_tensor(
        OP,
        "kv",
        kv,
        "s_kv 1 d_qk",
        sizes,
        dtype=torch.bfloat16,
        device=device,
        last_dim_contiguous=True,
    )
    check_indices(OP, "indices", indices, "s_q 1 topk", sizes, device)
    check_scale(OP, "sm_scale", sm_scale)
    check_sink(OP, attn_sink, sizes, device)
    check_lengths(OP, "topk_length", topk_length, "s_q", sizes, device)
    check_bf16_out(OP, out, f"s_q h_q {D_V}", sizes, device)

"""Reference of ``sparse_mla_prefill``: the specification every backend is checked against."""

from __future__ import annotations

import torch

from mlacast.descriptors.rope import Rope
from mlacast.reference.attention import D_V, attend
from mlacast.reference.epilogue import epilogue
from mlacast.reference.prologue import prologue


def valid_entries(indices: torch.Tensor, length: int, num_rows: int) -> torch.Tensor:
    """Keep the entries of one index row that count, in order, as int64.

    Args:
        indices: [topk] integers.
        length: Entries at or past this column are ignored; clamped to [0, topk].
        num_rows: Entries outside [0, num_rows) are ignored.

    Returns:
        [n] int64, n <= topk. Repeats stay.
    """
    kept = indices[: max(length, 0)].long()
    return kept[(kept >= 0) & (kept < num_rows)]


def row_lengths(topk_length: torch.Tensor | None, num_tokens: int, topk: int) -> list[int]:
    """Lengths of all rows as Python numbers; ``topk`` where no lengths are given."""
    return (
        [topk] * num_tokens
        if topk_length is None
        else [int(length) for length in topk_length.tolist()]
    )


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
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend each token to the rows of ``kv`` that its indices name, one token at a time.

    Only rows that count are ever read, so what other memory holds cannot matter, and a token's
    result does not depend on the tokens beside it.

    Args:
        q: [s_q, h_q, d_qk], d_qk 512 or 576.
        kv: [s_kv, d_qk] or [s_kv, 1, d_qk].
        indices: [s_q, topk] or [s_q, 1, topk] integers.
        sm_scale: Multiplies q.k.
        topk_length: [s_q] or None.
        attn_sink: [h_q] or None.
        q_norm_eps: Epsilon of the weightless query norm, or None.
        rope: Rotation of the query, and for d_qk = 512 back-rotation of the output.
        q_order: "head" or "chunk16".
        compute_dtype: torch.float32, or torch.float64 on request.

    Returns:
        out [s_q, h_q, 512] in ``compute_dtype`` before any quantisation, max_logits and lse [s_q,
        h_q].
        A row with nothing to attend: zeros, -inf, -inf.
    """
    if kv.dim() == 3:
        kv = kv[:, 0]
    if indices.dim() == 3:
        indices = indices[:, 0]
    num_tokens, heads, d_qk = q.shape
    values, norm = prologue(
        q, q_norm_eps=q_norm_eps, rope=rope, q_order=q_order, compute_dtype=compute_dtype
    )
    out = torch.zeros((num_tokens, heads, D_V), dtype=compute_dtype, device=q.device)
    max_logits = torch.full((num_tokens, heads), -torch.inf, dtype=compute_dtype, device=q.device)
    lse = max_logits.clone()
    for token, length in enumerate(row_lengths(topk_length, num_tokens, indices.shape[1])):
        rows = kv[valid_entries(indices[token], length, kv.shape[0])]
        state = attend(values[token], rows, norm[token] * sm_scale)
        out[token], max_logits[token], lse[token] = state
    out = epilogue(out, lse, attn_sink=attn_sink, rope=rope if d_qk == D_V else None)
    return out, max_logits, lse

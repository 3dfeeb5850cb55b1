"""Reference of ``sparse_mla_decode``: paged caches, two pools under one softmax, split-KV."""

from __future__ import annotations

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.rope import Rope
from mlacast.reference.attention import D_V, AttentionState, attend, merge_states
from mlacast.reference.epilogue import epilogue
from mlacast.reference.prologue import prologue
from mlacast.reference.sparse_mla_prefill import row_lengths, valid_entries


def combine_splits(
    partial_out: torch.Tensor, partial_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the float32 partials of split-KV attention in ascending order of the splits.

    The sink, the inverse RoPE and the quantisation come after this merge, never before it: a
    quantised partial cannot be merged, and a sink must enter the denominator once.

    Args:
        partial_out: [num_splits, ..., d_v], normalised per split.
        partial_lse: [num_splits, ...], natural log; -inf or +inf marks an empty split, whose output
            is not read.

    Returns:
        out [..., d_v] and lse [...]; zeros and -inf where every split is empty.
    """
    return merge_states(list(partial_out.unbind(0)), list(partial_lse.unbind(0)))


def _attend_in_splits(
    q: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    score_scale: torch.Tensor,
    width: int,
    num_splits: int,
) -> AttentionState:
    """Attend in ``num_splits`` equal ranges of index columns and merge."""
    # More splits than columns only add empty ones, which change nothing.
    num_splits = min(num_splits, width)
    if num_splits <= 1:
        return attend(q, rows, score_scale)
    per_split = -(-width // num_splits)
    states = []
    for split in range(num_splits):
        inside = (columns >= split * per_split) & (columns < (split + 1) * per_split)
        states.append(attend(q, rows[inside], score_scale))
    out, lse = combine_splits(
        torch.stack([s.out for s in states]), torch.stack([s.lse for s in states])
    )
    return AttentionState(out, torch.stack([s.max_logits for s in states]).amax(0), lse)


def sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    kv_format: KvFormat,
    sm_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor = 1.0,
    topk_length: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_kv_format: KvFormat | None = None,
    attn_sink: torch.Tensor | None = None,
    q_norm_eps: float | None = None,
    rope: Rope | None = None,
    q_order: str = "head",
    num_splits: int | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each token to the cache slots that its indices name.

    Entries of the main list come first, then those of the extra list, under one softmax. Cached
    values are dequantised to bfloat16 (``code * scale`` rounded once) before they are used.

    Args:
        q: [s_q, h_q, d_qk]; e4m3 codes count as they stand, their scale belongs in ``sm_scale``.
        k_cache: [num_pages, page_size, (1,) bytes], see ``kv_format``.
        indices: [s_q, topk] slots.
        kv_format: Format of ``k_cache``.
        sm_scale: Multiplies q.k; a number or a float32 tensor of one element.
        v_scale: Multiplies the output before anything else happens to it; likewise.
        topk_length: [s_q] or None.
        extra_k_cache: Second pool or None.
        extra_indices: [s_q, extra_topk] slots in the second pool.
        extra_topk_length: [s_q] or None.
        extra_kv_format: Format of the second pool.
        attn_sink: [h_q] or None.
        q_norm_eps: Epsilon of the weightless query norm, or None.
        rope: Rotation of the query (unless its ``rotate_query`` is False), and for d_qk = 512
            back-rotation of the output.
        q_order: "head" or "chunk16".
        num_splits: Ranges of index columns that are attended apart and merged; None means one.
        compute_dtype: torch.float32, or torch.float64 on request.

    Returns:
        out [s_q, h_q, 512] in ``compute_dtype`` before any quantisation, and lse [s_q, h_q].
    """
    num_tokens, heads, d_qk = q.shape
    pools = [(kv_format, k_cache, indices, topk_length)]
    if extra_kv_format is not None and extra_k_cache is not None and extra_indices is not None:
        pools.append((extra_kv_format, extra_k_cache, extra_indices, extra_topk_length))
    lengths = [
        row_lengths(length, num_tokens, pool_indices.shape[1])
        for _, _, pool_indices, length in pools
    ]
    width = sum(pool_indices.shape[1] for _, _, pool_indices, _ in pools)

    values, norm = prologue(
        q,
        q_norm_eps=q_norm_eps,
        rope=rope if rope is not None and rope.rotate_query else None,
        q_order=q_order,
        compute_dtype=compute_dtype,
    )
    out = torch.zeros((num_tokens, heads, D_V), dtype=compute_dtype, device=q.device)
    lse = torch.full((num_tokens, heads), -torch.inf, dtype=compute_dtype, device=q.device)
    for token in range(num_tokens):
        rows, columns, first_column = [], [], 0
        for (pool_format, cache, pool_indices, _), pool_lengths in zip(pools, lengths, strict=True):
            num_slots = cache.shape[0] * cache.shape[1]
            row = pool_indices[token]
            slots = valid_entries(row, pool_lengths[token], num_slots)
            rows.append(pool_format.gather(cache, slots))
            counted = torch.arange(row.shape[0], device=q.device) < pool_lengths[token]
            columns.append(
                (counted & (row >= 0) & (row < num_slots)).nonzero()[:, 0] + first_column
            )
            first_column += row.shape[0]
        state = _attend_in_splits(
            values[token],
            torch.cat(rows),
            torch.cat(columns),
            norm[token] * sm_scale,
            width,
            num_splits or 1,
        )
        out[token], lse[token] = state.out, state.lse
    out = epilogue(out * v_scale, lse, attn_sink=attn_sink, rope=rope if d_qk == D_V else None)
    return out, lse

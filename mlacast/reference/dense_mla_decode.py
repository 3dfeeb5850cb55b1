"""Reference of ``dense_mla_decode``: every cached token of a request, through its page table."""

from __future__ import annotations

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.reference.attention import D_V, attend
from mlacast.reference.epilogue import epilogue


def dense_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormat,
    sm_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor = 1.0,
    causal: bool = True,
    attn_sink: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend the last ``Q`` tokens of each request to its cached tokens.

    Token i of Q sees positions below ``seq_len - (Q - 1 - i)`` when causal, else below ``seq_len``.
    Positions past the page table, and pages outside the cache, do not count.

    Args:
        q: [B, Q, h_q, d_qk].
        k_cache: [num_pages, page_size, (1,) bytes].
        page_table: [B, max_pages] integers.
        seq_lens: [B] integers, clamped to [0, max_pages * page_size].
        kv_format: Format of ``k_cache``.
        sm_scale: Multiplies q.k; a number or a float32 tensor of one element.
        v_scale: Multiplies the output; likewise.
        causal: Bottom-right aligned causal mask.
        attn_sink: [h_q] or None.
        compute_dtype: torch.float32, or torch.float64 on request.

    Returns:
        out [B, Q, h_q, 512] in ``compute_dtype`` and lse [B, Q, h_q]; zeros and -inf for empty
        rows.
    """
    batch, per_request, heads, _ = q.shape
    num_pages, page_size = k_cache.shape[:2]
    out = torch.zeros((batch, per_request, heads, D_V), dtype=compute_dtype, device=q.device)
    lse = torch.full((batch, per_request, heads), -torch.inf, dtype=compute_dtype, device=q.device)
    scale = torch.ones((heads,), dtype=compute_dtype, device=q.device) * sm_scale
    longest = page_table.shape[1] * page_size
    for request, length in enumerate(seq_lens.tolist()):
        seq_len = min(max(int(length), 0), longest)
        positions = torch.arange(seq_len, device=q.device)
        pages = page_table[request].long()[positions // max(page_size, 1)]
        usable = (pages >= 0) & (pages < num_pages)
        slots = (pages * page_size + positions % max(page_size, 1))[usable]
        positions, rows = positions[usable], kv_format.gather(k_cache, slots)
        for token in range(per_request):
            visible = seq_len - (per_request - 1 - token) if causal else seq_len
            state = attend(q[request, token].to(compute_dtype), rows[positions < visible], scale)
            out[request, token], lse[request, token] = state.out, state.lse
    flat = epilogue((out * v_scale).flatten(0, 1), lse.flatten(0, 1), attn_sink=attn_sink)
    return flat.view_as(out), lse

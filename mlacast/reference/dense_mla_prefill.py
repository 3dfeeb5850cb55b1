"""Reference of ``dense_mla_prefill``: packed sequences over keys and values of their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mlacast.reference.attention import weigh

D_QK = 192
D_V = 128


def sequence_bounds(cu_seqlens: torch.Tensor, num_tokens: int) -> Iterator[tuple[int, int]]:
    """First token and end of each sequence, both clamped to the ``num_tokens`` there are."""
    bounds = [min(max(int(bound), 0), num_tokens) for bound in cu_seqlens.tolist()]
    yield from zip(bounds, bounds[1:], strict=False)


def dense_mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float = D_QK**-0.5,
    causal: bool = True,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend the tokens of each sequence to the keys of the same sequence, one token at a time.

    Token i of n sees the keys below ``num_keys - (n - 1 - i)`` when causal, else all of them. Only
    keys that it sees are read.

    Args:
        q: [T, h, 192].
        k: [T_k, h_kv, 192]; head i of q belongs to head ``i // (h / h_kv)`` of k and v.
        v: [T_k, h_kv, 128].
        cu_seqlens_q: [B + 1] integers, ascending: where each sequence starts in q, and its end.
        cu_seqlens_k: [B + 1], likewise in k and v.
        softmax_scale: Multiplies q.k.
        causal: Bottom-right aligned causal mask.
        compute_dtype: torch.float32, or torch.float64 on request.

    Returns:
        out [T, h, 128] in ``compute_dtype`` and lse [h, T]; zeros and -inf for tokens without keys,
        those of no sequence among them.
    """
    num_tokens, heads, _ = q.shape
    num_keys, kv_heads, _ = k.shape
    out = torch.zeros((num_tokens, heads, D_V), dtype=compute_dtype, device=q.device)
    lse = torch.full((heads, num_tokens), -torch.inf, dtype=compute_dtype, device=q.device)
    grouped = q.reshape(num_tokens, kv_heads, heads // kv_heads, D_QK)
    for (first, stop), (first_key, stop_key) in zip(
        sequence_bounds(cu_seqlens_q, num_tokens),
        sequence_bounds(cu_seqlens_k, num_keys),
        strict=True,
    ):
        keys = k[first_key:stop_key].to(compute_dtype).permute(1, 2, 0)
        values = v[first_key:stop_key].to(compute_dtype).transpose(0, 1)
        length = keys.shape[2]
        for token in range(first, stop):
            visible = max(length - (stop - 1 - token), 0) if causal else length
            query = grouped[token].to(compute_dtype)
            logits = (query @ keys[:, :, :visible]) * softmax_scale
            state = weigh(logits, values[:, :visible])
            out[token], lse[:, token] = state.out.flatten(0, 1), state.lse.flatten()
    return out, lse

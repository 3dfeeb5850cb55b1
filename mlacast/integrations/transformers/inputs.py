"""Collect what the core ops need from one attention module, up to its core attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mlacast.descriptors.rope import Rope
from mlacast.integrations.transformers.selection import SelectionMemo, compressed_columns


@dataclass(frozen=True)
class AttentionInputs:
    """One attention step of a batch, before Q norm and RoPE.

    Attributes:
        q: [batch * s_q, h_q, 512] bfloat16, neither normed nor rotated.
        window_kv: [batch, kv_len, 512] bfloat16 latents of the sliding window, rotated. For a
            bfloat16 model this is the storage that the model's cache returned, not a copy.
        window_columns: [batch, s_q, w] int32 columns of ``window_kv``, -1 for holes.
        compressed_kv: [batch, entries, 512] bfloat16; entries is 0 in a layer without compressor
            and until the first entry is complete.
        compressed_columns: [batch, s_q, k] int32 columns of ``compressed_kv``, -1 for holes.
        rope: cos/sin of every query token, as the model's rotary module computed them.
        attn_sink: [h_q] float32.
        q_norm_eps: Epsilon of the weightless query norm.
        sm_scale: Multiplies q.k.
    """

    q: torch.Tensor
    window_kv: torch.Tensor
    window_columns: torch.Tensor
    compressed_kv: torch.Tensor
    compressed_columns: torch.Tensor
    rope: Rope
    attn_sink: torch.Tensor
    q_norm_eps: float
    sm_scale: float

    @property
    def s_q(self) -> int:
        """Query tokens per request."""
        return self.window_columns.shape[1]

    @property
    def num_entries(self) -> int:
        """Compressed entries per request."""
        return self.compressed_kv.shape[1]


def rope_table(cos: torch.Tensor, sin: torch.Tensor, batch: int) -> Rope:
    """Make a table with one row per query token out of the model's own cos and sin.

    The values are taken as they are, in whatever precision the model computed them, so a bfloat16
    model is rotated by exactly the angles its own attention would use.

    Args:
        cos: [batch or 1, s_q, 32].
        sin: Like ``cos``.
        batch: Requests.

    Returns:
        Rope with table [batch * s_q, 64] float32 and positions 0, 1, 2, ....
    """
    rows = torch.cat((cos, sin), dim=-1).float()
    table = rows.expand(batch, -1, -1).reshape(-1, rows.shape[-1])
    positions = torch.arange(table.shape[0], dtype=torch.int32, device=table.device)
    return Rope(table, positions, "interleaved")


def attention_inputs(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Any,
    memo: SelectionMemo,
) -> AttentionInputs:
    """Run the projections, the cache update and the compressor of a DeepseekV4Attention.

    Args:
        module: The attention module; its submodules are called, its cache entry is updated.
        hidden_states: [batch, s_q, hidden].
        position_embeddings: {"main": (cos, sin), "compress": (cos, sin)} of the query positions.
        position_ids: [batch or 1, s_q].
        attention_mask: Additive mask over the window keys, or None.
        cache: The model's cache, or None.
        memo: Shared by the layers of a model.

    Returns:
        The step. Tensors that are not bfloat16 yet are rounded to it.
    """
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    batch, s_q, _ = hidden_states.shape
    cos, sin = position_embeddings[module.rope_layer_type]
    q_residual = module.q_a_norm(module.q_a_proj(hidden_states))
    q = module.q_b_proj(q_residual).view(batch * s_q, module.num_heads, module.head_dim)

    kv = module.kv_norm(module.kv_proj(hidden_states)).unsqueeze(1)
    kv = apply_rotary_pos_emb(kv, cos, sin)
    if cache is not None:
        kv = cache.update(kv, kv, module.layer_idx)[0]
    kv = kv[:, 0]

    entries, block_bias = kv[:, :0], None
    if module.compressor is not None:
        entries, block_bias = module.compressor(
            hidden_states, q_residual, position_ids, cache, module.layer_idx
        )
        entries = entries[:, 0]
    if attention_mask is None:
        # Eager attention adds the block bias only where there is a mask to append it to.
        block_bias = None
    return AttentionInputs(
        q=q.to(torch.bfloat16),
        window_kv=kv.to(torch.bfloat16),
        window_columns=memo.window_columns(attention_mask, batch, s_q, kv.shape[1], q.device),
        compressed_kv=entries.to(torch.bfloat16),
        compressed_columns=compressed_columns(
            block_bias, batch, s_q, entries.shape[1], q.device, width=_indexer_topk(module)
        ),
        rope=rope_table(cos, sin, batch),
        attn_sink=module.sinks.float(),
        q_norm_eps=float(module.q_b_norm.eps),
        sm_scale=float(module.scaling),
    )


def _indexer_topk(module: Any) -> int | None:
    """Entries per query that a CSA layer's indexer keeps at most; None for a layer without one."""
    indexer = getattr(module.compressor, "indexer", None)
    return None if indexer is None else int(indexer.index_topk)

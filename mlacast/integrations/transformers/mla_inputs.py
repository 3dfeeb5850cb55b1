"""Collect what the core ops need from one attention module of DeepSeek-V3 or V3.2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mlacast.integrations.transformers.key_ranges import (
    Keys,
    check_has_mask,
    read_keys,
    read_pairs,
    selected_columns,
)
from mlacast.integrations.transformers.modeling import load_modeling
from mlacast.integrations.transformers.selection import SelectionMemo, refuse_strays


@dataclass(frozen=True)
class MlaInputs:
    """One attention step of a batch, rotated, with the latents as the model's cache returned them.

    Attributes:
        q: [batch, s_q, N, 192] in the model's dtype.
        latent: [batch, kv_len, 512] normed latents.
        k_pe: [batch, kv_len, 64] rotated keys.
        keys: Which of them each query attends.
        sm_scale: Multiplies q.k.
    """

    q: torch.Tensor
    latent: torch.Tensor
    k_pe: torch.Tensor
    keys: Keys
    sm_scale: float

    @property
    def s_q(self) -> int:
        """Query tokens per request."""
        return self.q.shape[1]


def mla_inputs(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    attention_mask: torch.Tensor | None,
    cache: Any,
    position_ids: torch.Tensor | None,
    memo: SelectionMemo,
    kwargs: dict[str, Any],
) -> MlaInputs:
    """Run the projections, the cache update and the indexer of the module.

    Args:
        module: A DeepseekV3Attention or DeepseekV32Attention; its submodules are called, its cache
            entry is updated.
        hidden_states: [batch, s_q, hidden].
        position_embeddings: (cos, sin) of the query positions.
        attention_mask: As the model made it for its attention implementation, or None.
        cache: The model's cache, or None.
        position_ids: Positions, for the indexer.
        memo: Shared by the layers of a model.
        kwargs: Other arguments of the call, for the cache.
    """
    batch, s_q, _ = hidden_states.shape
    if module.q_lora_rank is None:
        q_residual, q = None, module.q_proj(hidden_states)
    else:
        q_residual = module.q_a_layernorm(module.q_a_proj(hidden_states))
        q = module.q_b_proj(q_residual)
    q = q.view(batch, s_q, -1, module.qk_head_dim)
    latent, k_pe = module.kv_a_proj_with_mqa(hidden_states).split(
        (module.kv_lora_rank, module.qk_rope_head_dim), dim=-1
    )
    # One head: the cache layers of transformers keep four dimensions.
    latent = module.kv_a_layernorm(latent).unsqueeze(1)
    q_pe, k_pe = _rotate(module, q[..., module.qk_nope_head_dim :], k_pe, position_embeddings)
    q = torch.cat((q[..., : module.qk_nope_head_dim], q_pe), dim=-1)
    if cache is not None:
        latent, k_pe = cache.update(latent, k_pe, module.layer_idx, kwargs=kwargs)
    latent, k_pe = latent[:, 0], k_pe[:, 0]

    keys = _keys(
        module,
        attention_mask,
        hidden_states,
        (q_residual, position_embeddings, position_ids, cache),
        latent.shape[1],
        memo,
    )
    return MlaInputs(q, latent, k_pe, keys, float(module.scaling))


def _rotate(
    module: Any, q_pe: torch.Tensor, k_pe: torch.Tensor, position_embeddings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated [batch, s_q, N, 64] and [batch, 1, s_q, 64], by the model's own function."""
    is_v3 = not hasattr(module, "indexer")
    modeling = load_modeling("deepseek_v3" if is_v3 else "deepseek_v32")
    interleaved = not is_v3 or module.config.rope_interleave
    rotate = (
        modeling.apply_rotary_pos_emb_interleave if interleaved else modeling.apply_rotary_pos_emb
    )
    cos, sin = position_embeddings
    q_pe, k_pe = rotate(q_pe, k_pe.unsqueeze(2), cos, sin, unsqueeze_dim=2)
    return q_pe, k_pe.transpose(1, 2)


def _keys(
    module: Any,
    mask: torch.Tensor | None,
    hidden_states: torch.Tensor,
    indexer_arguments: tuple[Any, ...],
    kv_len: int,
    memo: SelectionMemo,
) -> Keys:
    """Run the indexer if there is one, and return the keys that it and the mask leave open."""
    batch, s_q, _ = hidden_states.shape
    shape = (batch, s_q, kv_len)
    device = hidden_states.device
    is_sdpa = module.config._attn_implementation == "sdpa"
    indexer = getattr(module, "indexer", None)
    if indexer is not None:
        mask = check_has_mask(mask)
        q_residual, position_embeddings, position_ids, cache = indexer_arguments
        # Called in any case: it keeps keys of its own in the cache.
        topk = indexer(
            hidden_states,
            q_residual,
            position_embeddings,
            mask[:, 0],
            position_ids,
            cache=cache,
        )
        if topk.shape[-1] < kv_len:
            allowed = memo.recall(
                mask, ("pairs", *shape, is_sdpa), lambda: _read_pairs(mask, shape, is_sdpa)
            )
            return selected_columns(topk, allowed)
    return memo.recall(
        mask,
        ("keys", *shape, is_sdpa, device),
        lambda: read_keys(mask, *shape, device, is_sdpa=is_sdpa),
    )


def _read_pairs(mask: torch.Tensor, shape: tuple[int, int, int], is_sdpa: bool) -> torch.Tensor:
    allowed, strays = read_pairs(mask, *shape, is_sdpa=is_sdpa)
    if mask.dtype != torch.bool:
        refuse_strays(int(strays))
    return allowed

"""Small DeepSeek-V3 and V3.2 models for the comparison of a fused one with the original."""

from __future__ import annotations

import copy
import importlib
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed")

from mlacast.cli.demo_model import BOS, BYTES, EOS, PAD

# The last is V3.2 with selections that do not depend on hidden states, see `original`.
MODELS = ("deepseek_v3", "deepseek_v32", "deepseek_v32_selected")
LAYERS = 3
TOPK = 8


def small_config(model: str, **overrides: Any) -> Any:
    """Config with the real head geometry and everything else small. Tokens are bytes."""
    fields: dict[str, Any] = {
        "vocab_size": BYTES + 3,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "q_lora_rank": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "max_position_embeddings": 1024,
        "initializer_range": 0.05,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 256,
        },
    }
    if model != "deepseek_v3":
        fields |= {"index_n_heads": 4, "index_head_dim": 128, "index_topk": TOPK}
    fields.update(overrides)
    transformers = importlib.import_module("transformers")
    kind = "DeepseekV3Config" if model == "deepseek_v3" else "DeepseekV32Config"
    return getattr(transformers, kind)(**fields)


def build(model: str, seed: int = 5, implementation: str = "eager", **overrides: Any) -> Any:
    """A random causal LM in float32 and eval mode; norm weights vary, which would hide mistakes."""
    transformers = importlib.import_module("transformers")
    kind = "DeepseekV3ForCausalLM" if model == "deepseek_v3" else "DeepseekV32ForCausalLM"
    config = small_config(model, **overrides)
    config._attn_implementation = implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = getattr(transformers, kind)(config).eval()
        with torch.no_grad():
            for name, tensor in built.named_parameters():
                if "norm" in name and name.endswith("weight"):
                    tensor.normal_(1.0, 0.2)
                elif name.endswith("bias"):
                    tensor.normal_(0.0, 0.2)
    return built


class FixedIndexer(nn.Module):
    """Selects the open keys with the largest scores of a table: always the same ones."""

    scores: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("scores", torch.rand(1024, generator=generator), persistent=False)

    def forward(
        self, hidden_states: Tensor, q_resid: Tensor, tables: Any, mask: Tensor, *_: Any, cache: Any
    ) -> Tensor:
        is_open = mask if mask.dtype == torch.bool else mask == 0
        scores = self.scores[: mask.shape[-1]].float()
        ranked = torch.where(is_open, scores, -1.0).expand(hidden_states.shape[0], -1, -1)
        return ranked.topk(min(TOPK, mask.shape[-1])).indices.int()


@cache
def _built(model: str, continuous: bool, implementation: str) -> Any:
    overrides: dict[str, Any] = {}
    if continuous:
        overrides = {"first_k_dense_replace": LAYERS}
        if model == "deepseek_v32":
            overrides["index_topk"] = 512
    built = build(model, implementation=implementation, **overrides)
    if model == "deepseek_v32_selected":
        for layer, module in enumerate(attentions(built)):
            module.indexer = FixedIndexer(layer)
    return built


def original(
    model: str,
    *,
    continuous: bool = False,
    implementation: str = "eager",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A fresh copy of the model with transformers' own attention.

    ``continuous`` removes the discontinuous choices, expert routing and the indexer's top-k, which
    turn a rounding difference into another expert or another set of keys: the indexer of
    "deepseek_v32" keeps every key, that of "deepseek_v32_selected" a fixed choice of few.
    """
    return copy.deepcopy(_built(model, continuous, implementation)).to(dtype)


def attentions(model: Any) -> list[Any]:
    """The attention modules of a causal LM, in order."""
    return [layer.self_attn for layer in model.model.layers]

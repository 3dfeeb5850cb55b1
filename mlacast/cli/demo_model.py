"""The small DeepSeek-V4 model and the token stream that ``mlacast demo`` and the tests run on."""

from __future__ import annotations

import importlib
from typing import Any

import torch

BYTES = 256
PAD, BOS, EOS = BYTES, BYTES + 1, BYTES + 2

# A layer of each kind first, then the two compressed kinds again: errors can add up over depth.
LAYER_TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)

PASSAGE = (
    "A long context is mostly waiting. The model reads every earlier token again for each new one, "
    "so what is kept per token, and how many bytes it takes, decides how fast the answer comes. "
    "Latent attention keeps one short row instead of many heads, windows keep what is near, and "
    "summaries of a few tokens stand in for what is far. What leaves the attention is read once, "
    "by one matrix product, which wants it in eight bits: there is no reason to write it in "
    "sixteen first, read it back, scale it, and write it again."
)


def passage_tokens(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the first ``count`` bytes of the passage, repeated as needed, as ids [1, count]."""
    stream = PASSAGE.encode()
    repeats = -(-count // len(stream))
    return torch.tensor([list((stream * repeats)[:count])], dtype=torch.long, device=device)


def small_config(**overrides: Any) -> Any:
    """Return a DeepseekV4Config of a few million parameters with DeepSeek-V4's head geometry.

    Heads keep their 512 dimensions (64 rotary), so what runs through the core ops has its real
    shape; widths, experts, vocabulary, window and compression rates are small. Tokens are bytes.

    Args:
        **overrides: Config fields to set differently.
    """
    layer_types = list(overrides.get("layer_types", LAYER_TYPES))
    fields: dict[str, Any] = {
        "vocab_size": BYTES + 3,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        # The first layers route by token id, as in the published models.
        "mlp_layer_types": ["hash_moe" if i < 2 else "moe" for i in range(len(layer_types))],
        "num_attention_heads": 8,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_n_heads": 4,
        "index_topk": 8,
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
    }
    fields.update(overrides)
    return importlib.import_module("transformers").DeepseekV4Config(**fields)


def build_model(
    seed: int = 0, device: torch.device | str = "cpu", *, spread: float = 0.05, **overrides: Any
) -> Any:
    """Build a random DeepseekV4ForCausalLM, the same on every device, in float32 and eval mode.

    A fresh model has zero sinks, zero position biases, norm weights of one and one expert for every
    token; each of these would hide a mistake, so they get random values.

    Args:
        seed: Seed of every weight. torch's global random state is left as it was.
        device: Where the model goes.
        spread: Standard deviation of the matrices.
        **overrides: See ``small_config``.
    """
    transformers = importlib.import_module("transformers")
    config = small_config(initializer_range=spread, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.DeepseekV4ForCausalLM(config).eval()
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                _fill_special(name, tensor, config.n_routed_experts)
    return model.to(device)


def _fill_special(name: str, tensor: torch.Tensor, num_experts: int) -> None:
    """Give the tensors that transformers initialises to a constant a random value each."""
    if name.endswith("sinks"):
        tensor.normal_(0.5, 1.0)
    elif name.endswith("position_bias"):
        tensor.normal_(0.0, 1.0)
    elif "norm" in name:
        tensor.normal_(1.0, 0.2)
    elif name.endswith("_hc.base"):
        tensor.normal_(0.0, 0.3)
    elif name.endswith("tid2eid"):
        # Distinct experts per token: the first ones of a random permutation.
        order = torch.rand(tensor.shape[0], num_experts).argsort(dim=-1)
        tensor.copy_(order[:, : tensor.shape[1]])

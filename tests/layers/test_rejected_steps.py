"""What the layer refuses: by name, with what was wanted, before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mlacast
from mlacast.layers import MLAAttention
from tests.layers.steps import HEADS, Step, draw

FEATURES = HEADS * 128
MIXED = Step("mixed", (1, 2), (2, 0))

LAYERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_heads": 0}, ValueError, "num_heads must be 1 to 128, got 0"),
    ({"num_heads": 129}, ValueError, "num_heads must be 1 to 128, got 129"),
    ({"num_heads": 2.0}, TypeError, "num_heads must be an int"),
    ({"v_head_dim": 192}, mlacast.UnsupportedError, "v_head_dim=192: only 128 is built"),
    ({"kv_lora_rank": 256}, mlacast.UnsupportedError, "kv_lora_rank=256: only 512 is built"),
    ({"qk_nope_head_dim": 192}, mlacast.UnsupportedError, "only 128 is built"),
    ({"qk_rope_head_dim": 32}, mlacast.UnsupportedError, "only 64 is built"),
    ({"kv_format": mlacast.KvFormat.V4}, mlacast.UnsupportedError, "KvFormat.V4"),
    ({"kv_format": "BF16"}, TypeError, "kv_format must be a mlacast.KvFormat"),
    ({"dcp_group": object()}, TypeError, "dcp_group must be a torch.distributed.ProcessGroup"),
    ({"scale": None}, TypeError, "scale must be a number"),
    ({"scale": float("nan")}, ValueError, "scale must be finite"),
    ({"kv_b_proj": torch.zeros(511, 512).bfloat16()}, ValueError, "have shape .512, 512."),
    ({"kv_b_proj": torch.zeros(512, 512)}, ValueError, "kv_b_proj must have dtype bfloat16"),
    ({"kv_b_proj": torch.zeros(512, 512).bfloat16().T}, ValueError, "be contiguous"),
    ({"k_scale": 0.5}, ValueError, "k_scale must be 1.0 for KvFormat.BF16"),
    ({"q_scale": torch.ones(1)}, ValueError, "q_scale must be 1.0 for KvFormat.BF16"),
    ({"k_scale": 0.0, "kv_format": mlacast.KvFormat.FP8}, ValueError, "positive and finite"),
    ({"k_scale": torch.ones(2), "kv_format": mlacast.KvFormat.FP8}, ValueError, "have shape .1."),
    ({"k_scale": "1", "kv_format": mlacast.KvFormat.FP8}, TypeError, "a number or a torch.Tensor"),
    ({"context_workspace_tokens": 0}, ValueError, "be at least 1, got 0"),
]


@pytest.mark.parametrize(("changes", "error", "message"), LAYERS)
def test_layers(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "num_heads": HEADS,
        "scale": 0.1,
        "kv_b_proj": torch.zeros(HEADS * 256, 512, dtype=torch.bfloat16),
    }
    with pytest.raises(error, match=message):
        MLAAttention(**{**arguments, **changes})


INDICES = torch.zeros(3, 4, dtype=torch.int32)
STEPS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(3, HEADS + 1, 192).bfloat16()}, ValueError, "q must have shape .T, 2, 192."),
    ({"q": torch.zeros(3, HEADS, 192)}, ValueError, "q must have dtype bfloat16"),
    ({"kv_c_normed": torch.zeros(2, 512).bfloat16()}, ValueError, "kv_c_normed must have shape"),
    ({"k_pe": torch.zeros(3, 2, 64).bfloat16()}, ValueError, "k_pe must have shape"),
    ({"kv_cache": torch.zeros(5, 4, 512).bfloat16()}, ValueError, "hold rows of 576 values"),
    ({"kv_cache": torch.zeros(5, 8, 576).bfloat16()}, ValueError, "have the 4 tokens per page"),
    ({"kv_cache": torch.zeros(5, 4, 576).to(torch.uint8)}, ValueError, "kv_cache must have dtype"),
    ({"metadata": None}, TypeError, "metadata must be an MLAMetadata"),
    ({"output": torch.zeros(4, FEATURES).bfloat16()}, ValueError, "output must have shape"),
    ({"output": torch.zeros(3, FEATURES)}, ValueError, "output must have dtype bfloat16"),
    ({"output": [1]}, TypeError, "output must be a torch.Tensor"),
    (
        {"output": mlacast.QuantizedTensor.empty(4, 1, FEATURES, mlacast.Bf16())},
        ValueError,
        "output must have T=3 tokens like q, got 4",
    ),
    (
        {"output": mlacast.QuantizedTensor.empty(3, 1, 512, mlacast.Bf16())},
        ValueError,
        "output must have N . 128 = 256 features, got 512",
    ),
    (
        {
            "output": mlacast.QuantizedTensor.empty(3, 1, FEATURES, mlacast.Bf16()),
            "quant_col_major": False,
        },
        ValueError,
        "for a QuantizedTensor",
    ),
    ({"quant_group_size": 128}, ValueError, "output_block_scale must be given with quant_"),
    ({"topk_length": torch.ones(3).int()}, ValueError, "topk_length must be None without indices"),
    ({"indices": INDICES[:2]}, ValueError, "indices must have 1 rows .* or 3"),
    ({"indices": INDICES.long()}, ValueError, "indices must have dtype int32"),
    (
        {"indices": INDICES, "topk_length": torch.ones(2).int()},
        ValueError,
        "topk_length must have shape",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), STEPS)
def test_steps(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    inputs = draw(MIXED)
    output = torch.full((3, FEATURES), 7.0, dtype=torch.bfloat16)
    names = ("q", "kv_c_normed", "k_pe", "kv_cache", "metadata")
    arguments = {**dict(zip(names, inputs.tensors, strict=True)), "output": output, **changes}
    with pytest.raises(error, match=message):
        inputs.layer(**arguments)
    assert bool((output == 7.0).all())


def test_fewer_rows_than_tokens() -> None:
    inputs = draw(MIXED)
    q, kv_c, k_pe, kv_cache, metadata = inputs.tensors
    output = torch.zeros(2, FEATURES, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="q must have the 3 tokens of metadata, or more, got 2"):
        inputs.layer(q[:2], kv_c[:2], k_pe[:2], kv_cache, metadata, output)

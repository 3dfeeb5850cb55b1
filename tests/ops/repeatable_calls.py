"""Calls of every function that repeats, with few and small arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mlacast
from mlacast.compat.flash_mla import fused_norm_rope_attn_rope_cast as fused

BF16 = torch.bfloat16
V4 = mlacast.KvFormat.V4
Arguments = dict[str, Any]


def query_arguments() -> Arguments:
    return {
        "q": torch.zeros(2, 3, 512, dtype=BF16),
        "indices": torch.zeros(2, 4, dtype=torch.int32),
        "sm_scale": 0.5,
        "topk_length": torch.ones(2, dtype=torch.int32),
        "attn_sink": torch.zeros(3),
        "q_norm_eps": 1e-6,
        "rope": mlacast.Rope(torch.zeros(5, 64), torch.zeros(2, dtype=torch.int64)),
        "q_order": "head",
        "out": mlacast.QuantizedTensor.empty(2, 3, 512, mlacast.Mxfp8()),
        "out_format": mlacast.Mxfp8(),
        "num_groups": 3,
        "backend": None,
    }


def prefill_arguments() -> Arguments:
    return {**query_arguments(), "kv": torch.zeros(6, 512, dtype=BF16)}


def decode_arguments() -> Arguments:
    return {
        **query_arguments(),
        "k_cache": V4.allocate(2, 4),
        "kv_format": V4,
        "extra_k_cache": V4.allocate(2, 4),
        "extra_indices": torch.zeros(2, 5, dtype=torch.int32),
        "extra_topk_length": torch.ones(2, dtype=torch.int32),
        "extra_kv_format": V4,
        "schedule": None,
        "num_splits": 2,
        "batch_invariant": False,
        "workspace": torch.zeros(65536, dtype=torch.uint8),
        "v_scale": 1.0,
    }


def dense_arguments() -> Arguments:
    return {
        "q": torch.zeros(1, 2, 3, 512, dtype=BF16),
        "k_cache": torch.zeros(2, 4, 1, 512, dtype=BF16),
        "page_table": torch.zeros(1, 2, dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32),
        "kv_format": mlacast.KvFormat.BF16,
        "sm_scale": 0.5,
        "causal": True,
        "attn_sink": torch.zeros(3),
        "v_scale": 1.0,
        "out": torch.zeros(1, 2, 3, 512, dtype=BF16),
        "out_format": mlacast.Bf16(),
        "num_groups": 1,
        "backend": None,
    }


def merge_arguments() -> Arguments:
    return {
        "outs": [torch.zeros(2, 3, 512), torch.zeros(2, 3, 512)],
        "lses": [torch.zeros(2, 3), torch.zeros(2, 3)],
        "lse_layout": "th",
        "out": None,
        "out_format": mlacast.Fp8Tensor(0.5),
        "num_groups": 1,
        "backend": None,
    }


def dense_prefill_arguments() -> Arguments:
    return {
        "q": torch.zeros(2, 4, 192, dtype=BF16),
        "k": torch.zeros(3, 2, 192, dtype=BF16),
        "v": torch.zeros(3, 2, 128, dtype=BF16),
        "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 3], dtype=torch.int32),
        "max_seqlen_q": 2,
        "max_seqlen_k": 3,
        "softmax_scale": 0.5,
        "causal": True,
        "out": mlacast.QuantizedTensor.empty(2, 1, 512, mlacast.Nvfp4(torch.ones(1))),
        "out_format": None,
        "num_groups": 1,
        "backend": None,
    }


def v_up_arguments() -> Arguments:
    return {
        "latent_out": torch.zeros(2, 4, 512, dtype=BF16),
        "w_uv": torch.zeros(4, 512, 128, dtype=BF16),
        "out": None,
        "out_format": mlacast.Fp8Group(64),
        "num_groups": 2,
        "backend": None,
    }


def quantize_arguments() -> Arguments:
    return {
        "x": torch.zeros(2, 1024),
        "format": mlacast.Nvfp4(torch.ones(1)),
        "out": mlacast.QuantizedTensor.empty(2, 1, 1024, mlacast.Nvfp4(torch.ones(1))),
        "num_groups": 1,
        "backend": None,
    }


def project_arguments(*lead: int) -> Arguments:
    """Weights in blocks of 128 for one group, or for the product of all of them."""
    return {
        "out": mlacast.QuantizedTensor.empty(2, 1, 512, mlacast.Mxfp8("chunk32")),
        "weight": torch.zeros(*lead, 8, 512, dtype=torch.float8_e4m3fn),
        "weight_sf": torch.zeros(*lead, 1, 4),
        "weight_order": "head",
        "backend": None,
    }


def grouped_project_arguments() -> Arguments:
    return project_arguments(1)


def fused_arguments() -> Arguments:
    return {
        "enable_q_norm": True,
        "rms_norm_eps": 1e-6,
        "token_positions": torch.zeros(2, dtype=torch.int64),
        "is_rope_neox_style": False,
        "rope_dim": 64,
        "cos_sin_cache": torch.zeros(5, 64),
        "n_wv_group": 2,
        "num_per_channels": 32,
        "use_tma_aligned_col_major_sf": True,
        "round_sf": True,
        "use_packed_ue8m0": True,
        "q": torch.zeros(2, 8, 512, dtype=BF16),
        "sm_scale": 0.5,
        "d_v": 512,
        "attn_sink": torch.zeros(8),
        "topk_length": torch.ones(2, dtype=torch.int32),
        "out": (
            torch.zeros(2, 2, 2048, dtype=torch.float8_e4m3fn),
            torch.zeros(2, 16, 4, dtype=torch.int32).permute(2, 0, 1)[:2],
        ),
    }


def fused_prefill_arguments() -> Arguments:
    return {
        **fused_arguments(),
        "kv": torch.zeros(6, 1, 512, dtype=BF16),
        "indices": torch.zeros(2, 1, 4, dtype=torch.int32),
    }


def fused_decode_arguments() -> Arguments:
    return {
        **fused_arguments(),
        "k_cache": V4.allocate(2, 4),
        "indices_in_kvcache": torch.zeros(2, 4, dtype=torch.int32),
        "extra_k_cache": V4.allocate(2, 4),
        "extra_indices_in_kvcache": torch.zeros(2, 5, dtype=torch.int32),
        "extra_topk_length": torch.ones(2, dtype=torch.int32),
    }


FUNCTIONS: tuple[tuple[Callable[..., Any], Callable[[], Arguments]], ...] = (
    (mlacast.sparse_mla_prefill, prefill_arguments),
    (mlacast.sparse_mla_decode, decode_arguments),
    (mlacast.dense_mla_decode, dense_arguments),
    (mlacast.merge_attention_states, merge_arguments),
    (mlacast.dense_mla_prefill, dense_prefill_arguments),
    (mlacast.v_up_project, v_up_arguments),
    (mlacast.quantize_output, quantize_arguments),
    (mlacast.grouped_out_project, grouped_project_arguments),
    (mlacast.quantized_linear, project_arguments),
    (fused.prefill, fused_prefill_arguments),
    (fused.decode, fused_decode_arguments),
)
ON_FAKE_GPU = tuple(entry for entry in FUNCTIONS if entry[0] in (FUNCTIONS[0][0], FUNCTIONS[1][0]))
ON_FAKE_GPU += FUNCTIONS[-2:]

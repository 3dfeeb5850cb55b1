"""Names, order, kinds and defaults of the decode functions' parameters, as pinned."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from mlacast.compat import flashinfer

PINNED = {
    "trtllm_batch_decode_with_kv_cache_mla": (
        "query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, "
        "block_tables, seq_lens, max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, "
        "bmm2_scale=1.0, sinks=None, skip_softmax_threshold_scale_factor=None, enable_pdl=None, "
        'backend="auto", is_var_seq=True, uses_shared_paged_kv_idx=True, lse=None, '
        'return_lse=False, cute_dsl_impl="auto", kv_scale_format="auto", cum_seq_lens_q=None, '
        "max_q_len=None, multi_ctas_kv_counter_buffer=None, sparse_mla_top_k_lens=None, "
        "enable_dcp=False, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, "
        "use_fp16_softmax=None"
    ),
    "trtllm_batch_decode_sparse_mla_dsv4": (
        "query, swa_kv_cache, workspace_buffer, sparse_indices=None, compressed_kv_cache=None, "
        "sparse_topk_lens=None, seq_lens=None, out=None, bmm1_scale=1.0, bmm2_scale=1.0, "
        'sinks=None, kv_layout="HND", cum_seq_lens_q=None, max_q_len=None, enable_pdl=None, '
        "swa_topk_lens=None, extra_sparse_indices=None, extra_sparse_topk_lens=None, "
        'backend="auto", hca_swa_indices=None, hca_compressed_block_tables=None, '
        "hca_seq_lens=None, hca_is_causal=True, hca_use_persistent=False, "
        "hca_sparse_indices_format=None, out_scales=None, cos_sin_cache=None"
    ),
}


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in parameters]


@pytest.mark.parametrize("name", PINNED)
def test_parameters(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def pinned({PINNED[name]}): pass", namespace)
    assert name in flashinfer.__all__
    assert _parameters(getattr(flashinfer, name)) == _parameters(namespace["pinned"])

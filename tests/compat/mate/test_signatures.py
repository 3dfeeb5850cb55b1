"""Names, order, kinds and defaults of the decode functions' parameters, as pinned."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from mlacast.compat import mate

PINNED = {
    "get_batch_decode_metadata_mla": "query, seq_lens, sparse_mla_top_k",
    "sparse_mla_fp8_decode": (
        "query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, "
        "block_tables, seq_lens, max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, "
        "bmm2_scale=1.0, sinks=None, skip_softmax_threshold_scale_factor=None, enable_pdl=None, "
        'backend="auto", is_var_seq=True, uses_shared_paged_kv_idx=True, lse=None, '
        'return_lse=False, cute_dsl_impl="auto", kv_scale_format="auto", cum_seq_lens_q=None, '
        "max_q_len=None, multi_ctas_kv_counter_buffer=None, metadata=None"
    ),
}


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in parameters]


@pytest.mark.parametrize("name", PINNED)
def test_parameters(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def pinned({PINNED[name]}): pass", namespace)
    assert _parameters(getattr(mate, name)) == _parameters(namespace["pinned"])


def test_the_module_exports_three_names() -> None:
    assert set(mate.__all__) == {*PINNED, "mla_rope_quantize_fp8"}

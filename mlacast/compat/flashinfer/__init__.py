"""Functions of FlashInfer over the core ops of mlacast.

Signatures equal FlashInfer's; the functions run on every device that a backend of mlacast covers.
See ``docs/conventions.md``.
"""

from mlacast.call_log import log_public_functions
from mlacast.compat.flashinfer.mla_decode import trtllm_batch_decode_with_kv_cache_mla
from mlacast.compat.flashinfer.rope_quantize import mla_rope_quantize_fp8, rope_quantize_fp8
from mlacast.compat.flashinfer.rope_quantize_append import rope_quantize_fp8_append_paged_kv_cache
from mlacast.compat.flashinfer.sparse_dsv4 import trtllm_batch_decode_sparse_mla_dsv4

__all__ = [
    "mla_rope_quantize_fp8",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
    "trtllm_batch_decode_sparse_mla_dsv4",
    "trtllm_batch_decode_with_kv_cache_mla",
]

log_public_functions(__name__)

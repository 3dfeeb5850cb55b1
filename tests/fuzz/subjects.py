"""What is fuzzed: one function of a ``Draw`` and an ``Under`` for each kind of call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tests.fuzz import caches, compat, dense, layer, sparse, steadiness
from tests.fuzz.draw import Draw
from tests.fuzz.under import Under

Subject = Callable[[Draw, Under], None]

OPERATIONS: dict[str, Subject] = {
    "sparse_mla_prefill": sparse.check_prefill,
    "sparse_mla_decode": sparse.check_decode,
    "dense_mla_decode": dense.check_decode,
    "dense_mla_prefill": dense.check_prefill,
    "merge_attention_states": layer.check_merge,
    "v_up_project": layer.check_v_up,
    "quantize_output": layer.check_quantize,
    "products": layer.check_project,
    "rope_quantize_fp8": caches.check_rope_quantize,
    "kv_cache_append": caches.check_append,
    "kv_cache_gather": caches.check_gather,
    "decode_metadata": caches.check_metadata,
}
# Functions of other libraries, on whatever backend dispatch chooses.
DROP_INS: dict[str, Subject] = {
    "fused_prefill": compat.check_fused_prefill,
    "fused_decode": compat.check_fused_decode,
    "flash_mla_sparse_fwd": compat.check_sparse_fwd,
    "flash_mla_with_kvcache": compat.check_with_kvcache,
    "flash_mla_with_kvcache_dense": compat.check_dense_kvcache,
    "mate_sparse_mla_fp8_decode": compat.check_mate_decode,
    "flashinfer_trtllm_packed": compat.check_flashinfer_packed,
    "flash_attn_varlen_func": compat.check_flash_attn,
}
# What must not change a bit.
STEADY: dict[str, Subject] = {
    "steady_sparse_mla_prefill": steadiness.check_prefill,
    "steady_sparse_mla_decode": steadiness.check_decode,
    "steady_dense_mla_decode": steadiness.check_dense_decode,
    "steady_dense_mla_prefill": steadiness.check_dense_prefill,
    "steady_merge_attention_states": steadiness.check_merge,
    "steady_v_up_project": steadiness.check_v_up,
}
# Launchers that the interpreter runs; bytes of the others are compared in tests/kernels.
INTERPRETED: dict[str, Subject] = {
    name: subject
    for name, subject in OPERATIONS.items()
    if name not in ("quantize_output", "rope_quantize_fp8", "decode_metadata")
}
# Calls that this process has drawn, of each subject.
CASES: Counter[str] = Counter()


def run(name: str, subject: Subject, draw: Draw, under: Under) -> None:
    """Draw and check one call, and count it."""
    CASES[name] += 1
    subject(draw, under)

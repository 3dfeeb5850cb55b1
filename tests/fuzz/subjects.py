"""What is fuzzed: one function of a ``Draw`` and an ``Under`` for each kind of call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tests.fuzz import caches, dense, layer, sparse
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

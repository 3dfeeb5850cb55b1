"""The Python interface of FlashMLA over the core ops of mlacast.

Signatures equal FlashMLA's; the functions run on every device that a backend of mlacast covers and
for every head count it covers, not for 64 and 128 heads only. Conventions that differ from the core
ops: the lse of an empty row is +inf here (-inf there), ``flash_mla_with_kvcache`` returns it as [b,
h_q, s_q], cache formats are inferred from the bytes per token, and the fused functions take and
give permuted element orders. See ``docs/conventions.md``.
"""

from mlacast.call_log import log_public_functions
from mlacast.compat.flash_mla import fused_norm_rope_attn_rope_cast
from mlacast.compat.flash_mla.metadata import FlashMLASchedMeta, get_mla_metadata
from mlacast.compat.flash_mla.placement import set_v41_placement
from mlacast.compat.flash_mla.sparse import flash_mla_sparse_fwd
from mlacast.compat.flash_mla.with_kvcache import flash_mla_with_kvcache

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fused_norm_rope_attn_rope_cast",
    "get_mla_metadata",
    "set_v41_placement",
]

log_public_functions(__name__)

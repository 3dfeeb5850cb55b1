"""Functions of MATE over the core ops of mlacast.

Signatures equal MATE's; the functions run on every device that a backend of mlacast covers. See
``docs/conventions.md``.
"""

from mlacast.call_log import log_public_functions
from mlacast.compat.mate.metadata import get_batch_decode_metadata_mla
from mlacast.compat.mate.rope_quantize import mla_rope_quantize_fp8
from mlacast.compat.mate.sparse_decode import sparse_mla_fp8_decode

__all__ = [
    "get_batch_decode_metadata_mla",
    "mla_rope_quantize_fp8",
    "sparse_mla_fp8_decode",
]

log_public_functions(__name__)

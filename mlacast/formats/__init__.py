"""Number formats: E4M3, E5M2, E2M1, UE8M0, block-scaled quantisers and KV cache records.

Everything here is elementwise or per group, takes any shape and any device, needs torch alone and
decides by bits, not by logarithms. Codes are uint8 tensors, decoded values float32. Where bytes are
placed in a buffer is not known here: that is ``mlacast.layouts``; which combination a caller asked
for is ``mlacast.descriptors``.
"""

from __future__ import annotations

from mlacast.formats.block_scaled import (
    AMAX_FLOOR,
    MXFP8_AMAX_FLOOR,
    NVFP4_GROUP_SIZE,
    SF_KINDS,
    dequantize_fp8_group,
    dequantize_fp8_tensor,
    dequantize_nvfp4,
    quantize_fp8_group,
    quantize_fp8_tensor,
    quantize_nvfp4,
)
from mlacast.formats.e2m1 import (
    E2M1_MAX,
    E2M1_NAN,
    decode_e2m1,
    encode_e2m1,
    pack_e2m1,
    unpack_e2m1,
)
from mlacast.formats.e4m3 import E4M3_MAX, E4M3_NAN, decode_e4m3, encode_e4m3
from mlacast.formats.e5m2 import E5M2_MAX, E5M2_NAN, decode_e5m2, encode_e5m2
from mlacast.formats.kv_record import (
    KV_RECORD_NAMES,
    decode_kv_record,
    encode_kv_record,
    kv_record_bytes,
)
from mlacast.formats.ue8m0 import decode_ue8m0, encode_ue8m0, pack_ue8m0_words, unpack_ue8m0_words

__all__ = [
    "AMAX_FLOOR",
    "E2M1_MAX",
    "E2M1_NAN",
    "E4M3_MAX",
    "E4M3_NAN",
    "E5M2_MAX",
    "E5M2_NAN",
    "KV_RECORD_NAMES",
    "MXFP8_AMAX_FLOOR",
    "NVFP4_GROUP_SIZE",
    "SF_KINDS",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e5m2",
    "decode_kv_record",
    "decode_ue8m0",
    "dequantize_fp8_group",
    "dequantize_fp8_tensor",
    "dequantize_nvfp4",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e5m2",
    "encode_kv_record",
    "encode_ue8m0",
    "kv_record_bytes",
    "pack_e2m1",
    "pack_ue8m0_words",
    "quantize_fp8_group",
    "quantize_fp8_tensor",
    "quantize_nvfp4",
    "unpack_e2m1",
    "unpack_ue8m0_words",
]

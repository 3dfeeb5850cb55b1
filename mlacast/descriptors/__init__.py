"""Descriptors that appear in signatures: cache and output formats, quantised buffers, rotation."""

from __future__ import annotations

from mlacast.descriptors.kv_format import ByteField, KvFormat
from mlacast.descriptors.out_format import (
    Bf16,
    Fp8Group,
    Fp8Tensor,
    Mxfp8,
    Nvfp4,
    OutFormat,
    out_format_from_key,
)
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope

__all__ = [
    "Bf16",
    "ByteField",
    "Fp8Group",
    "Fp8Tensor",
    "KvFormat",
    "Mxfp8",
    "Nvfp4",
    "OutFormat",
    "QuantizedTensor",
    "Rope",
    "out_format_from_key",
]

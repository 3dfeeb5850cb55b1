"""mlacast: MLA attention whose output is already the quantised input of the next GEMM.

Names are imported on first use. Importing the package registers the ``torch.ops.mlacast`` schemas
and touches neither a GPU nor triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mlacast.call_log import exported as _exported
from mlacast.ops import _schemas as _schemas

if TYPE_CHECKING:
    from mlacast.descriptors.kv_format import KvFormat
    from mlacast.descriptors.out_format import Bf16, Fp8Group, Fp8Tensor, Mxfp8, Nvfp4, OutFormat
    from mlacast.descriptors.quantized_tensor import QuantizedTensor
    from mlacast.descriptors.rope import Rope
    from mlacast.errors import UnsupportedError
    from mlacast.ops.dense_mla_decode import dense_mla_decode
    from mlacast.ops.dense_mla_prefill import dense_mla_prefill
    from mlacast.ops.explain import Explanation, explain
    from mlacast.ops.grouped_out_project import grouped_out_project
    from mlacast.ops.kv_cache_append import kv_cache_append
    from mlacast.ops.kv_cache_gather import kv_cache_gather
    from mlacast.ops.merge_attention_states import merge_attention_states
    from mlacast.ops.quantize_output import quantize_output
    from mlacast.ops.quantized_linear import quantized_linear
    from mlacast.ops.rope_quantize_fp8 import rope_quantize_fp8
    from mlacast.ops.schedule import SparseDecodeSchedule, plan_sparse_decode, workspace_size
    from mlacast.ops.sparse_mla_decode import sparse_mla_decode
    from mlacast.ops.sparse_mla_prefill import sparse_mla_prefill
    from mlacast.ops.v_up_project import v_up_project

__version__ = "0.1.0"

_EXPORTS = {
    "Bf16": "mlacast.descriptors.out_format",
    "Explanation": "mlacast.ops.explain",
    "Fp8Group": "mlacast.descriptors.out_format",
    "Fp8Tensor": "mlacast.descriptors.out_format",
    "KvFormat": "mlacast.descriptors.kv_format",
    "Mxfp8": "mlacast.descriptors.out_format",
    "Nvfp4": "mlacast.descriptors.out_format",
    "OutFormat": "mlacast.descriptors.out_format",
    "QuantizedTensor": "mlacast.descriptors.quantized_tensor",
    "Rope": "mlacast.descriptors.rope",
    "SparseDecodeSchedule": "mlacast.ops.schedule",
    "UnsupportedError": "mlacast.errors",
    "dense_mla_decode": "mlacast.ops.dense_mla_decode",
    "dense_mla_prefill": "mlacast.ops.dense_mla_prefill",
    "explain": "mlacast.ops.explain",
    "grouped_out_project": "mlacast.ops.grouped_out_project",
    "kv_cache_append": "mlacast.ops.kv_cache_append",
    "kv_cache_gather": "mlacast.ops.kv_cache_gather",
    "merge_attention_states": "mlacast.ops.merge_attention_states",
    "plan_sparse_decode": "mlacast.ops.schedule",
    "quantize_output": "mlacast.ops.quantize_output",
    "quantized_linear": "mlacast.ops.quantized_linear",
    "rope_quantize_fp8": "mlacast.ops.rope_quantize_fp8",
    "sparse_mla_decode": "mlacast.ops.sparse_mla_decode",
    "sparse_mla_prefill": "mlacast.ops.sparse_mla_prefill",
    "v_up_project": "mlacast.ops.v_up_project",
    "workspace_size": "mlacast.ops.schedule",
}
_SUBPACKAGES = ("compat", "distributed", "integrations", "layers", "reference")

__all__ = [
    "Bf16",
    "Explanation",
    "Fp8Group",
    "Fp8Tensor",
    "KvFormat",
    "Mxfp8",
    "Nvfp4",
    "OutFormat",
    "QuantizedTensor",
    "Rope",
    "SparseDecodeSchedule",
    "UnsupportedError",
    "__version__",
    "dense_mla_decode",
    "dense_mla_prefill",
    "explain",
    "grouped_out_project",
    "kv_cache_append",
    "kv_cache_gather",
    "merge_attention_states",
    "plan_sparse_decode",
    "quantize_output",
    "quantized_linear",
    "rope_quantize_fp8",
    "sparse_mla_decode",
    "sparse_mla_prefill",
    "v_up_project",
    "workspace_size",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name in _EXPORTS:
        value = _exported(getattr(importlib.import_module(_EXPORTS[name]), name), f"mlacast.{name}")
        globals()[name] = value
        return value
    if name in _SUBPACKAGES:
        return importlib.import_module(f"mlacast.{name}")
    raise AttributeError(f"module 'mlacast' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*__all__, *_SUBPACKAGES})

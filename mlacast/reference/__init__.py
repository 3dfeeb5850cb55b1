"""The specification: every operation in plain torch, total, one token at a time."""

from mlacast.reference.dense_mla_decode import dense_mla_decode
from mlacast.reference.dense_mla_prefill import dense_mla_prefill
from mlacast.reference.epilogue import apply_sink, epilogue
from mlacast.reference.grouped_out_project import grouped_out_project
from mlacast.reference.merge_attention_states import merge_attention_states
from mlacast.reference.prologue import prologue
from mlacast.reference.quantize_output import quantize_output
from mlacast.reference.quantized_linear import quantized_linear
from mlacast.reference.rope_quantize_fp8 import rope_quantize_fp8
from mlacast.reference.sparse_mla_decode import combine_splits, sparse_mla_decode
from mlacast.reference.sparse_mla_prefill import sparse_mla_prefill
from mlacast.reference.v_up_project import v_up_project

__all__ = [
    "apply_sink",
    "combine_splits",
    "dense_mla_decode",
    "dense_mla_prefill",
    "epilogue",
    "grouped_out_project",
    "merge_attention_states",
    "prologue",
    "quantize_output",
    "quantized_linear",
    "rope_quantize_fp8",
    "sparse_mla_decode",
    "sparse_mla_prefill",
    "v_up_project",
]

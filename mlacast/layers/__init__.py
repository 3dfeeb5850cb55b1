"""Layers of attention over the core ops, with the output quantised for the GEMM behind them."""

from mlacast.layers.metadata import MLAMetadata
from mlacast.layers.mla_attention import MLAAttention

__all__ = ["MLAAttention", "MLAMetadata"]

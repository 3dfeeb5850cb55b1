"""The compile-time part of an output buffer."""

from __future__ import annotations

from typing import NamedTuple

from mlacast.descriptors.out_format import Bf16, Fp8Tensor, Nvfp4
from mlacast.descriptors.quantized_tensor import QuantizedTensor

_BLOCK_KINDS = {"float32": 2, "float32_pow2": 3, "ue8m0_packed": 4}


class OutputConfig(NamedTuple):
    """How rows become codes and scales, and in which order those stand.

    Attributes:
        kind: Number of the format, as in ``common.store``.
        group: Elements that share a scale; 512 without such scales.
        features: Elements of a token in one group of the buffer.
        chunk32: Whether 32-chunks of a group's heads alternate.
        amax_floor: Largest magnitude that a group has at least.
        sf_column_tiles: Tiles of 4 columns of a swizzled scale buffer; else 0.
    """

    kind: int
    group: int
    features: int
    chunk32: bool
    amax_floor: float
    sf_column_tiles: int


def output_config(out: QuantizedTensor) -> OutputConfig:
    """Describe a buffer; equal for all of its token ranges."""
    sf, fmt = out.sf, out.format
    return OutputConfig(
        kind=_kind(out),
        group=fmt.sf_vec_size or 512,
        features=out.features,
        chunk32=fmt.order == "chunk32",
        amax_floor=fmt.amax_floor,
        sf_column_tiles=sf.shape[1] // 4 if sf is not None and isinstance(fmt, Nvfp4) else 0,
    )


def float32_config(features: int) -> OutputConfig:
    """Describe float32 rows of ``features`` numbers, which kernels store as they do plain ones."""
    return OutputConfig(
        kind=0, group=512, features=features, chunk32=False, amax_floor=0.0, sf_column_tiles=0
    )


def _kind(out: QuantizedTensor) -> int:
    if isinstance(out.format, Bf16):
        return 0
    if isinstance(out.format, Fp8Tensor):
        return 1
    return 5 if isinstance(out.format, Nvfp4) else _BLOCK_KINDS[out.format.sf_kind]

"""``grouped_out_project`` by DeepGEMM's ``fp8_einsum``, which reads our buffers in place."""

from __future__ import annotations

import ctypes
import functools
import importlib
from pathlib import Path
from typing import Any

import torch

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.kernels.common.device import on_device_of

MODULE = "deep_gemm"
# Scales per token and 128 features, and per 128x128 block of weights.
_RECIPE = (1, 128, 128)


def _preload_nvrtc() -> None:
    """Make the CUDA compiler that came with torch visible to libraries that do not look there."""
    packages = Path(torch.__file__).resolve().parent.parent / "nvidia"
    for library in sorted(packages.glob("*/lib/libnvrtc.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _deep_gemm() -> Any:
    try:
        return importlib.import_module(MODULE)
    except (ImportError, OSError, RuntimeError):
        _preload_nvrtc()
        return importlib.import_module(MODULE)


def launch_grouped_out_project(
    out: QuantizedTensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor,
    *,
    projected: torch.Tensor,
) -> None:
    """Fill ``projected`` [T, g, d_out] bfloat16; arguments as in ``mlacast.grouped_out_project``.

    Dispatch sends here float32 scales per 128 features, MN-major for exactly these tokens, and
    contiguous ones of 128x128 blocks: DeepGEMM would copy others, and misread scales of any other
    kind.
    """
    with on_device_of(weight.device):
        _deep_gemm().fp8_einsum(
            "bhr,hdr->bhd",
            (out.data, out.sf),
            (weight, weight_sf),
            projected,
            recipe=_RECIPE,
        )

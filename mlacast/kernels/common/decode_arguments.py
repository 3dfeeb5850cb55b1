"""Host side of what the decode kernels share: record names, FP8 queries, scales on the device."""

from __future__ import annotations

import torch

# Names of the record formats in ``records.load_records``, by cache format.
RECORDS = {
    "BF16": "rows",
    "FP8": "fp8",
    "V32": "v32",
    "V4": "v4",
    "V41": "v41",
    "V41_INLINE": "v41",
    "V41_FP4": "v41_fp4",
    "V41_FP4_INLINE": "v41_fp4",
    "NVFP4_384": "nvfp4_384",
}


def query_operand(q: torch.Tensor) -> torch.Tensor:
    """The query as a kernel argument: e4m3 codes as bytes, which kernels decode themselves."""
    return q.view(torch.uint8) if q.dtype == torch.float8_e4m3fn else q


def number_and_tensor(
    scale: float | torch.Tensor, absent: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """Split a scale into a number and a tensor of which a kernel reads one.

    Args:
        scale: A number, or one float32 element on the device.
        absent: Stands for the tensor where there is none.
    """
    if isinstance(scale, torch.Tensor):
        return 1.0, scale
    return scale, absent

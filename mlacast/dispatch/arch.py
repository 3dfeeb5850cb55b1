"""The architecture name of a device, the only fact about hardware that selection sees."""

from __future__ import annotations

import functools

import torch


@functools.cache
def _cuda_arch(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm{major}{minor}"


def arch_of(device: torch.device) -> str:
    """Name the architecture of ``device``: "cpu", "sm90", ...; else its device type."""
    if device.type == "cuda" and torch.version.hip is not None:
        return "hip"
    if device.type == "cuda":
        return _cuda_arch(torch.cuda.current_device() if device.index is None else device.index)
    return device.type

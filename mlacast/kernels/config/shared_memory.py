"""Shared memory that a program may have, which tiles are chosen by."""

from __future__ import annotations

import functools

import torch

# What tiles are made for. Capabilities 8.0, 8.7, 9.0 and 10 have that much; 8.6, 8.9 and 12 have
# 99 KiB.
LARGE_SHARED_MEMORY = 160 << 10


@functools.cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; as on an H200 where there is no GPU."""
    if device.type != "cuda":
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return int(
        getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    )

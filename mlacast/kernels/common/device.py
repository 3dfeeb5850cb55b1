"""Launch on the device of the tensors, whichever device is current."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def on_device_of(place: torch.Tensor | torch.device) -> AbstractContextManager[object]:
    """Make a device, or a tensor's, current for a launch; the CPU (interpreter) needs nothing."""
    target = place if isinstance(place, torch.device) else place.device
    if target.type == "cpu":
        return contextlib.nullcontext()
    module = getattr(torch, target.type)
    device: AbstractContextManager[object] = module.device(target)
    return device

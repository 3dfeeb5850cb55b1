"""Launch on the device of the tensors, whichever device is current."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current for a launch; CPU tensors (interpreter) need nothing."""
    if tensor.device.type == "cpu":
        return contextlib.nullcontext()
    module = getattr(torch, tensor.device.type)
    device: AbstractContextManager[object] = module.device(tensor.device)
    return device

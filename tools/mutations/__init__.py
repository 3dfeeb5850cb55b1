"""Faults that are planted by hand to see whether the tests notice, by part of the project."""

from __future__ import annotations

from tools.mutations.call_log import CALL_LOG
from tools.mutations.compat import COMPAT
from tools.mutations.fault import Fault
from tools.mutations.formats import FORMATS
from tools.mutations.hopper import HOPPER
from tools.mutations.launchers import LAUNCHERS
from tools.mutations.layers import LAYERS
from tools.mutations.ops import OPS
from tools.mutations.portable import PORTABLE
from tools.mutations.reference import REFERENCE

CPU: tuple[Fault, ...] = (
    *FORMATS,
    *REFERENCE,
    *OPS,
    *PORTABLE,
    *LAUNCHERS,
    *LAYERS,
    *COMPAT,
    *CALL_LOG,
)
CUDA: tuple[Fault, ...] = HOPPER

__all__ = ["CPU", "CUDA", "Fault"]

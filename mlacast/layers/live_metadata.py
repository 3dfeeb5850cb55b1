"""Numbers for metadata, so that an operator can be given them.

An operator takes tensors and numbers. The plan of a step is neither, and what a compiled layer
reads of it would become part of the compiled code. So metadata carries a number in a tensor on the
host: all steps look alike to a compiler, and the operator finds the metadata again by the number.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mlacast.errors import fail

# Whoever makes a step holds its metadata; the last reference ends the entry.
_LIVE: WeakValueDictionary[int, Any] = WeakValueDictionary()
_NUMBERS = itertools.count()


def number_of(metadata: object) -> Tensor | None:
    """Give an object a number of its own: a scalar int64 tensor on the host.

    Returns:
        The number; None while a function is being compiled, whose compiler then knows what is in
        the object anyway.
    """
    if torch.compiler.is_compiling():
        return None
    number = next(_NUMBERS)
    _LIVE[number] = metadata
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def with_number(op: str, number: Tensor) -> Any:
    """Return the object of a number.

    Raises:
        ValueError: It is gone: nothing but the number was kept.
    """
    found = _LIVE.get(int(number))
    if found is None:
        fail(
            op, "metadata", "be kept until the step is done", "the number of metadata that is gone"
        )
    return found

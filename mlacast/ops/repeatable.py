"""Functions around an operation, repeated like the operation itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mlacast.ops.known_call import KnownCall
from mlacast.ops.known_calls import PUBLIC, recorded

Function = TypeVar("Function", bound=Callable[..., Any])


def repeatable(name: str) -> Callable[[Function], Function]:
    """Let calls of a function be repeated that do nothing but views and one public operation.

    Whatever such a call makes in new memory makes it one that is not repeated. What a call does
    besides that leaves no trace in tensors (it writes to one in place, it reads values) has to be
    announced by ``more_than_launches``.

    Args:
        name: Name of the function, different from those of operations.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            op = (name, len(args), *kwargs)
            values = (*args, *kwargs.values())
            returned = PUBLIC.repeat(op, values)
            if returned is not None:
                return returned
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            known = PUBLIC.find(op, values)
            with recorded() as calls:
                returned = function(*args, **kwargs)
            if known is None:
                PUBLIC.remember(op, values, KnownCall(None, ()))
            PUBLIC.keep(op, values, known, calls, returned)
            return returned

        wrapper: Any = call
        stand_in: Function = wrapper
        return stand_in

    return decorate

"""The function that stands in for a public one while logging is on."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mlacast.call_log.observer import Observer
from mlacast.call_log.settings import Settings

Function = TypeVar("Function", bound=Callable[..., Any])


# On functions that `logged` returns: others have a ``__wrapped__`` as well.
_UNLOGGED = "_mlacast_unlogged"


class _Thread(threading.local):
    """Whether this thread is inside a logged call."""

    inside = False


_THREAD = _Thread()


def logged(function: Function, name: str, settings: Settings) -> Function:
    """Return ``function``, observed: same arguments, same result, same errors.

    A call made by a logged call is a part of it and not logged again. While torch traces a graph
    nothing is logged: the trace is that of the function alone.

    Args:
        function: What to call.
        name: Dotted name under which it is public.
        settings: What to log, at level 1 or above.
    """
    observer = Observer(function, name, settings)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _THREAD.inside:
            return function(*args, **kwargs)
        _THREAD.inside = True
        try:
            observed = observer.begin(args, kwargs)
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                observed.raised(error)
                raise
            observed.returned(result)
            return result
        finally:
            _THREAD.inside = False

    # Where a user finds it, so that it can be pickled by name like any function.
    call.__module__, _, call.__qualname__ = name.rpartition(".")
    setattr(call, _UNLOGGED, function)
    wrapper: Any = call
    stand_in: Function = wrapper
    return stand_in


def unlogged(function: Function) -> Function:
    """Return what `logged` was given if ``function`` comes from there, else ``function``."""
    plain: Function = getattr(function, _UNLOGGED, function)
    return plain

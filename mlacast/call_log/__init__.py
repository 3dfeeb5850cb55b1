"""Logging of calls, dumps of their arguments and results, and replay of dumps.

``MLACAST_LOGLEVEL`` and its companions are read once, when the package is imported. At level 0
nothing here is called again: the public names are the undecorated functions. ``docs/logging.md``
has the variables, the files of a dump and the commands.
"""

from __future__ import annotations

import inspect
import os
import sys
from types import ModuleType
from typing import TypeVar

from mlacast.call_log.settings import Settings, read_settings

SETTINGS = read_settings(os.environ)

Value = TypeVar("Value")


def exported(value: Value, name: str, settings: Settings = SETTINGS) -> Value:
    """Return what a namespace exports under ``name``: a logging function for a function.

    Args:
        value: Any public object.
        name: The dotted name that a user writes, for example ``"mlacast.quantize_output"``.
        settings: Of the process, unless a test says otherwise.

    Returns:
        ``value`` itself at level 0, and always if it is no function.
    """
    if settings.level == 0 or not inspect.isfunction(value):
        return value
    from mlacast.call_log.wrap import logged

    return logged(value, name, settings)


def log_public_functions(module_name: str, settings: Settings = SETTINGS) -> None:
    """Make every function in the ``__all__`` of a module a logging one; at level 0 do nothing.

    Modules listed there, which stand in for a namespace of functions, are treated the same way.

    Args:
        module_name: The calling module's ``__name__``, all of its public names defined.
        settings: Of the process, unless a test says otherwise.
    """
    if settings.level == 0:
        return
    module = sys.modules[module_name]
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            log_public_functions(value.__name__, settings)
        else:
            setattr(module, name, exported(value, f"{module_name}.{name}", settings))

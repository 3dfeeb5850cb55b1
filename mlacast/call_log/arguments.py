"""The arguments of a call by name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
KINDS = ("positional", "keyword", "default")


@dataclass(frozen=True)
class Argument:
    """One argument.

    Attributes:
        name: Its parameter, or ``args[i]`` where there is none.
        kind: ``"positional"``, ``"keyword"``, or ``"default"`` if it was not given.
        value: What the function gets.
    """

    name: str
    kind: str
    value: Any


def arguments_of(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Argument]:
    """Name the arguments of a call, also of one that does not fit the signature.

    Defaults are arguments too: a later version may have other ones.
    """
    parameters = list(signature.parameters.values())
    names = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    names += [f"args[{index}]" for index in range(len(names), len(args))]
    arguments = [
        Argument(name, "positional", value) for name, value in zip(names, args, strict=False)
    ]
    arguments += [Argument(name, "keyword", value) for name, value in kwargs.items()]
    given = {argument.name for argument in arguments}
    arguments += [
        Argument(parameter.name, "default", parameter.default)
        for parameter in parameters
        if parameter.kind in _NAMED
        and parameter.default is not inspect.Parameter.empty
        and parameter.name not in given
    ]
    return arguments


def is_scratch(name: str) -> bool:
    """Whether an argument is memory for a backend to use, whose content means nothing."""
    return name.startswith("workspace")

"""Values that kernels are compiled for: tuples with names, each one argument of a kernel.

Triton finds a compiled kernel by what its compile-time arguments print, in memory and on disk, and
hands them to those who listen for compilations as JSON.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import typing
from typing import Any

import pytest

pytest.importorskip("triton", reason="the values are those of Triton kernels")

from triton.compiler import ASTSource  # noqa: E402

from mlacast.kernels import config  # noqa: E402
from mlacast.kernels import triton as portable  # noqa: E402
from mlacast.kernels.common.combine_splits import combine_splits_kernel  # noqa: E402
from mlacast.kernels.config.attention import PoolConfig  # noqa: E402
from mlacast.kernels.gluon import sm90  # noqa: E402


def _classes() -> list[type]:
    """Named tuples of numbers and strings; those of pointers are no compile-time values."""
    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for package in (config, portable, sm90)
        for module in pkgutil.iter_modules(package.__path__)
    ]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, tuple)
        and value.__module__ == module.__name__
        and set(typing.get_type_hints(value).values()) <= {int, bool, float, str}
    ]


def _samples(kind: type) -> list[Any]:
    """One value, and for each field one that differs in it alone."""
    samples: dict[Any, Any] = {
        int: (3, 4),
        bool: (False, True),
        float: (0.5, 1.5),
        str: ("a", "b"),
    }
    pairs = [samples[annotation] for annotation in typing.get_type_hints(kind).values()]
    first = [pair[0] for pair in pairs]
    others = [[*first[:at], pair[1], *first[at + 1 :]] for at, pair in enumerate(pairs)]
    return [kind(*values) for values in (first, *others)]


def _key(value: Any) -> str:
    source = ASTSource(combine_splits_kernel, {"END": "constexpr"}, {"END": value})
    return str(source.hash())


def test_there_are_values() -> None:
    assert PoolConfig in _classes() and len(_classes()) > 10


@pytest.mark.parametrize("kind", _classes(), ids=lambda kind: kind.__name__)
def test_they_hold_data_alone(kind: type) -> None:
    """What a method of theirs computes would not be part of any key."""
    plain = type("Plain", (tuple,), {}).__dict__.keys() | {"__new__", "__repr__", "__getnewargs__"}
    own = {
        name
        for name, value in vars(kind).items()
        if callable(value) or isinstance(value, (property, staticmethod, classmethod))
    }
    known = {"_make", "_replace", "_asdict", "__replace__"} | plain
    assert own <= known, f"fields only, found {sorted(own - known)}"


@pytest.mark.parametrize("kind", _classes(), ids=lambda kind: kind.__name__)
def test_values_that_differ_share_no_compiled_kernel(kind: type) -> None:
    samples = _samples(kind)
    assert len({_key(value) for value in samples}) == len(samples)
    assert len({repr(value) for value in samples}) == len(samples)


@pytest.mark.parametrize("kind", _classes(), ids=lambda kind: kind.__name__)
def test_listeners_get_them_as_json(kind: type) -> None:
    """Triton writes the constants down for whoever set a hook, and fails where it cannot."""
    for value in _samples(kind):
        assert json.loads(json.dumps({"constant_vals": [value]})) == {"constant_vals": [[*value]]}

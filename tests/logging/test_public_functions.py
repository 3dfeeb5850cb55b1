"""Which functions are logged: every public one, core and compat, each under its own name."""

from __future__ import annotations

import functools
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mlacast
from mlacast import compat
from mlacast.call_log.replay import find_function
from mlacast.call_log.settings import Settings
from mlacast.call_log.wrap import logged, unlogged

ROOT = Path(__file__).resolve().parents[2]
MODULES = ["mlacast"] + [
    f"mlacast.compat.{module.name}"
    for module in pkgutil.iter_modules(compat.__path__)
    if not module.name.startswith("_")
]

# Prints the public functions of the modules, and which of them log.
PROGRAM = """
import importlib, inspect, json, sys
from types import ModuleType

def functions(module, prefix):
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            yield from functions(value, f"{prefix}.{name}")
        elif inspect.isfunction(value):
            yield f"{prefix}.{name}", value

found = {
    name: [value.__code__.co_filename, f"{value.__module__}.{value.__qualname__}"]
    for module in sys.argv[1:]
    for name, value in functions(importlib.import_module(module), module)
}
loaded = sorted(
    name for name in sys.modules if name.startswith(("mlacast.call_log.", "safetensors"))
)
print(json.dumps({"found": found, "loaded": loaded}))
"""


def in_a_process_at(level: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *MODULES],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "MLACAST_LOGLEVEL": level,
            "MLACAST_LOGDEST": "stderr",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    # Importing writes nothing; the first call does.
    assert done.stderr == ""
    return json.loads(done.stdout)


def public_functions(module: ModuleType, prefix: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            found |= public_functions(value, f"{prefix}.{name}")
        elif inspect.isfunction(value):
            found[f"{prefix}.{name}"] = value
    return found


def all_public_functions() -> dict[str, object]:
    found: dict[str, object] = {}
    for name in MODULES:
        module = mlacast if name == "mlacast" else pkgutil.resolve_name(name)
        found |= public_functions(module, name)
    return found


def test_the_modules_are_found() -> None:
    assert "mlacast.compat.flash_mla" in MODULES
    names = all_public_functions()
    assert "mlacast.sparse_mla_decode" in names
    assert "mlacast.compat.flash_mla.fused_norm_rope_attn_rope_cast.decode" in names


def test_at_level_1_every_public_function_logs_under_its_name() -> None:
    found = in_a_process_at("1")["found"]
    assert set(found) == set(all_public_functions())
    silent = [name for name, (file, _) in found.items() if Path(file).name != "wrap.py"]
    assert silent == [], "add log_public_functions(__name__) at the end of the module"
    assert {name: name for name in found} == {name: known for name, (_, known) in found.items()}


def test_at_level_0_none_does_and_nothing_is_loaded() -> None:
    answer = in_a_process_at("0")
    assert [name for name, (file, _) in answer["found"].items() if "call_log" in file] == []
    assert answer["loaded"] == ["mlacast.call_log.settings"]


@pytest.mark.parametrize("name", all_public_functions())
def test_every_public_function_can_be_replayed_by_its_name(name: str) -> None:
    assert find_function(name) is all_public_functions()[name]


def test_only_logging_is_taken_off() -> None:
    """Functions that repeat their calls are wrapped too, and replayed as they are."""

    def plain() -> None:
        """Do nothing."""

    @functools.wraps(plain)
    def around() -> None:
        plain()

    assert unlogged(around) is around
    assert unlogged(logged(around, "mlacast.around", Settings(level=1))) is around

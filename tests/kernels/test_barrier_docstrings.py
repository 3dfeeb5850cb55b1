"""Who waits for a barrier, or arrives at it, says so: device functions name theirs.

A role names those of the functions that it calls as well, by its own names for them.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mlacast

FOLDER = Path(mlacast.__file__).parent / "kernels" / "gluon" / "sm90"
OPERATIONS = ("mbarrier.wait", "mbarrier.arrive", "mbarrier.expect", "async_copy.mbarrier_arrive")
FUNCTIONS = {
    node.name: node
    for path in sorted(FOLDER.glob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
}
# Helpers of the same name in different files are looked at one by one.
PLACES = [
    (path.stem, node)
    for path in sorted(FOLDER.glob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
]


def _name(place: ast.expr) -> str | None:
    """Name of a barrier: ``k_ready.index(slot)`` is ``k_ready``, ``barriers.index(K)`` is ``K``."""
    if isinstance(place, ast.Name):
        return place.id
    if isinstance(place, ast.Subscript):
        return None
    if not (isinstance(place, ast.Call) and isinstance(place.func, ast.Attribute)):
        return None
    array, (index, *_) = place.func.value, place.args
    if isinstance(array, ast.Name) and array.id == "barriers":
        names = [node.id for node in ast.walk(index) if isinstance(node, ast.Name)]
        return next(name for name in names if name.isupper())
    return _name(array)


def _own(function: ast.FunctionDef) -> set[str]:
    """Barriers that a function itself waits for or arrives at."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in OPERATIONS:
            name = _name(node.args[0])
            assert name is not None, f"{function.name}: {ast.unparse(node)}"
            found.add(name)
    return found


def _in_all(module: str, function: ast.FunctionDef) -> set[str]:
    """Those, and the ones of what it calls, by the names that it passes on."""
    local = {node.name: node for stem, node in PLACES if stem == module}
    found = _own(function)
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        called = local.get(node.func.id) or FUNCTIONS.get(node.func.id)
        if called is None or called is function:
            continue
        parameters = [argument.arg for argument in called.args.args]
        given = dict(zip(parameters, node.args, strict=False))
        home = next(stem for stem, other in PLACES if other.name == called.name)
        for name in _in_all(module if node.func.id in local else home, called):
            # What a function takes out of a tuple has the same name outside.
            found.add((_name(given[name]) or name) if name in given else name)
    return found


USERS = [(module, function) for module, function in PLACES if _own(function)]
ROLES = [
    (module, function)
    for module, function in PLACES
    if function.name.startswith("run_") and function.name.endswith("_role")
]


def _allocated(kernel: ast.FunctionDef) -> set[str]:
    """Barriers that a kernel allocates; of an array of all of them, those that have a number."""
    found = {
        target.id
        for node in ast.walk(kernel)
        if isinstance(node, ast.Assign) and "allocate_shared_memory(gl.int64" in ast.unparse(node)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if found == {"barriers"}:
        init = FUNCTIONS["init_barriers"]
        found = {node.id for node in ast.walk(init) if isinstance(node, ast.Name)}
        found = {name for name in found if name.endswith(("_READY", "_FREE", "_GO"))}
    return found


KERNELS = [(stem, node) for stem, node in PLACES if _allocated(node)]


def test_there_are_roles() -> None:
    assert len(ROLES) >= 16
    assert len(USERS) >= 35
    assert len(KERNELS) >= 6


@pytest.mark.parametrize(
    ("module", "function"), USERS, ids=[f"{stem}-{node.name}" for stem, node in USERS]
)
def test_a_function_names_its_barriers(module: str, function: ast.FunctionDef) -> None:
    text = ast.get_docstring(function) or ""
    assert {name for name in _own(function) if f"``{name}``" not in text} == set()


@pytest.mark.parametrize(
    ("module", "function"), ROLES, ids=[f"{stem}-{node.name}" for stem, node in ROLES]
)
def test_a_role_names_all_of_its_barriers(module: str, function: ast.FunctionDef) -> None:
    text = ast.get_docstring(function) or ""
    missing = {name for name in _in_all(module, function) if f"``{name}``" not in text}
    assert missing == set()


@pytest.mark.parametrize(("module", "kernel"), KERNELS, ids=[stem for stem, _ in KERNELS])
def test_a_kernel_names_the_barriers_that_it_allocates(
    module: str, kernel: ast.FunctionDef
) -> None:
    text = ast.get_docstring(kernel) or ""
    assert {name for name in _allocated(kernel) if f"``{name}``" not in text} == set()

"""Which layer may import which, read from the sources without running them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlacast.dispatch.impls import OPS

PACKAGE = Path(__file__).resolve().parent.parent / "mlacast"

LEAVES = frozenset({"errors", "formats", "layouts", "descriptors"})
# "api" is the package itself: `import mlacast`, `from mlacast import X`.
ALLOWED: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "formats": frozenset({"errors"}),
    "layouts": frozenset({"errors", "formats"}),
    "descriptors": frozenset({"errors", "formats", "layouts"}),
    "call_log": LEAVES,
    "reference": LEAVES,
    "kernels": LEAVES,
    "dispatch": LEAVES,
    "ops": LEAVES | {"dispatch"},
    "compat": LEAVES | {"ops", "api", "call_log", "layers"},
    "integrations": LEAVES | {"ops", "api"},
    "distributed": LEAVES | {"ops", "api"},
    "layers": LEAVES | {"ops", "api", "distributed"},
    "testing": LEAVES | {"reference"},
    "bench": LEAVES | {"reference", "api"},
    "cli": LEAVES | {"api", "testing", "integrations", "bench", "call_log"},
    "__main__": frozenset({"cli"}),
    # The package's own __init__ re-exports everything on first use; it registers schemas at once.
    "__init__": LEAVES | {"ops", "call_log"},
}
# What functions may import on first use beyond the above.
LAZY: dict[str, frozenset[str]] = {
    "ops": frozenset({"reference"}),
    # A record names the version of mlacast, whose import is what reads the settings.
    "call_log": frozenset({"api"}),
}

OPTIONAL: dict[str, frozenset[str]] = {
    # The benchmark brings the separate kernels that it compares with.
    "triton": frozenset({"kernels", "bench"}),
    "vllm": frozenset({"kernels"}),
    "flash_mla": frozenset({"kernels"}),
    "flashinfer": frozenset({"kernels"}),
    "transformers": frozenset({"integrations"}),
    "typer": frozenset({"cli"}),
    "rich": frozenset({"cli"}),
    "matplotlib": frozenset({"cli"}),
}


@dataclass(frozen=True)
class Import:
    """One imported module of one file."""

    file: Path
    line: int
    module: str
    top_level: bool

    @property
    def where(self) -> str:
        return f"{self.file.relative_to(PACKAGE.parent)}:{self.line}"


def layer_of(file: Path, package: Path = PACKAGE) -> str:
    first = file.relative_to(package).parts[0]
    return first.removesuffix(".py")


def imports_of(file: Path, package: Path = PACKAGE) -> Iterator[Import]:
    """Every import of a file, relative ones made absolute."""
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    parts = (package.name, *file.relative_to(package).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            # `from mlacast import ops` names a layer, `from mlacast import Rope` the public API.
            is_root = source == package.name
            modules = [f"{source}.{name.name}" if is_root else source for name in node.names]
            assert all(name.name != "*" for name in node.names), f"{file}: star import"
        else:
            continue
        for module in modules:
            yield Import(file, node.lineno, module, id(node) not in lazy)


def target_layer(module: str, package: Path = PACKAGE) -> str:
    """Layer of a ``mlacast...`` module; "api" for the package and the names it exports."""
    parts = module.split(".")
    if len(parts) == 1:
        return "api"
    child = package / parts[1]
    is_module = child.is_dir() or child.with_suffix(".py").is_file()
    return parts[1] if is_module else "api"


def complaint(found: Import, package: Path = PACKAGE) -> str | None:
    """Say what is wrong with an import, or None."""
    layer = layer_of(found.file, package)
    root = found.module.split(".")[0]
    if root == package.name:
        target = target_layer(found.module, package)
        allowed = ALLOWED.get(layer, frozenset()) | {layer}
        if not found.top_level:
            allowed |= LAZY.get(layer, frozenset())
        if layer == "__init__" and not found.top_level:
            return None
        return None if target in allowed else f"{layer} must not import {target}"
    if root in OPTIONAL:
        allowed_here = not found.top_level or layer in OPTIONAL[root]
        return None if allowed_here else f"{root} at the top level of {layer}"
    if found.top_level and root not in sys.stdlib_module_names and root != "torch":
        return f"{root} is no dependency of mlacast"
    return None


FILES = sorted(PACKAGE.rglob("*.py"))


def test_sources_are_found() -> None:
    assert PACKAGE / "__init__.py" in FILES


def test_every_top_level_folder_and_file_is_a_known_layer() -> None:
    unknown = {layer_of(file) for file in FILES} - set(ALLOWED)
    assert not unknown, f"add {sorted(unknown)} to ALLOWED, with what each may import"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_downwards(file: Path) -> None:
    found = [(entry, complaint(entry)) for entry in imports_of(file)]
    wrong = [f"{entry.where}: {reason} ({entry.module})" for entry, reason in found if reason]
    assert not wrong, "\n".join(wrong)


def test_kernels_do_not_import_sibling_kernels() -> None:
    for file in (PACKAGE / "kernels").rglob("*.py"):
        own = ".".join(("mlacast", *file.relative_to(PACKAGE).with_suffix("").parts))
        for found in imports_of(file):
            inside = found.module.startswith("mlacast.kernels")
            shared = found.module.startswith(("mlacast.kernels.common", "mlacast.kernels.config"))
            # The phases of one kernel are files beside it that begin with its name.
            folder, _, name = own.rpartition(".")
            phase = found.module.startswith(f"{folder}.") and any(
                name.startswith(op) and found.module.rpartition(".")[2].startswith(op) for op in OPS
            )
            assert not inside or shared or phase or own.startswith(found.module), found.where


def test_no_file_without_a_subject() -> None:
    vague = [file for file in FILES if file.stem in ("utils", "util", "helpers", "misc")]
    assert not vague


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("formats/x.py", "from mlacast.layouts import paging", "formats must not import layouts"),
        ("formats/x.py", "from ..ops import query", "formats must not import ops"),
        ("formats/x.py", "def f():\n    import mlacast.ops", "formats must not import ops"),
        ("ops/x.py", "import mlacast.reference", "ops must not import reference"),
        ("ops/x.py", "def f():\n    import mlacast.reference", None),
        ("ops/x.py", "from mlacast import Rope", "ops must not import api"),
        ("ops/x.py", "import triton.language as tl", "triton at the top level of ops"),
        ("kernels/x.py", "import triton", None),
        ("cli/x.py", "import typer", None),
        ("cli/x.py", "from mlacast import Rope", None),
        ("reference/x.py", "import numpy", "numpy is no dependency of mlacast"),
        ("reference/x.py", "import math, torch", None),
    ],
)
def test_the_test_sees_wrong_imports(
    tmp_path: Path, path: str, source: str, reason: str | None
) -> None:
    package = tmp_path / "mlacast"
    for layer in ("formats", "layouts", "ops", "reference", "kernels", "cli"):
        (package / layer).mkdir(parents=True)
    file = package / path
    file.write_text(source)
    reasons = [complaint(found, package) for found in imports_of(file, package)]
    assert reason in reasons if reason else not any(reasons)

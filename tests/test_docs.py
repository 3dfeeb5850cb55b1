"""Documents tell the truth: their Python runs, their links and commands exist, docstrings fit."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import mlacast

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [README, *PAGES]
OPERATION_PAGES = sorted((ROOT / "docs" / "ops").glob("*.md"))

FENCE = re.compile(r"^```(.*)$")
# A Python block runs unless the line above its fence says why it cannot.
NOT_RUN = re.compile(r"^<!-- not run: (?P<reason>\S.*) -->$")
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: language, text, line of its first line, and why it is not run."""

    language: str
    text: str
    line: int
    not_run: str | None


def blocks_of(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    start: int | None = None
    language, not_run = "", None
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if fence is None:
            continue
        if start is None:
            start, language = number + 1, fence[1].strip()
            above = NOT_RUN.match(lines[number - 1]) if number else None
            not_run = above["reason"] if above else None
        else:
            yield Block(language, "\n".join(lines[start:number]), start + 1, not_run)
            start = None
    assert start is None, "a fence is not closed"


def python_blocks(document: Path) -> list[Block]:
    blocks = blocks_of(document.read_text(encoding="utf-8"))
    return [block for block in blocks if block.language == "python"]


def relative(document: Path) -> str:
    return str(document.relative_to(ROOT))


def has_python(document: Path) -> bool:
    return any(block.not_run is None for block in python_blocks(document))


@pytest.mark.parametrize(
    "document", [document for document in DOCUMENTS if has_python(document)], ids=relative
)
def test_python_blocks_run(document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of a page build on each other, in order; each of the README runs on its own."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("document")
    has_transformers = importlib.util.find_spec("transformers") is not None
    left_out = []
    for block in python_blocks(document):
        if block.not_run is not None:
            continue
        if "transformers" in block.text and not has_transformers:
            left_out.append(block.line)
            continue
        if document == README:
            module = types.ModuleType("block")
        # Leading newlines make line numbers of a traceback those of the document.
        source = "\n" * (block.line - 1) + block.text
        exec(compile(source, str(document), "exec"), module.__dict__)
    if left_out:
        pytest.skip(f"transformers is not installed: blocks at lines {left_out} were not run")


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_fences_name_a_language(document: Path) -> None:
    for block in blocks_of(document.read_text(encoding="utf-8")):
        assert re.fullmatch(r"[a-z]+", block.language), f"line {block.line}: {block.language!r}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = LINK.findall(document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def linked_pages(document: Path) -> set[Path]:
    """Documents that links of ``document`` name, folders not counted."""
    links = LINK.findall(document.read_text(encoding="utf-8"))
    return {(document.parent / link).resolve() for link in links if link.endswith(".md")}


def test_every_page_is_reachable_from_the_readme() -> None:
    reached, todo = {README}, [README]
    while todo:
        found = linked_pages(todo.pop()) - reached
        reached |= found
        todo.extend(found)
    assert [relative(page) for page in PAGES if page not in reached] == []


def test_the_index_links_every_page() -> None:
    missing = set(PAGES) - {INDEX} - linked_pages(INDEX)
    assert sorted(relative(page) for page in missing) == []


# A signature in a document: a dotted name, its parameters, and what comes back.
SIGNATURE = re.compile(r"^(mlacast\.[\w.]+)\(([^()]*)\) -> (\w+|\([\w, ]+\))$", re.MULTILINE)


def written_signatures(document: Path) -> list[tuple[str, str, str]]:
    """Name, parameters and result of every signature in the text blocks of a document."""
    blocks = blocks_of(document.read_text(encoding="utf-8"))
    texts = [block.text for block in blocks if block.language == "text"]
    return [found for text in texts for found in SIGNATURE.findall(text)]


def written_parameters(parameters: str) -> list[tuple[str, str, str]]:
    """Name, kind and default of each parameter of a written signature."""
    namespace: dict[str, Any] = {"torch": torch}
    exec(f"def f({parameters}): pass", namespace)
    return comparable(inspect.signature(namespace["f"]))


def comparable(signature: inspect.Signature) -> list[tuple[str, str, str]]:
    """Name, kind and default of each parameter but ``self``."""
    return [
        (parameter.name, parameter.kind.name, repr(parameter.default))
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]


def number_of_values(signature: inspect.Signature) -> int:
    """How many values a call gives, read from the annotation; a class has none and gives one."""
    annotation = signature.return_annotation
    if not isinstance(annotation, str):
        return 1
    returned = ast.parse(annotation, mode="eval").body
    if not isinstance(returned, ast.Subscript) or not isinstance(returned.slice, ast.Tuple):
        return 1
    return len(returned.slice.elts)


WRITTEN_SIGNATURES = [
    pytest.param(*signature, id=f"{relative(page)}-{signature[0].rpartition('.')[2]}")
    for page in PAGES
    for signature in written_signatures(page)
]


@pytest.mark.parametrize(("name", "parameters", "result"), WRITTEN_SIGNATURES)
def test_written_signatures_are_those_of_the_code(name: str, parameters: str, result: str) -> None:
    signature = inspect.signature(pkgutil.resolve_name(name))
    assert written_parameters(parameters) == comparable(signature)
    assert result.count(",") + 1 == number_of_values(signature)


@pytest.mark.parametrize("page", OPERATION_PAGES, ids=relative)
def test_every_operation_page_has_its_signature_and_an_example(page: Path) -> None:
    named = [name for name, _, _ in written_signatures(page)]
    assert any(page.stem in name.split(".") for name in named), named
    runs = [block for block in python_blocks(page) if block.not_run is None]
    assert any(page.stem in block.text for block in runs)


def test_every_operation_has_a_page() -> None:
    from mlacast.dispatch.impls import OPS

    assert set(OPS) <= {page.stem for page in OPERATION_PAGES}


def _commands(program: str) -> set[str]:
    """Words that follow ``program`` in code of the README."""
    text = README.read_text(encoding="utf-8")
    shell = [block.text for block in blocks_of(text) if block.language in ("sh", "text")]
    code = "\n".join([*shell, *re.findall(r"`([^`\n]+)`", text)])
    return set(re.findall(rf"(?:^|\s){program} ([a-z-]+)", code, flags=re.MULTILINE))


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    named = _commands("make")
    assert {"demo", "test"} <= named <= targets


def test_commands_of_the_readme_exist() -> None:
    pytest.importorskip("typer", reason="the extra `cli` is not installed")
    from mlacast.cli.app import app

    callbacks = [command.callback for command in app.registered_commands]
    known = {callback.__name__.replace("_", "-") for callback in callbacks if callback is not None}
    named = _commands("mlacast")
    assert named == known


def test_the_example_at_the_top_is_short() -> None:
    first = python_blocks(README)[0]
    assert first.line < 30, "the example is on the first screen"
    assert len([line for line in first.text.splitlines() if line.strip()]) <= 20


PublicFunction = Callable[..., Any]


def public_functions() -> dict[str, PublicFunction]:
    """Every public function of the package, by the name a user writes."""
    from mlacast import distributed
    from mlacast.compat import flash_mla, flashinfer, mate
    from mlacast.compat.flash_mla import fused_norm_rope_attn_rope_cast as fused
    from mlacast.integrations import transformers as integration

    modules: list[tuple[str, Any]] = [
        ("mlacast", mlacast),
        ("flash_mla", flash_mla),
        ("flashinfer", flashinfer),
        ("mate", mate),
        ("fused_norm_rope_attn_rope_cast", fused),
        ("distributed", distributed),
        ("integrations.transformers", integration),
    ]
    return {
        f"{prefix}.{name}": getattr(module, name)
        for prefix, module in modules
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }


FUNCTIONS = public_functions()


def section(docstring: str, title: str) -> list[str]:
    """Lines of one section of a Google-form docstring, its indentation removed."""
    lines = docstring.splitlines()
    if f"{title}:" not in lines:
        return []
    body = []
    for line in lines[lines.index(f"{title}:") + 1 :]:
        if line and not line.startswith(" "):
            break
        body.append(line[4:])
    return body


def documented_arguments(docstring: str) -> list[str]:
    matches = [re.match(r"\*{0,2}(\w+): ", line) for line in section(docstring, "Args")]
    return [match[1] for match in matches if match is not None]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_describes_exactly_the_parameters(name: str) -> None:
    function = FUNCTIONS[name]
    docstring = inspect.getdoc(function)
    assert docstring, f"{name} has no docstring"
    assert documented_arguments(docstring) == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_says_what_returns_and_what_is_raised(name: str) -> None:
    function = FUNCTIONS[name]
    docstring = inspect.getdoc(function) or ""
    if inspect.signature(function).return_annotation != "None":
        assert section(docstring, "Returns"), f"{name} does not say what it returns"
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    # A function that takes and ignores anything has nothing to refuse.
    if any(parameter.kind not in variadic for parameter in parameters):
        assert section(docstring, "Raises"), f"{name} does not say what it raises"


def test_blocks_and_sections_are_read_right() -> None:
    text = (
        "a\n```python\nx = 1\n```\n<!-- not run: needs a GPU -->\n```python\ny\n```\n```sh\nls\n```"
    )
    found = [(block.language, block.text, block.line, block.not_run) for block in blocks_of(text)]
    assert found == [
        ("python", "x = 1", 3, None),
        ("python", "y", 7, "needs a GPU"),
        ("sh", "ls", 10, None),
    ]
    docstring = "Do.\n\nArgs:\n    a: One.\n        b: no.\n    **c: Two.\n\nReturns:\n    d: x"
    assert documented_arguments(docstring) == ["a", "c"]

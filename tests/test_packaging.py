"""What an installed copy of the package must have."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

import mlacast
from tools import make_env

ROOT = Path(__file__).resolve().parent.parent


def test_type_information_is_shipped() -> None:
    assert Path(mlacast.__file__).with_name("py.typed").is_file()


def test_every_folder_of_sources_is_a_package() -> None:
    # A folder without __init__.py would be left out of an installed copy without a word.
    package = Path(mlacast.__file__).parent
    folders = {file.parent for file in package.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_versions_agree() -> None:
    assert metadata.version("mlacast") == mlacast.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert mlacast.__version__ in changelog


@pytest.mark.parametrize("name", mlacast.__all__)
def test_public_name_can_be_imported(name: str) -> None:
    assert getattr(mlacast, name) is not None
    assert name in dir(mlacast)


def test_public_names_are_sorted_and_unique() -> None:
    assert list(mlacast.__all__) == sorted(set(mlacast.__all__))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sparse_mla_encode'"):
        mlacast.sparse_mla_encode  # noqa: B018


def test_extras() -> None:
    extras = metadata.metadata("mlacast").get_all("Provides-Extra") or []
    assert {"triton", "transformers", "cli", "test", "dev"} <= set(extras)


def test_hard_dependencies_are_torch_and_what_writes_dumps() -> None:
    required = metadata.requires("mlacast") or []
    hard = [line for line in required if "extra ==" not in line]
    assert [re.split(r"[^\w-]", line)[0] for line in hard] == ["torch", "safetensors"]


def test_console_script_points_at_the_command_line() -> None:
    scripts = metadata.entry_points(group="console_scripts", name="mlacast")
    assert [script.value for script in scripts] == ["mlacast.cli:main"]


def test_every_requirement_of_the_environment_is_pinned() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = set(re.findall(r"^([a-z0-9-]+)==", text, flags=re.MULTILINE))
    for line in metadata.requires("mlacast") or []:
        if re.search(r"extra == .deepgemm.", line):
            # For a GPU machine's own environment; `make` never installs it.
            assert "deepgemm" not in make_env.EXTRAS.split(",")
            continue
        name = re.split(r"[^\w-]", line)[0].lower().replace("_", "-")
        assert name in pinned | {"mlacast"}, f"{name} is not in constraints.txt"
    unpinned = re.findall(r"^(?!#)(?!.*==).+$", text, flags=re.MULTILINE)
    assert unpinned == []


def test_the_oldest_python_is_the_same_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for line in (
        'requires-python = ">=3.10"',
        'target-version = "py310"',
        'python_version = "3.10"',
    ):
        assert line in project

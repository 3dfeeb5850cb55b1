"""The planted faults: every one still applies, and the script tells killed from survived."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mlacast.dispatch.impls import OPS
from tools import mutation_check
from tools.mutations import CPU, CUDA, Fault

ROOT = Path(__file__).resolve().parents[2]
ALL = (*CPU, *CUDA)
SUBJECTS = {"layers", "distributed", "dispatch", "call_log", "bench", "integrations"}
SHIMS = {"flash_mla", "mate", "flashinfer", "flash_attn", "vllm"}


def test_every_fault_can_be_planted() -> None:
    """Rewritten code takes its faults along: give them the new text."""
    problems = [problem for fault in ALL if (problem := fault.problem(ROOT))]
    assert not problems, "\n".join(problems)


def test_every_fault_names_tests_that_exist() -> None:
    for fault in ALL:
        assert fault.tests, f"{fault.id}: name the tests that should notice"
        for test in fault.tests:
            assert (ROOT / test.partition("::")[0]).exists(), f"{fault.id}: {test} does not exist"
        interpreted = {"_interpreted.py" in test for test in fault.tests}
        assert len(interpreted) == 1, f"{fault.id}: one process is interpreted or is not"


def test_the_lists_reach_every_operation_and_every_part() -> None:
    assert len(CPU) >= 60 and len(CUDA) >= 15
    assert not [name for name, count in Counter(fault.id for fault in ALL).items() if count > 1]
    missing = {*OPS, *SUBJECTS, *SHIMS} - {fault.subject for fault in CPU}
    assert not missing, f"no fault is planted in {sorted(missing)}"
    folders = {fault.file.split("/")[1] for fault in CPU}
    assert folders >= {path.name for path in (ROOT / "mlacast").iterdir() if path.is_dir()} - {
        "__pycache__",
        "cli",
        "testing",
    }


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one function, with a test of its value and one of its sign."""
    # Plugins take longer to load than these tests to run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b  # or + of others\n")
    (tmp_path / "test_sums.py").write_text(
        "from sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    )
    (tmp_path / "test_sign.py").write_text(
        "from sums import add\n\n\ndef test_sign():\n    assert add(2, 3) > 0\n"
    )
    return tmp_path


def _fault(old: str, new: str, *tests: str) -> Fault:
    return Fault("planted", "sums", "a wrong sum", "sums.py", old, new, tests)


def _try(fault: Fault, tree: Path) -> mutation_check.Outcome:
    before = (tree / "sums.py").read_bytes()
    found = mutation_check.try_fault(fault, tree, "cpu", 60.0, named_only=True)
    assert (tree / "sums.py").read_bytes() == before, "the fault was not taken out again"
    return found


def test_a_fault_that_a_test_notices_is_killed(tree: Path) -> None:
    found = _try(_fault("a + b", "a - b", "test_sums.py"), tree)
    assert (found.verdict, found.by) == ("killed", "test_sums.py::test_add")


def test_a_fault_that_no_test_notices_survives(tree: Path) -> None:
    """Another fault in the same second and of the same size must not be taken from a cache."""
    assert _try(_fault("a + b", "a - b", "test_sums.py"), tree).verdict == "killed"
    assert _try(_fault("a + b", "a * b", "test_sign.py"), tree).verdict == "survived"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (_fault("a / b", "a - b", "test_sums.py"), "occurs 0 times"),
        (_fault("+", "-", "test_sums.py"), "occurs 2 times"),
        (_fault("a + b", "a + b", "test_sums.py"), "is the old one"),
        (_fault("a + b", "a +", "test_sums.py"), "pytest said 2"),
        (_fault("a + b", "a - b", "test_nothing.py"), "pytest said 4"),
    ],
)
def test_a_fault_that_proves_nothing_is_called_broken(
    fault: Fault, reason: str, tree: Path
) -> None:
    found = _try(fault, tree)
    assert found.verdict == "broken" and reason in found.by


def test_a_fault_that_ends_the_process_is_killed(tree: Path) -> None:
    """Memory written where none is does not always leave a failing test behind."""
    found = _try(_fault("a + b", "__import__('os').abort()", "test_sums.py"), tree)
    assert found.verdict == "killed" and "signal" in found.by


def test_tests_that_fail_without_a_fault_are_no_proof(tree: Path) -> None:
    (tree / "sums.py").write_text("def add(a, b):\n    return 0\n")
    fault = _fault("return 0", "return 1", "test_sums.py")
    assert mutation_check.control([fault], [tree], 60.0) == "test_sums.py::test_add"


def test_every_file_has_a_wider_set() -> None:
    for fault in CPU:
        for folder in mutation_check.wider_tests(fault, "cpu"):
            assert (ROOT / folder).exists()

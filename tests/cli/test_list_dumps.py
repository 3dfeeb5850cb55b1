"""``mlacast list-dumps``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mlacast.call_log import exported
from mlacast.call_log.settings import Settings
from tests.cli.result import Run, json_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with one dump of every kind."""
    settings = Settings(10, str(tmp_path / "log.txt"), dump_dir=tmp_path / "dumps")

    def quantize_output(x: object) -> object:
        if isinstance(x, str):
            raise ValueError("bad text")
        return x

    call = exported(quantize_output, "mlacast.quantize_output", settings)
    call(torch.zeros(3, 5))
    with pytest.raises(ValueError):
        call("text")
    call(object())
    call(torch.zeros(1))
    last = max(settings.dump_dir.iterdir())
    assert last.name == "session.jsonl"
    dumps = sorted(path for path in settings.dump_dir.iterdir() if path.is_dir())
    (dumps[3] / "metadata.jsonl").write_text("nonsense\n")
    (settings.dump_dir / "cut_off").mkdir()
    return settings.dump_dir


def test_json_tells_every_kind_apart(run: Run, root: Path) -> None:
    outcome = run("list-dumps", str(root), "--json")
    assert outcome.exit_code == 0
    listed = json_of(outcome)
    by_status = {entry["status"]: entry for entry in listed if entry["replayable"]}
    assert [entry["status"] for entry in listed] == [
        "damaged",
        "incomplete",
        "completed",
        "raised",
        "completed",
    ]
    assert by_status["raised"]["note"] == "builtins.ValueError: bad text"
    assert by_status["completed"]["function"] == "mlacast.quantize_output"
    assert by_status["completed"]["bytes"] > 60
    assert by_status["completed"]["arguments"] == [
        {"name": "x", "value": "Tensor float32 [3, 5] strides [5, 1] on cpu"}
    ]
    assert listed[-1]["note"] == "cannot be replayed: x is a builtins:object"
    assert not listed[-1]["replayable"]
    assert "is no JSON" in listed[0]["note"]


def test_names_are_never_cut(run: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    outcome = run("list-dumps", str(root), "--details")
    assert outcome.exit_code == 0
    # One dump a line: name, status, function.
    listed = [line.split() for line in outcome.stdout.splitlines() if not line.startswith(" ")]
    names = sorted(path.name for path in root.iterdir() if path.is_dir())
    assert sorted(words[0] for words in listed[:-1]) == names
    assert ["completed", "mlacast.quantize_output"] in [words[1:3] for words in listed]
    assert "Tensor float32 [3, 5] strides [5, 1] on cpu" in outcome.stdout
    assert "5 dumps in" in outcome.stdout
    assert "Tensor" not in run("list-dumps", str(root)).stdout


def test_one_dump(run: Run, root: Path) -> None:
    first = min(path for path in root.iterdir() if path.is_dir() and path.name != "cut_off")
    assert len(json_of(run("list-dumps", str(first), "--json"))) == 1
    assert "1 dump in" in run("list-dumps", str(first)).stdout


def test_the_folder_of_the_environment_is_the_default(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLACAST_DUMP_DIR", str(root))
    assert len(json_of(run("list-dumps", "--json"))) == 5


def test_a_folder_that_is_not_there(run: Run, tmp_path: Path) -> None:
    outcome = run("list-dumps", str(tmp_path / "nowhere"))
    assert outcome.exit_code == 2
    assert "nowhere is no folder; MLACAST_LOGLEVEL=10 saves calls" in outcome.stderr

"""``mlacast replay``: exit codes, JSON and text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mlacast
from mlacast.call_log import exported
from mlacast.call_log.settings import Settings
from tests.cli.result import Run, json_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the dumps of a call that works and of one that does not."""
    settings = Settings(10, str(tmp_path / "log.txt"), dump_dir=tmp_path / "dumps")
    call = exported(mlacast.quantize_output, "mlacast.quantize_output", settings)
    call(torch.randn(3, 512), mlacast.Mxfp8())
    with pytest.raises(ValueError):
        call(torch.randn(3, 500), mlacast.Mxfp8())
    return settings.dump_dir


def dumps_in(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir())


def forget_the_result(dump: Path) -> None:
    """Leave only what was written before the call."""
    record = dump / "metadata.jsonl"
    record.write_text(record.read_text().splitlines(keepends=True)[0])


def test_one_dump(run: Run, root: Path) -> None:
    outcome = run("replay", str(dumps_in(root)[0]))
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("ran ")
    assert "mlacast.quantize_output" in outcome.stdout


def test_compare(run: Run, root: Path) -> None:
    outcome = run("replay", str(dumps_in(root)[0]), "--compare")
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("same ")
    assert "3 of 3 tensors equal" in outcome.stdout


def test_a_folder_of_dumps_is_compared_in_the_order_of_the_calls(run: Run, root: Path) -> None:
    outcome = run("replay", str(root), "--json")
    assert outcome.exit_code == 0
    answer = json_of(outcome)
    assert answer["passed"] is True
    assert [replay["dump"] for replay in answer["replays"]] == [
        str(path) for path in dumps_in(root)
    ]
    assert [replay["outcome"] for replay in answer["replays"]] == ["same", "same"]
    first, second = answer["replays"]
    assert {tensor["path"] for tensor in first["tensors"]} == {"x", "result.data", "result.sf"}
    assert second["error"].startswith("builtins.ValueError: quantize_output: features must be")
    assert (
        json_of(run("replay", str(root), "--no-compare", "--json"))["replays"][0]["tensors"] == []
    )


def test_a_difference_is_exit_code_1(run: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args: object, **kwargs: object) -> mlacast.QuantizedTensor:
        result = mlacast.quantize_output(*args, **kwargs)  # type: ignore[arg-type]
        result.data.view(torch.uint8)[0, 0, 0] ^= 1
        return result

    monkeypatch.setattr("mlacast.call_log.replay.find_function", lambda name: other)
    outcome = run("replay", str(dumps_in(root)[0]), "--compare")
    assert outcome.exit_code == 1
    assert outcome.stdout.startswith("different ")
    assert "result.data: 1 of 1536 float8_e4m3fn elements differ" in outcome.stdout


def test_a_record_without_a_result_says_why_nothing_is_compared(run: Run, root: Path) -> None:
    dump = dumps_in(root)[0]
    forget_the_result(dump)
    outcome = run("replay", str(dump), "--compare")
    assert outcome.exit_code == 0
    assert "not compared: the recorded call did not come to its end" in outcome.stdout


def test_a_refused_dump_does_not_stop_the_others(run: Run, root: Path) -> None:
    (dumps_in(root)[0] / "inputs.safetensors").write_bytes(b"\x80\x04pickle.")
    outcome = run("replay", str(root), "--json")
    assert outcome.exit_code == 1
    first, second = json_of(outcome)["replays"]
    assert first["outcome"] == "refused"
    assert "which is never loaded" in first["error"]
    assert second["outcome"] == "same"


def test_device_and_backend(run: Run, root: Path) -> None:
    dump = str(dumps_in(root)[0])
    outcome = run("replay", dump, "--device", "cpu", "--backend", "reference", "--json")
    assert outcome.exit_code == 0
    assert json_of(outcome)["replays"][0]["device"] == "cpu"
    outcome = run("replay", dump, "--backend", "hopper")
    assert outcome.exit_code == 1
    assert "UnsupportedError" in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nowhere",), "nowhere is no folder; mlacast_loglevel=10 saves calls"),
        ((".", "--device", "toaster"), "device must be one that works here"),
        ((".", "--rtol", "-1"), "--rtol"),
        ((), "folder"),
    ],
)
def test_wrong_arguments(run: Run, arguments: tuple[str, ...], text: str) -> None:
    outcome = run("replay", *arguments)
    assert outcome.exit_code == 2
    assert text in outcome.stderr.lower()


def test_the_folder_of_the_environment_is_the_default(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLACAST_DUMP_DIR", str(root))
    assert len(json_of(run("replay", "--json"))["replays"]) == 2


def test_an_empty_folder(run: Run, tmp_path: Path) -> None:
    outcome = run("replay", str(tmp_path))
    assert outcome.exit_code == 0
    assert "no dumps in" in outcome.stdout

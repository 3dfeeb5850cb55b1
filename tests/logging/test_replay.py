"""Replays of recorded calls: equal bits, and every kind of difference seen."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mlacast
from mlacast.call_log import replay as module
from mlacast.call_log.errors import DumpError
from mlacast.call_log.replay import find_function, replay_dump
from mlacast.compat.flash_mla import set_v41_placement
from mlacast.compat.flash_mla.placement import v41_placement
from tests.logging.calls import CALLS, prefill_arguments, record
from tests.logging.observed import Log, forge, records_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("case", CALLS)
def test_a_replay_gives_the_same_bits(dump_log: Log, case: str) -> None:
    folder = record(dump_log, *CALLS[case])
    assert records_of(folder)[-1]["opaque"] == []
    report = replay_dump(folder, compare=True)
    assert report.outcome == "same", report
    assert report.passed and report.not_compared is None
    assert all(tensor.different == 0 for tensor in report.tensors)
    results = [tensor for tensor in report.tensors if tensor.path.startswith("result")]
    assert results or case in ("append", "plan")


def test_without_compare_it_only_runs(dump_log: Log) -> None:
    report = replay_dump(record(dump_log, *CALLS["prefill"]))
    assert (report.outcome, report.tensors, report.passed) == ("ran", [], True)


def test_in_place_outputs_are_recorded_before_and_after(dump_log: Log) -> None:
    folder = record(dump_log, *CALLS["append"])
    before, after = records_of(folder)
    assert [line["execution_status"] for line in (before, after)] == ["inputs_saved", "completed"]
    files = [storage["file"] for storage in after["outputs"]["storages"]]
    # Latent and slots are as they were; the cache is not.
    assert sorted(files) == ["inputs.safetensors", "inputs.safetensors", "outputs.safetensors"]
    cache = next(a for a in after["arguments"] if a["name"] == "cache")["value"]["$tensor"]
    assert after["outputs"]["storages"][cache["storage"]]["file"] == "outputs.safetensors"


def test_an_error_replays_to_the_same_error(dump_log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {**prefill_arguments(), "indices": torch.zeros(4, 8, dtype=torch.int32)}
    with pytest.raises(ValueError, match="indices must have shape"):
        dump_log.observed("sparse_mla_prefill")(**arguments)
    (folder,) = dump_log.dumps
    last = records_of(folder)[-1]
    assert last["execution_status"] == "raised"
    assert last["error"]["type"] == "builtins.ValueError"
    report = replay_dump(folder, compare=True)
    assert report.outcome == "same" and report.error is not None
    assert "indices must have shape" in report.error
    monkeypatch.setattr(module, "find_function", lambda _: lambda **kwargs: None)
    report = replay_dump(folder)
    assert report.outcome == "different"
    assert report.differences[0].startswith("no error, recorded builtins.ValueError")


def test_a_call_that_does_not_fit_the_signature_replays_too(dump_log: Log) -> None:
    with pytest.raises(TypeError):
        dump_log.observed("quantize_output")(torch.zeros(2, 512), mlacast.Bf16(), 1, 2, colour=3)
    assert replay_dump(dump_log.dumps[0]).outcome == "same"


def test_an_error_that_was_not_recorded_is_a_failure(
    dump_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record(dump_log, *CALLS["prefill"])

    def fail(**kwargs: Any) -> None:
        raise RuntimeError("broken now")

    monkeypatch.setattr(module, "find_function", lambda _: fail)
    report = replay_dump(folder, compare=True)
    assert (report.outcome, report.error) == ("failed", "builtins.RuntimeError: broken now")
    assert not report.passed


def test_a_killed_process_leaves_a_record_that_replays(tmp_path: Path) -> None:
    program = """
import os, signal, torch, mlacast
import mlacast.ops.quantize_output as module
module.prepare_output = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
x = torch.arange(1024, dtype=torch.float32).view(2, 512)
mlacast.quantize_output(x, mlacast.Mxfp8())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "MLACAST_LOGLEVEL": "10",
            "MLACAST_DUMP_DIR": str(tmp_path),
            "MLACAST_LOGDEST": str(tmp_path / "log.txt"),
        },
    )
    assert done.returncode == -signal.SIGKILL
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert [line["execution_status"] for line in records_of(folder)] == ["inputs_saved"]
    report = replay_dump(folder, compare=True)
    assert (report.outcome, report.recorded_status) == ("ran", "inputs_saved")
    assert report.not_compared == "the recorded call did not come to its end"
    assert "API Call: mlacast.quantize_output (call 1)" in (tmp_path / "log.txt").read_text()


def test_half_a_last_line_does_not_spoil_the_record(dump_log: Log) -> None:
    folder = record(dump_log, *CALLS["prefill"])
    path = folder / "metadata.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert replay_dump(folder).recorded_status == "inputs_saved"


def test_a_dump_can_be_moved(dump_log: Log, tmp_path: Path) -> None:
    folder = record(dump_log, *CALLS["prefill"])
    shutil.move(folder, tmp_path / "elsewhere")
    assert replay_dump(tmp_path / "elsewhere", compare=True).outcome == "same"


def test_device_moves_every_tensor(dump_log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = record(dump_log, *CALLS["prefill into a range"])
    seen: dict[str, Any] = {}
    monkeypatch.setattr(module, "find_function", lambda _: lambda **kwargs: seen.update(kwargs))
    report = replay_dump(folder, device="meta")
    assert report.device == "meta"
    assert {seen[name].device.type for name in ("q", "kv", "indices", "out")} == {"meta"}
    assert seen["rope"].positions.device.type == "meta"


def test_in_a_call_on_a_gpu_what_was_on_the_cpu_stays_there(
    dump_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record(dump_log, *CALLS["prefill"])

    def as_if_on_a_gpu(line: dict[str, Any]) -> None:
        for argument in line["arguments"]:
            if argument["name"] in ("q", "kv"):
                node = argument["value"]["$tensor"]
                node["device"] = line["storages"][node["storage"]]["device"] = "cuda:0"

    forge(folder, as_if_on_a_gpu)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(module, "find_function", lambda _: lambda **kwargs: seen.update(kwargs))
    replay_dump(folder, device="meta")
    places = {name: seen[name].device.type for name in ("q", "kv", "indices")}
    assert places == {"q": "meta", "kv": "meta", "indices": "cpu"}
    if not torch.cuda.is_available():
        with pytest.raises(DumpError, match="recorded on cuda:0, which does not work here"):
            replay_dump(folder)


def test_a_device_that_is_not_here_is_named(dump_log: Log) -> None:
    folder = record(dump_log, *CALLS["prefill"])
    with pytest.raises(DumpError, match="recorded on cpu, .* choose a device, for example cpu"):
        replay_dump(folder, device="xpu:7")


def test_the_recorded_backend_holds_unless_another_is_named(
    dump_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLACAST_BACKEND", "reference")
    folder = record(dump_log, *CALLS["prefill"])
    monkeypatch.delenv("MLACAST_BACKEND")
    seen: list[Any] = []

    def look(backend: str | None, **kwargs: Any) -> None:
        seen.append((backend, os.environ.get("MLACAST_BACKEND")))

    monkeypatch.setattr(module, "find_function", lambda _: look)
    replay_dump(folder)
    replay_dump(folder, backend="triton")
    monkeypatch.setenv("MLACAST_BACKEND", "hopper")
    replay_dump(folder)
    assert seen == [(None, "reference"), ("triton", "triton"), (None, "hopper")]
    assert os.environ["MLACAST_BACKEND"] == "hopper"


def test_the_placement_of_v41_scales_is_recorded(dump_log: Log) -> None:
    try:
        set_v41_placement("inline")
        folder = record(dump_log, *CALLS["flash_mla decode"])
        set_v41_placement("footer")
        # The bytes are read the way they were read then, and the switch is back afterwards.
        assert replay_dump(folder, compare=True).outcome == "same"
        assert v41_placement() == "footer"
    finally:
        set_v41_placement("footer")


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "mlacast",
        "mlacast.KvFormat",
        "mlacast.__version__",
        "mlacast.importlib.import_module",
        "mlacast.ops.quantize_output.run",
        "mlacast.compat.flash_mla.torch",
        "mlacast.compat.flash_mla._checks.check_scale",
        "mlacast.compat.nothing.prefill",
        "mlacast.compat..prefill",
    ],
)
def test_only_public_functions_are_called(name: str) -> None:
    with pytest.raises(DumpError, match="no public function|no function"):
        find_function(name)


def test_public_functions_are_found_undecorated() -> None:
    from mlacast.compat.flash_mla import fused_norm_rope_attn_rope_cast as fused

    prefix = "mlacast.compat.flash_mla.fused_norm_rope_attn_rope_cast"
    assert find_function(f"{prefix}.prefill") is fused.prefill
    assert find_function("mlacast.quantize_output") is mlacast.quantize_output


def test_the_backend_argument_of_another_library_is_left_alone(
    dump_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record(dump_log, *CALLS["mate decode"])
    seen: list[Any] = []

    def look(*args: Any, backend: str, **kwargs: Any) -> None:
        seen.append((backend, os.environ.get("MLACAST_BACKEND")))

    monkeypatch.setattr(module, "find_function", lambda _: look)
    replay_dump(folder, backend="reference")
    assert seen == [("auto", "reference")]

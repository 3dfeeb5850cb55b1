"""What each level writes, and that no level changes what a call does."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mlacast
from mlacast.call_log import exported
from mlacast.call_log.settings import Settings
from mlacast.ops import quantize_output as module
from tests.logging.observed import Log

MakeLog = Callable[..., Log]
LEVELS = (1, 3, 5, 10)


def add(x: torch.Tensor, y: float = 2.0, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.add(x, y, out=out)


def test_level_0_is_the_undecorated_function() -> None:
    assert exported(add, "mlacast.add", Settings(level=0)) is add
    # The suite runs at level 0.
    assert mlacast.quantize_output is module.quantize_output


def test_what_is_no_function_is_never_wrapped(make_log: MakeLog) -> None:
    assert exported(mlacast.Mxfp8, "mlacast.Mxfp8", make_log(10).settings) is mlacast.Mxfp8


def test_level_1_writes_one_line_with_the_name(make_log: MakeLog) -> None:
    log = make_log(1)
    call = log.observe(add, "mlacast.add")
    call(torch.zeros(2))
    before = log.text.count("\n")
    call(torch.zeros(2))
    assert log.text.count("\n") == before + 1
    line = log.text.splitlines()[-1]
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\] mlacast API Call: mlacast.add", line
    )


def test_the_first_call_says_what_runs_here(make_log: MakeLog) -> None:
    log = make_log(1)
    call = log.observe(add, "mlacast.add")
    assert log.text == ""
    call(torch.zeros(2))
    call(torch.zeros(2))
    assert log.text.count("call log, level 1") == 1
    assert f"torch {torch.__version__}" in log.text
    assert f"mlacast {mlacast.__version__}" in log.text


def test_level_3_describes_arguments_defaults_and_results(make_log: MakeLog) -> None:
    log = make_log(3)
    x = torch.zeros(4, 6, dtype=torch.bfloat16)[:, ::2]
    log.observe(add, "mlacast.add")(x, out=None)
    text = log.text
    assert "x = Tensor bfloat16 [4, 3] strides [6, 2] on cpu, not contiguous\n" in text
    assert "y = 2.0 (default)\n" in text
    assert "out = None\n" in text
    assert "result = Tensor bfloat16 [4, 3]" in text
    assert "min" not in text
    assert text.index("API Call: mlacast.add (call 1)") < text.index("API Return: mlacast.add")


def test_level_3_descends_into_objects_and_containers(make_log: MakeLog) -> None:
    log = make_log(3)
    rope = mlacast.Rope(torch.zeros(3, 64), torch.arange(2))
    buffer = mlacast.QuantizedTensor.empty(4, 1, 512, mlacast.Nvfp4(2.0))

    def take(*args: Any, **kwargs: Any) -> None:
        pass

    log.observe(take)(
        rope, [buffer[1:3], {"a": (1, "b")}], kv_format=mlacast.KvFormat.V4, other=object()
    )
    text = log.text
    for line in (
        "args[0] = a Rope",
        "args[0].positions = Tensor int64 [2]",
        "args[1][0] = a QuantizedTensor",
        "args[1][0].data = Tensor uint8 [2, 1, 256]",
        "args[1][0].row_start = 1",
        "args[1][0].format = a Nvfp4",
        "args[1][0].format.global_scale = 2.0",
        "args[1][1]['a'][1] = 'b'",
        "kv_format = KvFormat.V4",
        "other = a builtins:object, not recorded",
        "result = None",
    ):
        assert f"    {line}" in text, line


def test_level_5_adds_statistics(make_log: MakeLog) -> None:
    log = make_log(5)
    nan, inf = float("nan"), float("inf")
    codes = torch.tensor([1.0, -448.0, 448.0, nan]).to(torch.float8_e4m3fn)

    def take(*args: Any) -> None:
        pass

    log.observe(take)(
        torch.tensor([1.0, -3.0, nan, nan, inf, -inf, 8.0]),
        codes,
        torch.tensor([0, 255], dtype=torch.uint8),
        torch.zeros(0, 4),
        torch.tensor([nan]),
        torch.ones(3, 1).expand(3, 5),
    )
    lines = log.text.splitlines()
    found = {
        lines[index].split(" = ")[0].strip(): lines[index + 1].strip()
        for index in range(len(lines) - 1)
        if " = Tensor" in lines[index]
    }
    assert found == {
        "args[0]": "min -3 max 8 mean 2 nan 2 inf 2",
        "args[1]": "min -448 max 448 mean 0.333333 nan 1 inf 0",
        "args[2]": "min 0 max 255 mean 127.5 nan 0 inf 0",
        "args[3]": "empty",
        "args[4]": "no finite element nan 1 inf 0",
        "args[5]": "min 1 max 1 mean 1 nan 0 inf 0",
    }


def test_only_level_10_dumps(make_log: MakeLog) -> None:
    for level in (1, 3, 5):
        make_log(level).observe(add)(torch.zeros(2))
    assert make_log(10).dumps == []
    log = make_log(10)
    log.observe(add)(torch.zeros(2))
    assert len(log.dumps) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_results_are_the_very_objects_and_errors_pass_through(
    make_log: MakeLog, level: int
) -> None:
    log = make_log(level)
    marker = object()
    assert log.observe(lambda value: value)(marker) is marker

    def fail(x: int) -> None:
        raise KeyError("own words")

    with pytest.raises(KeyError, match="own words"):
        log.observe(fail)(1)
    if level >= 3:
        assert "API Error: mlacast.quantize_output (call 1)" in log.text
        assert "KeyError: 'own words'" in log.text
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        log.observe(fail)()


@pytest.mark.parametrize("level", LEVELS)
def test_a_call_inside_a_call_is_a_part_of_it(make_log: MakeLog, level: int) -> None:
    log = make_log(level)
    inner = log.observe(add, "mlacast.inner")
    outer = log.observe(lambda x: inner(x), "mlacast.outer")
    outer(torch.zeros(2))
    assert "mlacast.outer" in log.text
    assert "mlacast.inner" not in log.text
    inner(torch.zeros(2))
    assert "mlacast.inner" in log.text


def test_a_failed_call_ends(make_log: MakeLog) -> None:
    log = make_log(1)

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        log.observe(fail)()
    log.observe(add, "mlacast.next")(torch.zeros(1))
    assert "mlacast.next" in log.text


def test_threads_are_logged_on_their_own(make_log: MakeLog) -> None:
    log = make_log(1)
    inside, done = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert done.wait(10)

    thread = threading.Thread(target=log.observe(wait, "mlacast.wait"))
    thread.start()
    assert inside.wait(10)
    log.observe(add, "mlacast.meanwhile")(torch.zeros(1))
    done.set()
    thread.join()
    assert "mlacast.meanwhile" in log.text


def test_the_filter_leaves_the_name_only(make_log: MakeLog) -> None:
    log = make_log(10, exclude=("noisy",))
    log.observe(add, "mlacast.noisy")(torch.zeros(2))
    assert "API Call: mlacast.noisy\n" in log.text
    assert "Tensor" not in log.text
    assert log.dumps == []
    log.observe(add, "mlacast.other")(torch.zeros(2))
    assert "API Call: mlacast.other (call 1)" in log.text
    assert len(log.dumps) == 1


@pytest.mark.parametrize("level", [3, 5, 10])
def test_a_failure_to_log_does_not_reach_the_caller(
    make_log: MakeLog, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the log is broken")

    monkeypatch.setattr("mlacast.call_log.tree.TreeEncoder.encode", broken)
    log = make_log(level)
    assert log.observe(add, "mlacast.add")(torch.ones(2)).tolist() == [3.0, 3.0]
    assert "call of mlacast.add could not be logged: RuntimeError: the log is broken" in log.text


def test_a_folder_that_cannot_be_written_does_not_reach_the_caller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    settings = Settings(10, str(file / "log.txt"), dump_dir=file / "dumps")
    assert exported(add, "mlacast.add", settings)(torch.ones(1)).item() == 3.0
    assert "mlacast: cannot log to" in capsys.readouterr().err


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_streams(stream: str, capsys: pytest.CaptureFixture[str]) -> None:
    exported(add, "mlacast.add", Settings(1, stream))(torch.zeros(1))
    captured = capsys.readouterr()
    texts = {"stdout": captured.out, "stderr": captured.err}
    assert "API Call: mlacast.add" in texts.pop(stream)
    assert texts.popitem()[1] == ""


def test_percent_i_is_the_process(tmp_path: Path) -> None:
    import os

    settings = Settings(1, str(tmp_path / "new" / "log_%i.txt"))
    exported(add, "mlacast.add", settings)(torch.zeros(1))
    assert "mlacast.add" in (tmp_path / "new" / f"log_{os.getpid()}.txt").read_text()


def test_signature_docstring_and_name_survive(make_log: MakeLog) -> None:
    import inspect

    call = make_log(1).observed("quantize_output")
    assert inspect.signature(call) == inspect.signature(module.quantize_output)
    assert call.__doc__ == module.quantize_output.__doc__
    assert (call.__module__, call.__qualname__) == ("mlacast", "quantize_output")


def test_a_logging_function_pickles_by_its_public_name(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_log(1).observed("quantize_output")
    monkeypatch.setattr(mlacast, "quantize_output", call, raising=False)
    assert pickle.loads(pickle.dumps(call)) is call


def test_logging_leaves_no_graph_and_no_gradient(make_log: MakeLog) -> None:
    x = torch.ones(3, requires_grad=True)
    result = make_log(10).observe(add)(x)
    result.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 1.0, 1.0]


def test_statistics_are_no_part_of_a_graph(make_log: MakeLog) -> None:
    log = make_log(5)

    def save(x: Any) -> Any:
        raise AssertionError("something was saved for backward")

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(save, save):
        assert log.observe(lambda x: x)(x) is x
    assert "could not be logged" not in log.text
    assert log.text.count("min 1 max 1 mean 1") == 2

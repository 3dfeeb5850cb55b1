"""torch.compile, CUDA graph capture and fake tensors: nothing breaks, nothing synchronises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mlacast
from tests.logging.calls import prefill_arguments
from tests.logging.observed import Log

MakeLog = Callable[..., Log]

# What makes the host wait for a device, or copies to it.
SYNCHRONISING = ("_local_scalar_dense", "_to_copy", "copy_", "nonzero", "item", "equal")


class NoData(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on any operator that reads data on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        assert name not in SYNCHRONISING, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def look(x: torch.Tensor, buffer: mlacast.QuantizedTensor) -> torch.Tensor:
    return x


def arguments() -> tuple[torch.Tensor, mlacast.QuantizedTensor]:
    return torch.ones(4, 6), mlacast.QuantizedTensor.empty(4, 1, 512, mlacast.Mxfp8())


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the current stream is being captured."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize("level", [1, 3])
def test_low_levels_never_read_data(make_log: MakeLog, level: int) -> None:
    call = make_log(level).observe(look)
    x, buffer = arguments()
    with NoData():  # type: ignore[no-untyped-call]
        assert call(x, buffer) is x


def test_the_check_for_reads_sees_them(make_log: MakeLog) -> None:
    log = make_log(5)
    call = log.observe(look)
    x, buffer = arguments()
    with NoData():  # type: ignore[no-untyped-call]
        assert call(x, buffer) is x
    assert "no statistics" in log.text or "could not be logged: AssertionError" in log.text


@pytest.mark.parametrize("level", [1, 3, 5, 10])
def test_under_capture_no_level_reads_data(make_log: MakeLog, level: int, capturing: None) -> None:
    log = make_log(level)
    call = log.observe(look)
    x, buffer = arguments()
    with NoData():  # type: ignore[no-untyped-call]
        assert call(x, buffer) is x
    assert "could not be logged" not in log.text
    assert "API Call: mlacast.quantize_output" in log.text
    if level >= 5:
        assert "no statistics: a graph is being captured" in log.text
        assert "min" not in log.text
    if level == 10:
        assert log.dumps == []
        assert "not dumped: a graph is being captured" in log.text
        assert [event["execution_status"] for event in log.events] == ["skipped"]


def test_after_capture_dumps_go_on(make_log: MakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log = make_log(10)
    call = log.observe(look)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        call(*arguments())
    assert log.dumps == []
    call(*arguments())
    assert len(log.dumps) == 1


def test_cuda_is_not_started_by_logging(make_log: MakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> bool:
        raise AssertionError("asking a stream starts CUDA")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", start)
    log = make_log(10)
    log.observe(look)(*arguments())
    assert "could not be logged" not in log.text and len(log.dumps) == 1


def test_other_devices_are_asked_in_their_own_module(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
    log = make_log(10)
    log.observe(look)(*arguments())
    assert log.dumps == []
    assert "not dumped: a graph is being captured" in log.text


@pytest.mark.parametrize("level", [1, 10])
def test_torch_compile_sees_one_whole_graph(make_log: MakeLog, level: int) -> None:
    log = make_log(level)
    call = log.observed("sparse_mla_prefill")
    given = prefill_arguments()

    def step(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = call(q * 2, kv, indices, sm_scale=0.05)[0]
        return out + 1

    tensors = given["q"], given["kv"], given["indices"]
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    actual = compiled(*tensors)
    assert log.text == ""
    assert torch.equal(actual, step(*tensors))
    assert "API Call: mlacast.sparse_mla_prefill" in log.text


@pytest.mark.parametrize("level", [3, 5, 10])
def test_fake_and_meta_tensors(make_log: MakeLog, level: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    log = make_log(level)
    call = log.observed("quantize_output")
    with FakeTensorMode():
        result = call(torch.ones(3, 512), mlacast.Mxfp8())
    assert result.data.shape == (3, 1, 512)
    assert "API Return: mlacast.quantize_output" in log.text
    meta = log.observe(lambda x: x)(torch.ones(3, device="meta"))
    assert meta.device.type == "meta"
    assert "Tensor float32 [3] strides [1] on meta" in log.text

"""The function that is written for a signature, through public functions on a fake GPU: stream,
device, scratch and threads of its launches.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mlacast
from mlacast.ops import known_calls
from mlacast.ops.known_call import KnownCall, Repeated
from mlacast.ops.repeatable import repeatable
from tests.kernels.fake_gpu import FakeGpu, fake_gpu

BF16 = torch.bfloat16
V4 = mlacast.KvFormat.V4


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    pytest.importorskip("triton", reason="the GPU backends need triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter launches nothing")
    monkeypatch.setenv("MLACAST_BACKEND", "triton")
    with fake_gpu(monkeypatch) as fake:
        yield fake


def _decode(splits: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros(2, 3, 512, dtype=BF16)
    q, indices = torch.zeros(2, 3, 512, dtype=BF16), torch.zeros(2, 4, dtype=torch.int32)
    options: dict[str, Any] = {"kv_format": V4, "sm_scale": 0.5, "num_splits": splits}
    _, lse = mlacast.sparse_mla_decode(q, _CACHE, indices, out=out, **options)
    return q, lse


_CACHE = V4.allocate(2, 4)


def test_stream_and_device_are_those_of_the_moment(gpu: FakeGpu) -> None:
    for _ in range(3):
        _decode()
    gpu.runs.clear()
    gpu.streams = [21, 22]
    _decode()
    gpu.streams = [31, 32]
    _decode()
    assert [arguments[3] for _, arguments in gpu.runs] == [21, 21, 31, 31]
    gpu.runs.clear()
    gpu.device = 1
    _decode()
    assert [arguments[3] for _, arguments in gpu.runs] == [31, 31], "tensors lie on device 0"


def test_no_straight_launch_while_another_device_is_current(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch needs the device to be made current, which the long way does."""
    from mlacast.kernels.common.device import on_device_of as plain

    entered: list[torch.device] = []

    def on_device_of(device: torch.device) -> Any:
        entered.append(device)
        return plain(device)

    for _ in range(3):
        _decode()
    monkeypatch.setattr("mlacast.kernels.common.launch.on_device_of", on_device_of)
    _decode()
    assert entered == []
    gpu.device = 1
    _decode()
    assert entered == [torch.device("cpu")]


def test_scratch_is_of_the_call_and_lives_until_the_launch(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlacast.kernels.common import launch, launch_code

    plain = launch_code.allocator(torch.device("cpu"))
    made: list[tuple[int, weakref.ref[torch.Tensor]]] = []
    at_launch: list[bool] = []

    def allocate(sizes: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor = plain(sizes, strides, dtype)
        made.append((tensor.data_ptr(), weakref.ref(tensor)))
        return tensor

    class Runs(list[Any]):
        def append(self, run: Any) -> None:
            at_launch.append(bool(made) and made[-1][1]() is not None)
            super().append(run)

    for module in (launch, launch_code):
        monkeypatch.setattr(module, "allocator", lambda device: allocate)
    for _ in range(3):
        _decode()
    gpu.runs, addresses = Runs(), []
    keep = []
    for _ in range(3):
        made.clear()
        keep.append(torch.zeros(50_000))
        _decode()
        scratch = made[-1][0]
        addresses.append(scratch)
        assert all(scratch in arguments for _, arguments in gpu.runs[-2:])
    assert at_launch == [True] * 6
    assert not any(reference() is not None for _, reference in made[-1:]), "nothing is kept"


def test_threads_get_their_own_tensors(gpu: FakeGpu) -> None:
    for _ in range(3):
        _decode(splits=1)
    gpu.runs.clear()
    kept: list[tuple[int, int]] = []

    def work() -> None:
        for _ in range(200):
            q, lse = _decode(splits=1)
            kept.append((q.data_ptr(), lse.data_ptr()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launched = {arguments[9] for _, arguments in gpu.runs}
    assert len(gpu.runs) == len(kept) == 800
    for q, lse in kept:
        assert q in launched
        assert any(arguments[9] == q and lse in arguments for _, arguments in gpu.runs)


def test_the_last_signatures_are_tried_first(gpu: FakeGpu) -> None:
    for splits in itertools.chain(range(1, 12), (1, 1, 1)):
        for _ in range(3):
            _decode(splits)
    recent = known_calls.PUBLIC._recent["sparse_mla_decode"]
    assert len(recent) == known_calls.MAX_RECENT
    front = recent[0]
    _decode(11)
    assert known_calls.PUBLIC._recent["sparse_mla_decode"][1] is front


def test_calls_of_several_operations_are_not_kept(gpu: FakeGpu) -> None:
    calls = []

    @repeatable("two decodes")
    def twice() -> torch.Tensor:
        _decode(1)
        return _decode(1)[1]

    @repeatable("one decode")
    def once(
        q: torch.Tensor, indices: torch.Tensor, *, kv_format: mlacast.KvFormat
    ) -> torch.Tensor:
        calls.append(1)
        _, lse = mlacast.sparse_mla_decode(q, _CACHE, indices, kv_format=kv_format, sm_scale=0.5)
        return lse

    for _ in range(4):
        gpu.runs.clear()
        twice()
        assert len(gpu.runs) == 2
    q, indices = torch.zeros(2, 3, 512, dtype=BF16), torch.zeros(2, 4, dtype=torch.int32)
    for _ in range(4):
        once(q, indices, kv_format=V4)
    assert len(calls) == 4, "the cache is no argument, so nobody knows where it lies"
    known = KnownCall(None, ())
    known_calls.PUBLIC.keep("op", (), known, [Repeated(known, (), ())], None)
    assert known_calls.PUBLIC.repeat("op", ()) is None, "there is no plan"

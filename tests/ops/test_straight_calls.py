"""The function that is written for a signature: when it applies and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import mlacast
from mlacast.ops import known_calls, signature
from mlacast.ops.known_call import KnownCall
from mlacast.ops.schedule import SparseDecodeSchedule
from mlacast.ops.signature import described_by_type
from mlacast.ops.straight_calls import Pair, Straight, write_call

BF16 = torch.bfloat16
V4 = mlacast.KvFormat.V4


class FakePlan:
    """Keeps the addresses of every launch."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, ...]] = []
        self.ready = True

    def __call__(self, addresses: list[int], /) -> None:
        self.launched.append(tuple(addresses))

    def launch(self, *addresses: int) -> None:
        self.launched.append(addresses)

    def is_ready(self) -> bool:
        return self.ready

    def empty(self, sizes: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype)


def _write(*values: Any, plan: FakePlan | None = None, **options: Any) -> Straight | None:
    """A function of ``values`` that launches with no tensor unless ``options`` say so."""
    defaults = {"tensors": (), "pairs": (), "fresh": (), "result": None}
    return write_call(values, plan or FakePlan(), **{**defaults, **options})


def _written(*values: Any, **options: Any) -> Straight:
    straight = _write(*values, **options)
    assert straight is not None
    return straight


@described_by_type("plan", "inner.device")
@dataclass
class _Opaque:
    """Looked at in every call, two of its parts also for a repeated one."""

    plan: object
    inner: torch.Tensor
    rest: int = 0


def _tensors() -> list[torch.Tensor]:
    plain = torch.zeros(4, 8)
    odd = torch.zeros(40)[1:33].view(4, 8)
    return [
        plain,
        torch.zeros(4, 8),
        plain[:2],
        plain.T,
        torch.zeros(4, 16)[:, ::2],
        plain.double(),
        plain.to("meta"),
        odd,
        torch.zeros(40)[4:36].view(4, 8),
        torch.nn.Parameter(torch.zeros(4, 8)),
        torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False),
        torch.zeros(4, 8).as_subclass(_Subclass),
        torch.zeros(0, 8),
    ]


class _Subclass(torch.Tensor):
    """A tensor that no table knows."""


def _buffers() -> list[mlacast.QuantizedTensor]:
    buffer = mlacast.QuantizedTensor.empty(5, 2, 512, mlacast.Mxfp8())
    again = mlacast.QuantizedTensor.empty(5, 2, 512, mlacast.Mxfp8())
    other = mlacast.QuantizedTensor.empty(
        5, 2, 512, mlacast.Fp8Group(32, "ue8m0_packed", "mn_major")
    )
    unknown = mlacast.QuantizedTensor(buffer.data, buffer.sf, mlacast.Mxfp8(), total_tokens=6)
    return [buffer, again, other, unknown, buffer[:3], buffer[1:4], buffer[2:]]


def _things() -> list[Any]:
    """Values of all kinds, most of them alike in something."""
    schedules = [
        SparseDecodeSchedule(2, 3, 4, V4, extra, None, splits, False)
        for extra, splits in ((0, 1), (0, 2), (5, 1))
    ]
    table, positions = torch.zeros(9, 64), torch.zeros(2, dtype=torch.int64)
    ropes = [
        mlacast.Rope(table, positions),
        mlacast.Rope(table, positions, "half"),
        mlacast.Rope(table, positions, "interleaved", False),
        mlacast.Rope(table, positions.int()),
        mlacast.Rope(table[:5], positions),
    ]
    scale = torch.ones(1)
    formats = [
        mlacast.Bf16(),
        mlacast.Mxfp8(),
        mlacast.Mxfp8("chunk32"),
        mlacast.Fp8Tensor(0.5),
        mlacast.Fp8Tensor(0.25),
        mlacast.Fp8Tensor(scale),
        mlacast.Nvfp4(scale),
        mlacast.Fp8Group(128),
        mlacast.Fp8Group(64),
        mlacast.Fp8Group(64, "float32_pow2"),
        mlacast.Fp8Group(64, "float32", "mn_major"),
    ]
    numbers = [0, 0.0, -0.0, False, 1, 1.0, True, "1", "", None, torch.float32, BF16]
    kv_formats = [V4, mlacast.KvFormat.V41, mlacast.KvFormat.from_name("V4")]
    lists = [[1, 2], (1, 2), [1, 2, 3], [scale], [scale, scale], [torch.ones(1), scale], []]
    return [
        *numbers, *_tensors(), *_buffers(), *ropes, *formats, *schedules, *kv_formats, *lists,
        object(),
    ]  # fmt: skip


def _same(first: Any, second: Any) -> bool:
    """Whether the tables take two values for the same."""
    calls = known_calls.Calls()
    calls.remember("op", [first], KnownCall(None, ()))
    return calls.find("op", [second]) is not None


def test_it_applies_where_the_tables_say_so() -> None:
    """Facts and metadata are compared in another way there."""
    things = _things()
    applied = 0
    for first in things:
        straight = _write(first)
        assert (straight is None) == (signature.describe("op", [first]) is None)
        if straight is None:
            continue
        for second in things:
            assert (straight(second) is not None) == _same(first, second), (first, second)
            applied += straight(second) is not None
    assert applied > len(things), "different objects are taken for the same"
    assert not _written(float("nan"))(float("nan")), "it equals nothing"


def test_a_tensor_that_comes_again() -> None:
    one, two = torch.zeros(3), torch.zeros(3)
    twice, apart = _written(one, [one]), _written(one, [two])
    assert twice(two, [two]) and not twice(one, [two])
    assert apart(two, [one]) and not apart(one, [one])


def test_an_object_described_by_type() -> None:
    """A part that is named decides, the others are looked at by nobody."""
    straight = _written(_Opaque((1, 2), torch.zeros(1)))
    assert straight(_Opaque((1, 2), torch.zeros(5), rest=7))
    assert not straight(_Opaque((1, 3), torch.zeros(1)))
    assert not straight(_Opaque((1, 2), torch.zeros(1, device="meta")))


def test_a_tensor_that_changed_in_place() -> None:
    tensor = torch.zeros(4, 8)
    straight = _written(tensor)
    assert straight(tensor)
    tensor.resize_(4, 4)
    assert not straight(tensor)
    tensor.resize_(4, 8)
    tensor.data = torch.zeros(8, 4).T
    assert not straight(tensor)


def test_addresses_are_those_of_the_call() -> None:
    plan = FakePlan()
    x, lists = torch.zeros(6, 1, 8), [torch.zeros(3), torch.zeros(5)]
    tensors = (x[:, 0], x[2:], lists[1], x[..., :0])
    straight = _written(x, lists, plan=plan, tensors=tensors)
    for shift in (0, 8):
        y = torch.zeros(6 * 8 + 8)[shift:].as_strided((6, 1, 8), x.stride())
        others = [torch.zeros(3), torch.zeros(5)]
        assert straight(y, others) is True
        start = y.data_ptr()
        assert plan.launched[-1] == (start, start + 2 * 8 * 4, others[1].data_ptr(), 0)


def test_results_are_new_and_keep_their_form() -> None:
    plan = FakePlan()
    x, fresh = torch.zeros(4, 8), torch.zeros(2, 1, 3)
    shown = fresh.transpose(1, 2)
    options: dict[str, Any] = {"tensors": (fresh, x), "fresh": (fresh,)}
    seen: list[torch.Tensor] = []
    result, after = (x, shown), [(seen.append, shown)]
    straight = _written(x, plan=plan, result=result, after=after, **options)
    y = torch.zeros(4, 8)
    (first_y, first), (_, second) = straight(y), straight(y)
    assert first_y is y
    assert (first.shape, first.stride()) == (shown.shape, shown.stride())
    assert first.data_ptr() != second.data_ptr()
    assert plan.launched == [(first.data_ptr(), y.data_ptr()), (second.data_ptr(), y.data_ptr())]
    assert [tensor is made for tensor, made in zip(seen, (first, second), strict=True)] == [
        True
    ] * 2
    assert _written(x, result=fresh, **options)(y).shape == fresh.shape
    assert _written(x, result=x)(y) is y


def test_what_cannot_be_written_down() -> None:
    memory = torch.zeros(2, 4, 8)
    x, y = memory[0], memory[1]
    part = x[1:]
    assert _write(x, y, tensors=(x, y)) is not None
    assert _write(x, y, tensors=(part,)) is None, "it may be a part of either"
    assert _write(x, tensors=(torch.zeros(4, 8),)) is None, "made from values"
    assert _write(x, result=torch.zeros(1)) is None
    assert _write(x, result=(x, object())) is None
    new = torch.zeros(4, 8)
    assert _write(x, tensors=(new,), fresh=(new,), result=new[1:]) is None, "a part is not all"
    assert _write(x, tensors=(new,), fresh=(new,), result=new.T) is None, "another order"


@pytest.mark.parametrize("distance", range(-96, 97, 32))
def test_outputs_may_not_overlap(distance: int) -> None:
    storage = torch.zeros(512, dtype=torch.uint8)
    start = -storage.data_ptr() % 64 + 128
    plan = FakePlan()
    output, other = (torch.zeros(64, dtype=torch.uint8) for _ in range(2))
    pairs = [Pair(0, 64, 1, 32)]
    other = other[:32]
    straight = _written(output, other, plan=plan, tensors=(output, other), pairs=pairs)
    assert straight(output, other)
    apart = storage[start : start + 64]
    near = storage[start + distance : start + distance + 32]
    meets = bool(set(range(64)) & set(range(distance, distance + 32)))
    assert (straight(apart, near) is None) == meets


def test_nothing_happens_while_the_plan_is_not_ready() -> None:
    plan = FakePlan()
    straight = _written(torch.zeros(3), plan=plan)
    plan.ready = False
    assert straight(torch.zeros(3)) is None
    assert plan.launched == []


def test_the_environment_is_read_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    straight = _written(1)
    assert straight(1)
    monkeypatch.setenv("MLACAST_BACKEND", "triton")
    assert straight(1) is None
    monkeypatch.delenv("MLACAST_BACKEND")
    for value, applies in (("1", False), ("0", True), ("", True)):
        monkeypatch.setenv("MLACAST_VALIDATE", value)
        assert (straight(1) is not None) == applies


def test_listeners_see_the_operator() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    straight, inner = _written(1), _written(1, is_public=False)
    dispatch_mode: Any = TorchDispatchMode
    contexts = (TorchFunctionMode(), dispatch_mode(), torch.profiler.profile())
    for context in contexts:
        with context:
            assert straight(1) is None
        assert straight(1)
    assert inner(1)
    answers: list[object] = []
    x = torch.zeros(2)

    def ask(y: torch.Tensor) -> torch.Tensor:
        answers.append(straight(1))
        return y * 2

    torch.func.vmap(ask)(x)
    torch.jit.trace(ask, x, check_trace=False)  # type: ignore[no-untyped-call]
    make_fx(ask)(x)
    assert answers
    assert set(answers) == {None}

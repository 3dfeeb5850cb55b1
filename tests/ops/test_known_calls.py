"""A call that was made before is checked, dispatched and launched as if it were the first."""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import mlacast
from mlacast.compat.flash_mla import fused_norm_rope_attn_rope_cast as fused
from mlacast.ops import known_calls, signature
from mlacast.ops.known_call import KnownCall
from tests.kernels.fake_gpu import FakeGpu, fake_gpu
from tests.ops.repeatable_calls import (
    BF16,
    FUNCTIONS,
    ON_FAKE_GPU,
    Arguments,
    decode_arguments,
    fused_decode_arguments,
    prefill_arguments,
)
from tests.ops.torch_calls import operators_of


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    known_calls.PUBLIC.clear()
    known_calls.OPERATORS.clear()
    yield
    known_calls.PUBLIC.clear()
    known_calls.OPERATORS.clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as fake:
        yield fake


def _changes(value: Any) -> Iterator[Any]:
    """Values to put in the place of a good one; most of them are wrong."""
    yield from (object(), None, True, 1, -1, 0.0, float("nan"), "x", [value], torch.zeros(2, 4))
    for tensor in value if isinstance(value, (list, tuple)) else [value]:
        if not isinstance(tensor, torch.Tensor):
            continue
        changed = [
            tensor.to(torch.float64),
            tensor[:1],
            tensor[..., :1],
            tensor.unsqueeze(0),
            tensor.repeat_interleave(2, -1)[..., ::2],
            tensor.to("meta"),
            torch.nn.Parameter(tensor, requires_grad=False),
            tensor.as_subclass(_Subclass),
            torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape),
        ]
        for new in changed:
            if isinstance(value, (list, tuple)):
                yield type(value)(new if old is tensor else old for old in value)
            else:
                yield new
    if isinstance(value, mlacast.QuantizedTensor):
        yield value[:1]
        yield mlacast.QuantizedTensor.empty(2, 1, value.features, mlacast.Bf16())
    if isinstance(value, mlacast.Rope):
        yield mlacast.Rope(value.cos_sin_cache, value.positions[:1])
        yield mlacast.Rope(value.cos_sin_cache.double(), value.positions)


class _Subclass(torch.Tensor):
    """A tensor of a type that the tables have never seen."""


def _outcome(function: Callable[..., Any], arguments: Arguments) -> tuple[str, str]:
    """How a call ends: the type and text of its error, if any."""
    try:
        function(**arguments)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        return type(error).__name__, str(error).partition(" at 0x")[0]
    return "", ""


@pytest.mark.parametrize(("function", "make"), FUNCTIONS)
def test_a_known_call_does_not_hide_an_error(
    function: Callable[..., Any], make: Callable[[], Arguments], good_calls: int = 1
) -> None:
    good = make()
    assert set(good) == set(inspect.signature(function).parameters), "a parameter is not tried"
    refused = 0
    for name, value in good.items():
        for change in _changes(value):
            changed = {**good, name: change}
            known_calls.PUBLIC.clear()
            known_calls.OPERATORS.clear()
            first = _outcome(function, changed)
            for _ in range(good_calls):
                assert _outcome(function, good) == ("", "")
            assert _outcome(function, changed) == first, (name, change)
            assert _outcome(function, changed) == first, (name, change)
            refused += first != ("", "")
    assert refused > 2 * len(good), "most changes are wrong"


@pytest.mark.parametrize(("function", "make"), ON_FAKE_GPU)
def test_on_a_gpu_a_known_call_hides_no_error_either(
    function: Callable[..., Any],
    make: Callable[[], Arguments],
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLACAST_BACKEND", "triton")
    # The third call of a signature is made by a function of its own.
    test_a_known_call_does_not_hide_an_error(function, make, good_calls=3)
    assert gpu.runs


@pytest.mark.parametrize("with_plan", [False, True])
def test_overlap_is_looked_at_every_time(with_plan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(2, 2 * 3 * 512, dtype=BF16)
    q, apart = memory[0].view(2, 3, 512), memory[1].view(2, 3, 512)
    arguments: Arguments = {"kv": torch.zeros(6, 512, dtype=BF16), "sm_scale": 0.5}
    arguments["indices"] = torch.zeros(2, 4, dtype=torch.int32)

    def calls() -> None:
        for _ in range(4):
            mlacast.sparse_mla_prefill(q, out=apart, **arguments)
            for _ in range(2):
                with pytest.raises(ValueError, match="out must not share memory with q"):
                    mlacast.sparse_mla_prefill(q, out=q, **arguments)
            shifted = memory.flatten()[512 : 512 + q.numel()].view(2, 3, 512)
            with pytest.raises(ValueError, match="out must not share memory with q"):
                mlacast.sparse_mla_prefill(q, out=shifted, **arguments)

    if not with_plan:
        calls()
        return
    monkeypatch.setenv("MLACAST_BACKEND", "triton")
    with fake_gpu(monkeypatch) as gpu:
        calls()
        assert len(gpu.runs) == 4


@pytest.mark.parametrize(("function", "make"), ON_FAKE_GPU)
def test_modes_see_the_operator_of_a_known_call(
    function: Callable[..., Any],
    make: Callable[[], Arguments],
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLACAST_BACKEND", "triton")
    arguments = make()
    for _ in range(3):
        function(**arguments)
    gpu.runs.clear()
    names = [call.operator.name() for call in operators_of(lambda: function(**arguments))]
    assert any(function.__name__ in name for name in names), names
    assert gpu.runs
    with torch.profiler.profile() as profile:
        function(**arguments)
    assert any(event.name.startswith("mlacast::") for event in profile.events())


def test_the_environment_is_read_every_time(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = prefill_arguments()
    runs = []
    for backend in ("triton", "reference") * 4:
        monkeypatch.setenv("MLACAST_BACKEND", backend)
        mlacast.sparse_mla_prefill(**arguments)
        runs.append(len(gpu.runs))
    assert runs == [1, 1, 2, 2, 3, 3, 4, 4]
    arguments["indices"] = torch.full((2, 4), 99, dtype=torch.int32)
    mlacast.sparse_mla_prefill(**arguments)
    monkeypatch.setenv("MLACAST_VALIDATE", "1")
    with pytest.raises(ValueError, match="indices must have values in"):
        mlacast.sparse_mla_prefill(**arguments)


def test_the_placement_of_scales_is_read_every_time(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlacast.compat.flash_mla import set_v41_placement

    monkeypatch.setenv("MLACAST_BACKEND", "triton")
    arguments = {**fused_decode_arguments(), "k_cache": mlacast.KvFormat.V41.allocate(2, 4)}
    arguments["extra_k_cache"] = mlacast.KvFormat.V41.allocate(2, 4)
    variants = []
    try:
        for placement in ("footer", "inline") * 4:
            set_v41_placement(placement)
            gpu.runs.clear()
            fused.decode(**arguments)
            variants.append([kernel.function for kernel, _ in gpu.runs])
    finally:
        set_v41_placement("footer")
    assert variants == variants[:2] * 4
    assert variants[0][0] != variants[1][0]


def test_the_operator_reads_the_placement_too(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called without a placement, torch.ops.mlacast takes the setting of the moment."""
    from mlacast.compat.flash_mla import set_v41_placement

    monkeypatch.setenv("MLACAST_BACKEND", "triton")
    cache = mlacast.KvFormat.V41.allocate(2, 4)
    arguments = {**fused_decode_arguments(), "k_cache": cache, "extra_k_cache": cache.clone()}
    name = "fused_norm_rope_attn_rope_cast_decode"
    call = next(
        call
        for call in operators_of(lambda: fused.decode(**arguments))
        if name in call.operator.name()
    )
    places = [argument.name for argument in call.operator._schema.arguments]
    values = list(call.args)
    values[places.index("v41_placement")] = None
    variants = []
    try:
        for placement in ("footer", "inline", "footer", "inline"):
            set_v41_placement(placement)
            gpu.runs.clear()
            call.operator(*values)
            variants.append([kernel.function for kernel, _ in gpu.runs])
    finally:
        set_v41_placement("footer")
    assert variants[:2] == variants[2:]
    assert variants[0][0] != variants[1][0]


def test_a_repeated_call_keeps_the_sign_of_a_zero(gpu: FakeGpu) -> None:
    """Calls are repeated until they are written out; what they launch has the number given."""
    arguments = {**prefill_arguments(), "backend": "triton"}
    launched = []
    for sm_scale in (0.0, 0.0, 0.0, 0.0, -0.0, 0.0):
        gpu.runs.clear()
        mlacast.sparse_mla_prefill(**{**arguments, "sm_scale": sm_scale})
        _, values = gpu.runs[0]
        launched.append(sum(str(value) == "-0.0" for value in values if type(value) is float))
    assert known_calls.PUBLIC._recent, "the calls were never written out"
    # The scale goes in by its product with log2(e), or as it is: either keeps the sign.
    assert launched == [0, 0, 0, 0, 1, 0]


def test_numbers_that_compare_equal_are_told_apart() -> None:
    numbers = [0, 0.0, -0.0, False, 1, 1.0, True, "1", None]
    for first, second in itertools.permutations(numbers, 2):
        calls = known_calls.Calls()
        calls.remember("op", [first], KnownCall(None, [first]))
        assert calls.find("op", [first]) is not None
        assert calls.find("op", [second]) is None, (first, second)
        assert calls.find("other", [first]) is None


def test_a_tensor_that_comes_twice_is_told_from_two_tensors(gpu: FakeGpu) -> None:
    arguments = {**decode_arguments(), "backend": "triton"}
    arguments["extra_topk_length"] = arguments["topk_length"]
    other = {**arguments, "extra_topk_length": torch.ones(2, dtype=torch.int32)}
    lengths = []
    for call in (arguments, other) * 4:
        gpu.runs.clear()
        mlacast.sparse_mla_decode(**call)
        values = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in gpu.runs[0][1]]
        lengths.append(values.count(other["extra_topk_length"].data_ptr()))
    assert lengths == [0, 1] * 4


def test_tables_are_bounded_and_keep_no_tensor(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_calls, "MAX_CALLS", 5)
    monkeypatch.setattr(known_calls, "MAX_METADATA", 2)
    monkeypatch.setattr(known_calls, "MAX_RECENT", 4)
    seen = []
    for scale, rows in itertools.product((0.1, 0.2, 0.3, 0.4, 0.5), (3, 4, 5, 6)):
        arguments = {
            **prefill_arguments(),
            "sm_scale": scale,
            "kv": torch.zeros(rows, 512, dtype=BF16),
        }
        for _ in range(3):
            mlacast.sparse_mla_prefill(**{**arguments, "backend": "triton"})
        seen += [weakref.ref(v) for v in arguments.values() if isinstance(v, torch.Tensor)]
        seen.append(weakref.ref(arguments["out"].data))
    gpu.runs.clear()
    del arguments
    gc.collect()
    assert [ref for ref in seen if ref() is not None] == []
    for calls in (known_calls.PUBLIC, known_calls.OPERATORS):
        # Of scales 0.3, 0.4 and 0.5; the oldest of the third last one had to leave.
        assert [len(entries) for entries in calls._calls.values()] == [1, 2, 2]
        assert len(calls._ages) == 5
    assert [len(recent) for recent in known_calls.PUBLIC._recent.values()] == [4]
    monkeypatch.setattr(known_calls, "MAX_RECENT_OPS", 2)
    for op in "abc":
        known_calls.PUBLIC._put_first(op, print)
    assert list(known_calls.PUBLIC._recent) == ["b", "c"]


def test_metadata_compared_in_python_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch brings no guards, the comparison in Python tells the same calls apart."""
    tensor = torch.zeros(4, 6)
    variants = [
        tensor,
        tensor[:2],
        tensor.T,
        tensor.double(),
        tensor.to("meta"),
        torch.nn.Parameter(tensor),
    ]
    for first, second in itertools.product(variants, repeat=2):
        guards = signature.metadata_of([first])
        plain = signature.PlainMetadata(first)
        assert guards.check(first) and plain.check(first)
        assert guards.check(second) == plain.check(second) == (first is second)


def test_threads_fill_a_table_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "MAX_CALLS", 7)
    monkeypatch.setattr(known_calls, "MAX_METADATA", 2)
    calls = known_calls.Calls()
    known = KnownCall(None, ())

    def fill(first: int) -> None:
        for number in range(first, first + 300):
            calls.remember(f"op{number % 11}", [torch.zeros(number % 5)], known)
            calls.find(f"op{number % 3}", [torch.zeros(number % 5)])
            calls._put_first(number % 300, print)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(fill, range(8)))
    finally:
        sys.setswitchinterval(interval)
    kept = {entry.number: facts for facts, all_of in calls._calls.items() for entry in all_of}
    assert kept == calls._ages
    assert 0 < len(kept) <= 7
    assert len(calls._recent) <= known_calls.MAX_RECENT_OPS

"""What a replay compares: every kind of difference is seen, what means nothing is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mlacast
from mlacast.call_log import replay as module
from mlacast.call_log.compare import Tolerance
from mlacast.call_log.replay import find_function, replay_dump
from tests.logging.calls import CALLS, record
from tests.logging.observed import Log


def replaced(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any, dict[str, Any]], Any]
) -> None:
    """Let replays call a function whose work is changed afterwards."""
    original = find_function(f"mlacast.{name}")

    def function(*args: Any, **kwargs: Any) -> Any:
        return change(original(*args, **kwargs), kwargs)

    monkeypatch.setattr(module, "find_function", lambda _: function)


def test_one_flipped_bit_of_a_code_is_seen(dump_log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = record(dump_log, *CALLS["prefill into a range"])

    def flip(result: Any, kwargs: dict[str, Any]) -> Any:
        result[0].data.view(torch.uint8)[2, 0, 77] ^= 1
        return result

    replaced(monkeypatch, "sparse_mla_prefill", flip)
    report = replay_dump(folder, compare=True, tolerance=Tolerance(1.0, 1e9))
    assert report.outcome == "different" and not report.passed
    found = {tensor.path: tensor.different for tensor in report.tensors if tensor.different}
    assert found == {"result[0].data": 1, "out.data": 1}
    assert any("1 of 6144 float8_e4m3fn elements differ" in text for text in report.differences)


def test_one_flipped_bit_of_packed_fp4_is_seen(
    dump_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record(dump_log, *CALLS["prefill into nvfp4"])

    def flip(result: Any, kwargs: dict[str, Any]) -> Any:
        result[0].data[0, 0, 5] ^= 0x10
        return result

    replaced(monkeypatch, "sparse_mla_prefill", flip)
    report = replay_dump(folder, compare=True, tolerance=Tolerance(1.0, 1e9))
    found = {tensor.path: tensor.different for tensor in report.tensors if tensor.different}
    assert found == {"result[0].data": 1, "out.data": 1}


def test_the_sign_of_zero_is_a_bit_and_equal_nans_are_equal(
    dump_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, float("nan")])

    dump_log.observe(two)(torch.ones(1))
    folder = dump_log.dumps[0]
    monkeypatch.setattr(module, "find_function", lambda _: two)
    assert replay_dump(folder, compare=True).outcome == "same"
    negative = torch.tensor([-0.0, float("nan")])
    monkeypatch.setattr(module, "find_function", lambda _: lambda x: negative)
    assert replay_dump(folder, compare=True).outcome == "different"
    assert replay_dump(folder, compare=True, tolerance=Tolerance(atol=1e-9)).outcome == "same"
    # With a tolerance one NaN is as good as another; a number is not.
    other_nan = torch.tensor([0, -1], dtype=torch.int32).view(torch.float32)
    monkeypatch.setattr(module, "find_function", lambda _: lambda x: other_nan)
    assert replay_dump(folder, compare=True).outcome == "different"
    assert replay_dump(folder, compare=True, tolerance=Tolerance(atol=1e-9)).outcome == "same"
    monkeypatch.setattr(module, "find_function", lambda _: lambda x: torch.zeros(2))
    assert replay_dump(folder, compare=True, tolerance=Tolerance(atol=1e9)).outcome == "different"


def test_strides_that_mean_nothing_are_not_compared(
    dump_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_strided((0, 3), (17, 5)), torch.zeros(1, 4).as_strided((1, 4), (99, 1))

    dump_log.observe(make)(torch.ones(1))
    monkeypatch.setattr(
        module, "find_function", lambda _: lambda x: (torch.empty(0, 3), torch.zeros(1, 4))
    )
    assert replay_dump(dump_log.dumps[0], compare=True).outcome == "same"


def test_tolerances_are_for_floating_point(dump_log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = record(dump_log, *CALLS["prefill"])

    def shift(result: Any, kwargs: dict[str, Any]) -> Any:
        result[2].add_(0.25)
        return result

    replaced(monkeypatch, "sparse_mla_prefill", shift)
    report = replay_dump(folder, compare=True)
    (lse,) = [tensor for tensor in report.tensors if tensor.different]
    assert (lse.path, lse.dtype, lse.different) == ("result[2]", "float32", 12)
    # The sum is rounded to float32: half an ulp of a number below 8, 2**-22, is 1e-6 of the shift.
    assert lse.largest == pytest.approx(0.25, rel=1e-5)
    assert replay_dump(folder, compare=True, tolerance=Tolerance(atol=0.2)).outcome == "different"
    assert replay_dump(folder, compare=True, tolerance=Tolerance(atol=0.3)).outcome == "same"


@pytest.mark.parametrize("case", ["prefill into a range", "prefill into columns", "fused prefill"])
def test_a_byte_written_between_the_outputs_is_seen(
    dump_log: Log, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    name, call = CALLS[case]
    folder = record(dump_log, name, call)

    def stray(result: Any, kwargs: dict[str, Any]) -> Any:
        out = kwargs["out"]
        if isinstance(out, torch.Tensor):
            # Column 512 of the first row belongs to nobody.
            out.as_strided((1,), (1,), out.storage_offset() + 512).fill_(1.0)
        else:
            sf = out[1] if isinstance(out, tuple) else out.sf
            # The word in front of a column's second row range belongs to another token.
            sf.as_strided((1,), (1,), sf.storage_offset() + sf.stride(2) - 1).fill_(77)
        return result

    replaced(monkeypatch, name, stray)
    report = replay_dump(folder, compare=True)
    assert report.outcome == "different"
    assert any("bytes between the elements of out" in text for text in report.differences), report


def test_a_changed_input_is_seen(dump_log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = record(dump_log, *CALLS["prefill"])

    def spoil(result: Any, kwargs: dict[str, Any]) -> Any:
        kwargs["kv"][3, 4] += 1
        return result

    replaced(monkeypatch, "sparse_mla_prefill", spoil)
    report = replay_dump(folder, compare=True)
    assert [tensor.path for tensor in report.tensors if tensor.different] == ["kv"]


def test_other_shapes_strides_and_kinds_are_seen(
    dump_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record(dump_log, *CALLS["prefill"])
    changes: list[tuple[Callable[[Any], Any], str]] = [
        (lambda r: (r[0][:2], r[1], r[2]), r"result\[0\] is a Tensor bfloat16 \[2, 4, 512\]"),
        (lambda r: (r[0].float(), r[1], r[2]), r"result\[0\] is a Tensor float32"),
        (lambda r: (r[0], r[1].t().contiguous().t(), r[2]), r"result\[1\] has strides \[1, 3\]"),
        (lambda r: (r[0], r[1]), "result is a tuple of 2, recorded a tuple of 3"),
        (lambda r: list(r), "result is a list of 3, recorded a tuple of 3"),
        (lambda r: (r[0], None, r[2]), r"result\[1\] is None, recorded Tensor float32"),
    ]
    for change, message in changes:

        def changed(result: Any, kwargs: dict[str, Any], change: Any = change) -> Any:
            return change(result)

        replaced(monkeypatch, "sparse_mla_prefill", changed)
        report = replay_dump(folder, compare=True)
        assert report.outcome == "different"
        assert any(re.match(message, text) for text in report.differences), report


def test_a_result_that_is_no_longer_the_given_buffer_is_seen(
    dump_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record(dump_log, *CALLS["prefill into columns"])

    def copy(result: Any, kwargs: dict[str, Any]) -> Any:
        wide = torch.zeros(3, 4, 600, dtype=torch.bfloat16)[..., :512]
        return wide.copy_(result[0]), result[1], result[2]

    replaced(monkeypatch, "sparse_mla_prefill", copy)
    report = replay_dump(folder, compare=True)
    assert report.differences == [
        "result[0] does not share memory with an argument, recorded that it does"
    ]


def test_other_fields_of_an_object_are_seen(dump_log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = record(dump_log, *CALLS["plan"])
    other = mlacast.plan_sparse_decode(3, 8, 64, kv_format=mlacast.KvFormat.V32, num_splits=9)
    monkeypatch.setattr(module, "find_function", lambda _: lambda *args, **kwargs: other)
    report = replay_dump(folder, compare=True)
    assert report.differences == ["result.num_splits is 9, recorded 1"]


def test_the_content_of_a_workspace_does_not_matter(
    dump_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record(dump_log, *CALLS["decode"])

    def scribble(result: Any, kwargs: dict[str, Any]) -> Any:
        kwargs["workspace"].fill_(99)
        return result

    replaced(monkeypatch, "sparse_mla_decode", scribble)
    assert replay_dump(folder, compare=True).outcome == "same"


def test_a_cache_inside_a_tuple_is_compared(dump_log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = record(dump_log, *CALLS["flashinfer append"])
    original = find_function("mlacast.compat.flashinfer.rope_quantize_fp8_append_paged_kv_cache")

    def flip(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        args[7][1].view(torch.uint8)[1, 2, 3] ^= 0x80
        return result

    monkeypatch.setattr(module, "find_function", lambda _: flip)
    report = replay_dump(folder, compare=True)
    assert [t.path for t in report.tensors if t.different] == ["paged_kv_cache[1]"]

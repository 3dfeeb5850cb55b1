"""The seeded fuzzer on the CPU: it finds planted faults, and repeats what it found."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mlacast.dispatch import select
from mlacast.ops import known_calls
from mlacast.reference import launch
from tests.fuzz import attention, seeded
from tests.fuzz.draw import SeededDraw
from tests.fuzz.seeded import Task
from tools import fuzz_gpu

CPU = torch.device("cpu")
Patch = pytest.MonkeyPatch


def _wrap(patch: Patch, op: str, change: Callable[..., None]) -> None:
    """Let the reference launcher of ``op`` go through ``change(call, args, options)``."""
    plain = getattr(launch, op)

    def changed(*args: Any, **options: Any) -> Any:
        return change(plain, args, options)

    patch.setattr(launch, op, changed)
    _forget()


def _lse_is_off(call: Any, args: Any, options: Any) -> None:
    call(*args, **options)
    options["lse"] += 1e-3


def _ignores_lengths(call: Any, args: Any, options: Any) -> None:
    call(*args, **(options | {"topk_length": None}))


def _counts_the_sink_twice(call: Any, args: Any, options: Any) -> None:
    sink = options["attn_sink"]
    call(*args, **(options | {"attn_sink": None if sink is None else sink + 0.69}))


def _writes_a_byte_more(call: Any, args: Any, options: Any) -> None:
    call(*args, **options)
    storage = torch.empty(0, dtype=torch.uint8).set_(options["out"].data.untyped_storage())
    storage[-1] = 0x11


def _spoils_the_last_row(call: Any, args: Any, options: Any) -> None:
    # Left as it was it could be right: fresh memory may hold what an equal call left in it.
    call(*args, **options)
    options["out"].data[-1:].view(torch.uint8).bitwise_xor_(0x55)


def _writes_its_input(call: Any, args: Any, options: Any) -> None:
    call(*args, **options)
    args[0].view(torch.uint8 if args[0].dtype.itemsize == 1 else torch.int16).zero_()


def _scale_twice_as_large(call: Any, args: Any, options: Any) -> None:
    call(*args, **options)
    out = options["out"]
    if out.sf is not None and out.sf.dtype == torch.int32:
        out.sf += 1


FAULTS = [
    ("sparse_mla_prefill", _lse_is_off),
    ("sparse_mla_prefill", _ignores_lengths),
    ("sparse_mla_decode", _counts_the_sink_twice),
    ("sparse_mla_decode", _writes_a_byte_more),
    ("dense_mla_prefill", _spoils_the_last_row),
    ("dense_mla_decode", _writes_its_input),
    ("merge_attention_states", _scale_twice_as_large),
]


@pytest.mark.parametrize(("op", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_is_reported_and_repeated(op: str, fault: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _wrap(patch, op, fault)
        for case in range(200):
            failure = seeded.run_case(Task(op, "reference", case % 8), 5, case, CPU)
            if failure is not None:
                break
        assert failure is not None, "200 calls did not show it"
        _forget()
        assert fuzz_gpu.repeat(failure.case, 5, CPU) == 1
    _forget()
    assert fuzz_gpu.repeat(failure.case, 5, CPU) == 0


def _forget() -> None:
    """Known calls keep the launcher that they were made with."""
    select.load.cache_clear()
    known_calls.PUBLIC.clear()
    known_calls.OPERATORS.clear()


def test_configurations_fix_what_kernels_are_compiled_for() -> None:
    """Formats and heads of many calls of one configuration are the same, their sizes are not."""
    from tests.fuzz import sparse

    task = Task("sparse_mla_decode", "reference", 3)
    fixed, free = set(), set()
    for case in range(12):
        draw = seeded.draw_for(task, 1, case)
        arguments = sparse.draw_decode(draw, seeded.under_for(task, CPU)).arguments
        names = tuple(sorted(arguments))
        fixed.add((arguments["kv_format"], arguments["q"].shape[1], names))
        free.add((arguments["q"].shape[0], arguments["indices"].shape[1]))
    assert len(fixed) == 1, fixed
    assert len(free) > 4


def test_a_configuration_does_not_depend_on_who_draws_it() -> None:
    seen = []

    def note(draw: Any, under: Any) -> None:
        seen.append([draw.fixed.integer(0, 10**9) for _ in range(3)])

    task = Task("noted", None, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(seeded.SUBJECTS, "noted", note)
        seeded.run_case(task, 1, 0, CPU)
        seeded.covered_attempt(task, 1, CPU)
        fuzz_gpu.repeat("noted/chosen/1/0/7", 1, CPU)
    assert seen[0] == seen[1] == seen[2]


def test_a_draw_repeats() -> None:
    first, second = (SeededDraw("a", "b") for _ in range(2))
    for draw in (first, second):
        draw.integer(0, 10**9)
    assert first.integer(0, 10**9) == second.integer(0, 10**9)
    numbers = [SeededDraw("a", name).fixed.integer(0, 10**9) for name in ("b", "b", "c")]
    assert numbers[0] == numbers[1] != numbers[2]


def test_the_command_runs_processes_and_writes_a_summary(tmp_path: Path) -> None:
    path = tmp_path / "fuzz.json"
    arguments = ["--device", "cpu", "--seconds", "100", "--jobs", "2", "--per-round", "2"]
    assert (
        fuzz_gpu.main(
            [*arguments, "--rounds", "1", "--only", "decode_metadata", "--json", str(path)]
        )
        == 0
    )
    summary = json.loads(path.read_text())
    found = summary["by_subject"]["decode_metadata/reference"]
    assert found["cases"] == 8 and found["configurations"] == 4
    assert summary["failures"] == []


def test_a_report_adds_up() -> None:
    report = fuzz_gpu.Report()
    task = Task("kv_cache_append", None, 2)
    report.add(task, Counter({"cases": 3, "not covered": 1}))
    report.add(dataclasses.replace(task, configuration=4), Counter({"cases": 2}))
    summary = report.as_json(1, 2.0, CPU)
    wanted = {"cases": 5, "configurations": 2, "not_covered": 1}
    assert summary["cases"] == 5 and summary["by_subject"]["kv_cache_append/chosen"] == wanted


def test_bounds_of_large_scores_are_numbers() -> None:
    """An infinite relative error of a sum that is zero is no NaN."""
    q = torch.full((1, 1, 512), 1e9, dtype=torch.float64)
    keys = torch.zeros(1, 2, 512, dtype=torch.float64)
    keys[..., 0] = 3.0
    valid = torch.ones(1, 2, dtype=torch.bool)
    expected = attention.attend(q, keys, valid, seeded.PRECISION, sm_scale=100.0, moved_keys=8)
    # Scores of 3e11, of which float32 drops 2**-24.
    assert float(expected.logit_error.min()) > 1e3
    assert not bool(expected.out_error.isnan().any())

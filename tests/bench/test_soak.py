"""benchmarks/soak.py without a GPU: its steps run, and its report complains of what it should."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks import soak

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that the reference runs in no time."""
    sizes = {"HEADS": 2, "GROUPS": 1, "COLUMNS": 8, "MOST_PREFILL": 3, "MOST_DECODE": 2}
    for name, size in {**sizes, "TOPK": 5, "ROWS": 64}.items():
        monkeypatch.setattr(soak, name, size)


def test_steps_run_and_nothing_is_wrong() -> None:
    report = soak.soak(CPU, 12, 2, 3)
    assert report["steps"] == 12 and report["graph_replays"] == 0
    assert len(report["host_memory_by_tenth"]) == 10
    assert report["host_memory_by_tenth"][-1] == report["memory_at_the_end"]["host"]
    assert report["compilations_after_warm_up"] == 0
    report["median_us"] = {"first_tenth": 1.0, "last_tenth": 1.0}
    assert soak.complaints(report) == []


def test_a_step_is_a_prefill_and_a_decode_into_one_buffer() -> None:
    pool, buffer = soak.make_pool(CPU), soak.new_buffer(CPU)
    shape = soak.Shape(2, 1, 1, 5)
    first = soak.run_step(pool, shape, buffer)
    codes = buffer.data.view(torch.uint8)[:3].clone()
    buffer.data.view(torch.uint8).fill_(0x5A)
    again = soak.run_step(pool, shape, buffer)
    assert torch.equal(buffer.data.view(torch.uint8)[:3], codes)
    assert bool((buffer.data.view(torch.uint8)[3:] == 0x5A).all())
    for left, right in zip(first, again, strict=True):
        assert torch.equal(left, right)
    assert [tuple(part.shape) for part in first] == [(2, 2), (1, 2), (3, 1, 8)]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"memory_at_the_end": {"host": 10, "allocated": 11}}, "allocated memory grew"),
        ({"memory_at_the_end": {"host": 10 + (65 << 20), "allocated": 9}}, "host memory grew"),
        ({"host_memory_by_tenth": [0, 0, 0, 0, 9, 9, 9, 9, 9, 10 + (8 << 20)]}, "second half"),
        ({"compilations_after_warm_up": 1}, "1 compilations"),
        ({"replays_that_differ": 2}, "2 replays differ"),
        ({"median_us": {"first_tenth": 100.0, "last_tenth": 111.0}}, "111.0 us at last"),
    ],
)
def test_complaints(change: dict[str, Any], word: str) -> None:
    good: dict[str, Any] = {
        "memory_after_warm_up": {"host": 10, "allocated": 10},
        "memory_at_the_end": {"host": 10 + (63 << 20), "allocated": 10},
        "host_memory_by_tenth": [0, 0, 0, 0, 9, 9, 9, 9, 9, 9 + (8 << 20)],
        "compilations_after_warm_up": 0,
        "replays_that_differ": 0,
        "median_us": {"first_tenth": 100.0, "last_tenth": 109.0},
    }
    assert soak.complaints(copy.deepcopy(good)) == []
    found = soak.complaints({**good, **change})
    assert len(found) == 1 and word in found[0]

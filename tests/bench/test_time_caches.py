"""benchmarks/time_caches.py without a GPU: its cases, and that its check finds wrong bytes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cache_calls, time_caches
from benchmarks.cache_calls import Case, Work, sweep_cases, usual_cases
from mlacast.descriptors.kv_format import ALL_KV_FORMATS, KvFormat
from tests.format_cases import storage_bytes

L2_BYTES = 60 << 20


def test_names_are_different_and_every_format_is_timed() -> None:
    for cases in (usual_cases(), sweep_cases()):
        assert len({case.name for case in cases}) == len(cases)
    for op in ("kv_cache_append", "kv_cache_gather"):
        assert {case.kv_format for case in usual_cases() if case.op == op} == set(ALL_KV_FORMATS)


def test_bytes_by_hand() -> None:
    rope = Case("rope_quantize_fp8", 4096)
    # bfloat16 in, a byte out, one key beside 128 queries; a row of the table and a position.
    assert rope.moved_bytes == 4096 * (129 * 576 * 3 + 256 + 8)
    append = Case("kv_cache_append", 8192, KvFormat.V4, fused=True)
    assert append.moved_bytes == 8192 * (1024 + 584 + 8 + 256 + 8)
    assert Case("kv_cache_gather", 8192, KvFormat.V32).moved_bytes == 8192 * (1152 + 656 + 8)


def test_sets_leave_nothing_in_the_cache() -> None:
    for case in usual_cases():
        sets = time_caches.sets_for(case.moved_bytes, L2_BYTES)
        assert sets == time_caches.MOST_SETS or sets * case.moved_bytes >= 2 * L2_BYTES


def test_targets() -> None:
    ceilings = {"copy_gbs": 4000.0, "node_us": 1.0}
    rope = [Case("rope_quantize_fp8", tokens) for tokens in (1, 16, 64)]
    assert [time_caches.target_us(case, ceilings) for case in rope] == [3.0, 3.0, 5.5]
    append = Case("kv_cache_append", 8192, KvFormat.V4)
    expected = 8192 * (1024 + 584 + 8) / 4000e9 / 0.7 * 1e6
    assert time_caches.target_us(append, ceilings) == pytest.approx(expected)
    assert time_caches.target_us(Case("kv_cache_append", 64, KvFormat.V4), ceilings) is None


@pytest.mark.parametrize(
    "case",
    [
        Case("rope_quantize_fp8", 5, pairing="interleaved"),
        Case("kv_cache_append", 100, KvFormat.V4),
        Case("kv_cache_append", 100, KvFormat.BF16, fused=True),
        Case("kv_cache_gather", 100, KvFormat.NVFP4_384),
    ],
    ids=lambda case: case.name,
)
def test_the_check_finds_a_wrong_byte(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_calls, "DEVICE", "cpu")
    monkeypatch.setattr(cache_calls, "HEADS", 3)
    monkeypatch.setattr(cache_calls, "TABLE_ROWS", 64)
    work: Any = Work(case, 2)
    work.check()
    right = work.calls[0]

    def wrong() -> Any:
        result = right()
        if case.op == "kv_cache_append":
            # The last token written: the page's rows before it are right.
            slot = int(work._slots[0, -1])
            work._cache[slot // 64, slot % 64].view(-1)[5:6].view(torch.uint8)[0] ^= 1
        elif case.op == "kv_cache_gather":
            result[-1, 3] += 1.0
        else:
            result[2].view(torch.uint8)[-1, -1, -1] ^= 1
        return result

    work.calls[0] = wrong
    with pytest.raises(AssertionError, match="differ"):
        work.check()


def test_an_append_that_touches_other_rows_of_a_page_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_calls, "DEVICE", "cpu")
    work: Any = Work(Case("kv_cache_append", 100, KvFormat.V41), 1)
    right = work.calls[0]

    def wrong() -> None:
        right()
        page = int(work._slots[0, 0]) // 64
        storage_bytes(work._cache).view(-1, KvFormat.V41.page_bytes(64))[page, 0] = 1

    work.calls[0] = wrong
    with pytest.raises(AssertionError, match="records differ"):
        work.check()


def test_lines_name_what_was_missed_and_what_failed() -> None:
    result: dict[str, Any] = {
        "name": "x",
        "error": None,
        "us": 2.0,
        "p10_us": 1.9,
        "p90_us": 2.1,
        "gbs": 3000.0,
        "share_of_copy": 0.7,
        "share_of_same_copy": 0.9,
        "same_copy_us": 1.8,
        "target_us": 1.5,
        "met": False,
    }
    assert "MISSED" in time_caches.line(result)
    assert "90% of 1.80 us" in time_caches.line(result)
    assert "FAILED codes differ" in time_caches.line({**result, "error": "codes differ"})


def test_the_script_starts() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "benchmarks/time_caches.py", "--list", "--case", "gather-V4-"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    listed = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert listed.stdout.split() == ["kv_cache_gather-V4-t8192"]


def test_configs_are_part_of_the_name() -> None:
    config = cache_calls.ROPE_CONFIGS[0]
    case = dataclasses.replace(Case("rope_quantize_fp8", 1), config=config)
    assert case.name.endswith(f"-{config.rows}.{config.num_warps}.{config.pinned}.{config.ahead}")

"""``mlacast formats``: byte maps drawn and as JSON, against the published record sizes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.result import Run, json_of

# Bytes per token of each record, by d_qk.
SIZES = {
    "BF16": {512: 1024, 576: 1152},
    "FP8": {512: 512, 576: 576},
    "V32": {576: 656},
    "V4": {512: 584},
    "V41": {512: 528},
    "V41_FP4": {512: 288},
    "V41_INLINE": {512: 528},
    "V41_FP4_INLINE": {512: 288},
    "NVFP4_384": {512: 384},
}


def test_all_formats_are_drawn(run: Run) -> None:
    outcome = run("formats")
    assert outcome.exit_code == 0
    for name in SIZES:
        assert f"KvFormat.{name}:" in outcome.stdout
    for name in ("Bf16", "Fp8Tensor", "Fp8Group", "Mxfp8", "Nvfp4"):
        assert f"{name}(" in outcome.stdout


def test_sizes_in_json_are_the_published_ones(run: Run) -> None:
    answer = json_of(run("formats", "--json"))
    found = {
        entry["name"]: {size["d_qk"]: size["bytes_per_token"] for size in entry["per_d_qk"]}
        for entry in answer["kv_formats"]
    }
    assert found == SIZES


def test_fields_of_a_record_cover_it_without_gap_or_overlap(run: Run) -> None:
    answer = json_of(run("formats", "--json"))
    sizes = [size for entry in answer["kv_formats"] for size in entry["per_d_qk"]]
    for size in sizes:
        covered = 0
        for plane in ("data", "scale"):
            position = 0
            for field in size["fields"]:
                if field["plane"] == plane:
                    assert field["start"] == position
                    position = field["stop"]
            covered += position
        assert covered == size["bytes_per_token"]


def test_one_format_by_name_in_any_case(run: Run) -> None:
    outcome = run("formats", "v4")
    assert outcome.exit_code == 0
    # A page of 64: 64 * 584 = 37376, and the next multiple of 576 is 37440.
    assert "584 bytes per token" in outcome.stdout
    assert "37440 bytes (37376 rounded up to a multiple of 576)" in outcome.stdout
    assert "scales of token t: 8 bytes at 36864 + t * 8" in outcome.stdout
    assert "V41" not in outcome.stdout


def _only(run: Run, name: str, key: str) -> dict[str, Any]:
    answer = json_of(run("formats", name, "--json"))
    assert answer["kv_formats"] == []
    found: dict[str, Any] = next(e for e in answer["out_formats"] if e["key"] == key)
    return found


def test_mn_major_strides(run: Run) -> None:
    example = _only(run, "mxfp8", "mxfp8:chunk32")["example"]
    # 5 tokens pad to 8; 1024 features are 32 scales, 8 words of four bytes.
    assert example["sf_shape"] == [5, 2, 8]
    assert example["sf_strides"] == [1, 64, 8]


def test_swizzled_buffer(run: Run) -> None:
    entry = _only(run, "Nvfp4", "nvfp4")
    # Two groups of 1024 features are 128 scales; rows pad to 128.
    assert entry["example"]["sf_shape"] == [128, 128]
    assert entry["example"]["data_shape"] == [5, 2, 512]
    text = run("formats", "Nvfp4").stdout
    for offset in ("16", "512", "508", "4"):
        assert f" {offset} " in text


def test_chunk32_order_is_spelled_out(run: Run) -> None:
    assert "h0.c0 h1.c0 h0.c1 h1.c1" in run("formats", "Mxfp8").stdout


@pytest.mark.parametrize("name", ["V5", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(run: Run, name: str) -> None:
    outcome = run("formats", name)
    assert outcome.exit_code == 2
    assert "V41_FP4_INLINE" in outcome.stderr
    assert "Nvfp4" in outcome.stderr

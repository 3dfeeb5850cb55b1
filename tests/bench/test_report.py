"""The JSON document, its targets, and the page and picture made from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot
from mlacast.bench.cases import CASES, Case, Target
from mlacast.bench.gate import Gate
from mlacast.bench.protocols import Timing
from mlacast.bench.run import CaseResult
from tests.bench.small import report_of, run_small

FUSED = next(case for case in CASES if case.fused)
RIGHT = Gate(0.02, 0.04, 1e-4, 5e-3, 0)


def result_of(case: Case, us: float, **more: float) -> CaseResult:
    """A result whose op took ``us``, and other timings by name."""
    times = {name: Timing(t, t - 1, t + 1, 20, 4) for name, t in {"op": us, **more}.items()}
    return CaseResult(case, "hopper", {"op": RIGHT}, times)


def entry_of(case: Case, us: float) -> dict[str, Any]:
    entry: dict[str, Any] = report_of([result_of(case, us)])["cases"][0]
    return entry


def test_a_document_is_strict_json_with_every_number() -> None:
    report = report_of([run_small(FUSED)])
    again = json.loads(json.dumps(report, allow_nan=False))
    assert again == report
    assert set(report) == {"schema", "machine", "roofs", "host", "cases"}
    (entry,) = report["cases"]
    assert set(entry) == {
        *("name", "op", "shape", "protocol", "backend", "gates", "error", "times", "flops"),
        *("bytes", "tflops", "gbs", "roof", "roof_us", "roof_share", "target"),
    }
    assert set(entry["times"]["op"]) == {"median_us", "p10_us", "p90_us", "repeats", "calls"}
    assert entry["gates"]["op"]["passed"] is True
    # 10 us a call.
    assert entry["tflops"] == pytest.approx(entry["flops"] / 1e7)
    assert entry["gbs"] == pytest.approx(entry["bytes"] / 1e4, rel=1e-3)
    assert entry["roof_share"] == pytest.approx(entry["roof_us"] / 10)
    assert [cost["met"] for cost in report["host"]] == [False, True]


def test_a_failed_gate_stays_json() -> None:
    wrong = CaseResult(FUSED, "hopper", {"op": Gate(float("nan"), 0.04, 1.0, 0.1, 3)}, {}, "wrong")
    (entry,) = report_of([wrong])["cases"]
    json.dumps(entry, allow_nan=False)
    assert entry["gates"]["op"] == {
        **{"error": None, "limit": 0.04, "lse_error": 1.0, "lse_limit": 0.1},
        **{"unwritten": 3, "passed": False},
    }
    assert (entry["tflops"], entry["target"]["met"]) == (None, None)


@pytest.mark.parametrize(
    ("us", "met"), [(50.0, "all"), (50.1, "first"), (60.0, "first"), (60.1, "missed")]
)
def test_targets_in_two_steps(us: float, met: str) -> None:
    assert entry_of(dataclasses.replace(FUSED, target=Target(60, 50)), us)["target"]["met"] == met


def test_a_single_target_is_met_or_missed() -> None:
    case = dataclasses.replace(FUSED, target=Target(60))
    assert [entry_of(case, us)["target"]["met"] for us in (60.0, 61.0)] == ["all", "missed"]


def test_a_target_above_a_floor() -> None:
    case = Case("x", "sparse_mla_prefill", 4096, 8, 640, 1024, target=Target(floor_factor=1.5))
    # 64 heads: 2 * 64 * 640 * 1024 * 4096 operations at 800 TFLOP/s are 429.5 us.
    assert entry_of(case, 1.0)["target"]["first_us"] == pytest.approx(1.5 * 429.497, rel=1e-5)


def test_a_target_that_is_another_case() -> None:
    peer = dataclasses.replace(FUSED, name="peer")
    case = dataclasses.replace(FUSED, name="case", target=Target(peer="peer"))
    both = report_of([result_of(peer, 100.0), result_of(case, 101.9)])["cases"]
    assert both[1]["target"]["met"] == "all"
    both = report_of([result_of(peer, 100.0), result_of(case, 102.1)])["cases"]
    assert both[1]["target"]["met"] == "missed"
    (alone,) = report_of([result_of(case, 1.0)])["cases"]
    assert (alone["target"]["first_us"], alone["target"]["met"]) == (None, None)


def recorded(folder: Path) -> Path:
    """A recorded run of three cases: with a chain, without one, and a wrong one."""
    parts = {"norm_rope": 130.0, "attention": 580.0, "cast": 100.0, "chain": 812.0}
    plain = next(case for case in CASES if not case.fused)
    wrong = CaseResult(dataclasses.replace(FUSED, name="wrong"), error="differs")
    report = report_of([result_of(FUSED, 600.0, **parts), result_of(plain, 3200.0), wrong])
    file = folder / "run.json"
    file.write_text(json.dumps(report))
    return file


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "page.md"
    file.write_text(f"# Title\n\n{plot.BEGIN}\nold\n{plot.END}\n\nafter\n")
    return file


def test_the_plot_script_writes_the_page(tmp_path: Path, page: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = [str(recorded(tmp_path)), "--page", str(page)]
    plot.main(arguments)
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("# Title\n\n") and text.endswith("\n\nafter\n")
    assert f"| {FUSED.name} | 600 (599-601) | 590, then 530 | missed | 812 | 1.35 | 573 |" in text
    assert "| wrong | not timed: differs |" in text
    assert "`mlacast bench --quick` printed these numbers; [run.json](run.json)" in text
    assert "| host-prefill | 25.0 | 4.0 | 0 / 0 | missed |" in text
    picture = page.with_suffix(".svg").read_bytes()
    assert b"1.35x" in picture or b"<svg" in picture
    plot.main(arguments)
    assert page.read_text() == text
    assert page.with_suffix(".svg").read_bytes() == picture


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("# Title\n")
    with pytest.raises(ValueError, match="recorded run: begin"):
        plot.write_section(file, "text")
    assert file.read_text() == "# Title\n"


def test_another_schema_or_an_empty_run_is_refused(tmp_path: Path, page: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"schema": 99}))
    with pytest.raises(SystemExit, match="schema 1 is needed"):
        plot.main([str(file), "--page", str(page)])
    file.write_text(json.dumps(report_of([])))
    with pytest.raises(SystemExit, match="no case of"):
        plot.main([str(file), "--page", str(page)])


def test_the_page_of_the_repository_has_the_markers() -> None:
    text = plot.PAGE.read_text(encoding="utf-8")
    assert text.count(plot.BEGIN) == 1
    assert text.index(plot.BEGIN) < text.index(plot.END)

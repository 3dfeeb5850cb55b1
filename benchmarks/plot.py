"""Draw a recorded run and write its table into docs/performance.md.

    python benchmarks/run.py --json benchmarks/results/bench_h200.json
    python benchmarks/plot.py benchmarks/results/bench_h200.json

Nothing is typed by hand: every number of the page comes from the file.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- recorded run: begin -->", "<!-- recorded run: end -->"
SCHEMA = 1

Entry = dict[str, Any]

_FUSED, _CHAIN, _ROOF = "#1f6fb4", "#c4c9cf", "#e8710a"
_MET = {"all": "met", "first": "first met", "missed": "missed", None: ""}


def timed(report: Entry) -> list[Entry]:
    """Cases that passed their gate and were timed."""
    return [entry for entry in report["cases"] if entry["times"]]


def draw(report: Entry, target: Path) -> None:
    """Draw a bar per case: the fused call, the chain it replaces, and a mark at the roof."""
    import matplotlib

    matplotlib.use("Agg")
    # The same input gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "mlacast"
    from matplotlib.figure import Figure

    entries = timed(report)
    figure = Figure(figsize=(9.0, 1.4 + 0.32 * len(entries)), layout="constrained")
    axes = figure.add_subplot()
    places = list(range(len(entries), 0, -1))
    op_us = [entry["times"]["op"]["median_us"] for entry in entries]
    chain_us = [entry["times"].get("chain", {}).get("median_us", 0.0) for entry in entries]
    roof_us = [entry["roof_us"] for entry in entries]
    axes.barh(places, chain_us, height=0.75, color=_CHAIN, label="separate kernels")
    axes.barh(places, op_us, height=0.45, color=_FUSED, label="mlacast, one call")
    axes.scatter(roof_us, places, marker="|", s=120, linewidths=2.5, color=_ROOF, label="roof")
    for place, us, chain in zip(places, op_us, chain_us, strict=True):
        ratio = f", {chain / us:.2f}x" if chain else ""
        axes.text(max(us, chain) * 1.05, place, f"{us:.4g}{ratio}", va="center", fontsize=7)
    axes.set_yticks(places, [entry["name"] for entry in entries], fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel("us a call, log scale")
    axes.set_xlim(min(roof_us) / 2, max(max(op_us), max(chain_us)) * 2.5)
    axes.set_title(f"{report['machine']['gpu']}, {report['machine']['date'][:10]}", fontsize=9)
    figure.legend(loc="outside upper center", ncols=3, fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    metadata = {"Date": None} if target.suffix == ".svg" else None
    figure.savefig(target, metadata=metadata)


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def table(report: Entry) -> list[str]:
    """Rows of the Markdown table of cases."""
    lines = [
        "| case | us (p10-p90) | target us | | chain us | chain / op | TFLOP/s | GB/s | roof, us |"
        " of it |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for entry in report["cases"]:
        times, target = entry["times"], entry["target"]
        if not times:
            lines.append(f"| {entry['name']} | not timed: {entry['error']} | | | | | | | | |")
            continue
        op, chain_us = times["op"], times.get("chain", {}).get("median_us")
        targets = ", then ".join(filter(None, (_us(target["first_us"]), _us(target["then_us"]))))
        cells = [
            entry["name"],
            f"{_us(op['median_us'])} ({_us(op['p10_us'])}-{_us(op['p90_us'])})",
            targets,
            _MET[target["met"]],
            _us(chain_us),
            "" if chain_us is None else f"{chain_us / op['median_us']:.2f}",
            f"{entry['tflops']:.0f}",
            f"{entry['gbs']:.0f}",
            f"{entry['roof']}, {_us(entry['roof_us'])}",
            f"{entry['roof_share']:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def host_table(report: Entry) -> list[str]:
    """Rows of the Markdown table of eager calls."""
    lines = [
        "| eager call | host us | torch.add, host us | memory kept, bytes | 20 us above |",
        "|---|--:|--:|--:|---|",
    ]
    for cost in report["host"]:
        kept = f"{cost['allocated_bytes']} / {cost['reserved_bytes']}"
        met = "met" if cost["met"] else "missed"
        us, torch_us = f"{cost['us']:.1f}", f"{cost['torch_us']:.1f}"
        lines.append(f"| {cost['name']} | {us} | {torch_us} | {kept} | {met} |")
    return lines if report["host"] else []


def section(report: Entry, page: Path, data: Path, picture: Path) -> str:
    """Text between the markers of the page."""
    machine, roofs = report["machine"], report["roofs"]
    source, drawing = (
        Path(os.path.relpath(path, page.parent)).as_posix() for path in (data, picture)
    )
    facts = (
        f"{machine['gpu']} (driver, clock, power limit: {machine['driver_clock_power']}), torch "
        f"{machine['torch']}, triton {machine['triton']}, mlacast {machine['mlacast']} at commit "
        f"{machine['commit'] or 'unknown'}, {machine['date']}."
    )
    ceilings = (
        f"Roofs of the same run: copy {roofs['copy_gbs']:.0f} GB/s, bfloat16 matmul "
        f"{roofs['matmul_tflops']:.0f} TFLOP/s cool and {roofs['matmul_sustained_tflops']:.0f} "
        f"sustained, a graph node {roofs['node_us']:.2f} us."
    )
    parts = [
        f"`{machine['command']}` printed these numbers; [{data.name}]({source}) has them all.",
        facts,
        ceilings,
        f"![Time of each case beside its separate kernels and its roof]({drawing})",
        "\n".join(table(report)),
        "\n".join(host_table(report)),
    ]
    return "\n\n".join(part for part in parts if part)


def write_section(page: Path, text: str) -> None:
    """Replace what stands between the markers of a page.

    Raises:
        ValueError: The page does not have each marker once, in order.
    """
    old = page.read_text(encoding="utf-8")
    before, found_begin, rest = old.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found_begin or not found_end:
        raise ValueError(f"{page}: needs a line {BEGIN!r} and, below it, a line {END!r}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read a recorded run, draw it and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="JSON file of `mlacast bench --json`")
    parser.add_argument("--page", type=Path, default=PAGE, help="page with the two markers")
    parser.add_argument("--picture", type=Path, help="svg or png; beside the page by default")
    options = parser.parse_args(arguments)
    report = json.loads(options.data.read_text(encoding="utf-8"))
    if report["schema"] != SCHEMA:
        raise SystemExit(f"plot: schema {SCHEMA} is needed, {options.data} has {report['schema']}")
    if not timed(report):
        raise SystemExit(f"plot: no case of {options.data} was timed")
    picture = options.picture or options.page.with_suffix(".svg")
    draw(report, picture)
    write_section(options.page, section(report, options.page, options.data, picture))


if __name__ == "__main__":
    main()

"""``mlacast bench``: run the registered cases on a GPU and compare with targets and roofs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Column, Table

from mlacast.bench.cases import Case, select_cases
from mlacast.bench.compile import compile_cases
from mlacast.bench.run import CaseResult, run
from mlacast.cli.output import console

_MARKS = {"all": "[green]met[/]", "first": "[yellow]first met[/]", "missed": "[red]missed[/]"}
_TIMED_OUT = 3
_PLAIN_WIDTH = 200


def bench(
    case: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    list_: Annotated[bool, typer.Option("--list", help="Print the cases and end.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="5 measurements instead of 20.")] = False,
    no_chain: Annotated[
        bool, typer.Option("--no-chain", help="Leave out the separate kernels.")
    ] = False,
    no_host: Annotated[
        bool, typer.Option("--no-host", help="Leave out the cost of an eager call.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="File to write every number to.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes that compile kernels beforehand.")] = 0,
    time_limit: Annotated[
        float, typer.Option(help="Seconds after which the process ends; 0 for never.")
    ] = 0.0,
) -> None:
    """Check and time the registered cases on this GPU.

    A case is compared with the float64 reference first and is not timed when it is wrong. Exit code
    1 if one is wrong or fails; a missed target is no failure.
    """
    try:
        cases = select_cases(case)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--case") from None
    if list_:
        console().print(_list(cases), "A floor counts heads padded to 64.")
        return
    if not torch.cuda.is_available():
        typer.echo(
            "mlacast bench: timings need an NVIDIA GPU and triton, and torch sees no GPU here; "
            "`mlacast bench --list` prints the cases, `mlacast check` tests this machine",
            err=True,
        )
        raise typer.Exit(1)
    _end_after(time_limit)
    device = torch.device("cuda", torch.cuda.current_device())
    compile_cases([entry.name for entry in cases], device, chain=not no_chain, jobs=jobs)
    report = run(
        cases,
        device,
        quick=quick,
        chain=not no_chain,
        host=not no_host,
        json_path=json,
        progress=_say,
    )
    _print(report)
    raise typer.Exit(1 if any(entry["error"] for entry in report["cases"]) else 0)


def _end_after(seconds: float) -> None:
    """End the process after a time: a kernel that hangs cannot be interrupted."""

    def end() -> None:
        typer.echo(f"mlacast bench: ended by --time-limit after {seconds:g} s", err=True)
        os._exit(_TIMED_OUT)

    if seconds > 0:
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()


def _say(result: CaseResult) -> None:
    """Report one case on standard error as soon as it is done."""
    times = " ".join(f"{name} {timing.median_us:.1f}" for name, timing in result.times.items())
    typer.echo(f"{result.case.name}: {result.error or times + ' us'}", err=True)


def _list(cases: tuple[Case, ...]) -> Table:
    table = Table(Column("case", no_wrap=True), "protocol", "target us")
    for case in cases:
        target = case.target
        if target.peer is not None:
            words = f"as {target.peer}"
        elif target.floor_factor is not None:
            words = f"{target.floor_factor} x floor"
        else:
            words = _times(target.first_us, target.then_us)
        table.add_row(case.name, case.protocol, words)
    return table


def _times(first_us: float | None, then_us: float | None) -> str:
    """Targets as text: first, then after that."""
    return ", then ".join(f"{us:.4g}" for us in (first_us, then_us) if us is not None)


def _print(report: dict[str, Any]) -> None:
    """Print the report as tables."""
    out, machine, roofs = console(), report["machine"], report["roofs"]
    out.print(
        f"{machine['gpu']}, driver, clock, power: {machine['driver_clock_power']}; "
        f"torch {machine['torch']}, triton {machine['triton']}, {machine['date']}"
    )
    out.print(
        f"copy {roofs['copy_gbs']:.0f} GB/s, bfloat16 matmul {roofs['matmul_tflops']:.0f} TFLOP/s "
        f"({roofs['matmul_sustained_tflops']:.0f} sustained), graph node {roofs['node_us']:.2f} us"
    )
    # A file or a pipe has no width of its own; a row is one line there.
    if not out.is_terminal:
        out.width = max(out.width, _PLAIN_WIDTH)
    table = Table(
        Column("case", no_wrap=True),
        "backend",
        "us (p10, p90)",
        "target us",
        "",
        "TFLOP/s",
        "GB/s",
        "roof",
    )
    table.add_column("of it")
    for heading in ("norm+rope", "attention", "cast", "chain", "chain / op"):
        table.add_column(heading)
    for entry in report["cases"]:
        table.add_row(*_row(entry))
    out.print(table)
    if report["host"]:
        hosts = Table("eager call", "host us", "torch.add us", "memory kept, bytes", "20 us above")
        for cost in report["host"]:
            kept = f"{cost['allocated_bytes']} / {cost['reserved_bytes']}"
            met = _MARKS["all" if cost["met"] else "missed"]
            hosts.add_row(cost["name"], f"{cost['us']:.1f}", f"{cost['torch_us']:.1f}", kept, met)
        out.print(hosts)


def _row(entry: dict[str, Any]) -> list[str]:
    """One case as cells."""
    times, target = entry["times"], entry["target"]
    if not times:
        return [entry["name"], entry["backend"] or "", f"[bold red]{escape(entry['error'])}[/]"]
    op, median = times["op"], times["op"]["median_us"]
    mark = _MARKS[target["met"]] if target["met"] else ""
    cells = [
        entry["name"],
        entry["backend"],
        f"{median:.1f} ({op['p10_us']:.1f}, {op['p90_us']:.1f})",
        _times(target["first_us"], target["then_us"]),
        mark,
        f"{entry['tflops']:.0f}",
        f"{entry['gbs']:.0f}",
        entry["roof"],
        f"{entry['roof_share']:.0%}",
    ]
    if "chain" in times:
        parts = ("norm_rope", "attention", "cast", "chain")
        cells += [f"{times[part]['median_us']:.1f}" for part in parts]
        cells.append(f"{times['chain']['median_us'] / median:.2f}")
    return cells

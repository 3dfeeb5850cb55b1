"""``mlacast replay``: makes recorded calls again and compares what they give."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from mlacast.call_log.compare import Tolerance
from mlacast.call_log.errors import DumpError
from mlacast.call_log.listing import is_dump, list_dumps
from mlacast.call_log.replay import ReplayReport, replay_dump
from mlacast.call_log.settings import DEFAULT_DIRECTORY
from mlacast.cli.device import read_device
from mlacast.cli.list_dumps import SAVING_CALLS, DumpDirectory
from mlacast.cli.output import JsonFlag, console, print_json, with_progress

REFUSED = "refused"


def replay(
    folder: DumpDirectory = Path(DEFAULT_DIRECTORY),
    compare: Annotated[
        bool | None,
        typer.Option(help="Compare with the record; left out, only a folder of dumps is compared."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to run; as recorded if not given.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend to use: reference, triton or hopper.")
    ] = None,
    rtol: Annotated[
        float, typer.Option(min=0, help="Relative tolerance of floating-point elements.")
    ] = 0.0,
    atol: Annotated[
        float, typer.Option(min=0, help="Absolute tolerance of floating-point elements.")
    ] = 0.0,
    json: JsonFlag = False,
) -> None:
    """Make recorded calls again.

    Without tolerances everything is compared bit for bit; with them, FP8, FP4 and integers still
    are. Exit code 1 if a call fails, differs from its record, or cannot be replayed.
    """
    place = None if device is None else read_device(device)
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder; {SAVING_CALLS}")
    folders = [folder] if is_dump(folder) else [dump.folder for dump in list_dumps(folder)]
    if compare is None:
        compare = not is_dump(folder)
    reports: list[dict[str, Any]] = []
    for one in with_progress(folders, [path.name for path in folders], shown=not json):
        try:
            report = replay_dump(
                one,
                compare=compare,
                device=place,
                backend=backend,
                tolerance=Tolerance(rtol, atol),
            )
            reports.append(_as_json(report))
        except (DumpError, FileNotFoundError) as error:
            reports.append({"dump": str(one), "outcome": REFUSED, "error": str(error)})
        if not json:
            _print_report(console(), reports[-1])
    passed = all(report.get("passed", False) for report in reports)
    if json:
        print_json({"passed": passed, "replays": reports})
    elif not reports:
        console().print(f"no dumps in {escape(str(folder))}")
    raise typer.Exit(0 if passed else 1)


def _as_json(report: ReplayReport) -> dict[str, Any]:
    return {**asdict(report), "passed": report.passed}


def _print_report(out: Console, report: dict[str, Any]) -> None:
    colour = "green" if report.get("passed") else "bold red"
    name = escape(Path(report["dump"]).name)
    lines = [f"[{colour}]{report['outcome']}[/] {name} {report.get('function', '')}"]
    if report.get("not_compared"):
        lines.append(f"    not compared: {escape(report['not_compared'])}")
    if report["error"] is not None:
        lines.append(f"    {escape(report['error'])}")
    lines += [f"    {escape(sentence)}" for sentence in report.get("differences", [])]
    tensors = report.get("tensors", [])
    if tensors:
        equal = sum(tensor["different"] == 0 for tensor in tensors)
        lines.append(f"    {equal} of {len(tensors)} tensors equal")
    out.print("\n".join(lines), soft_wrap=True)

"""``mlacast check``: what is installed here, and whether this device computes right."""

from __future__ import annotations

import platform
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

import mlacast
from mlacast.bench.machine import version_of
from mlacast.cli.device import read_device
from mlacast.cli.output import JsonFlag, console, print_json, with_progress
from mlacast.cli.self_tests import SELF_TESTS, run_self_test

_OPTIONAL_PACKAGES = ("triton", "transformers", "numpy")


def _environment(device: torch.device, backend: str | None) -> dict[str, Any]:
    explanation = mlacast.explain("sparse_mla_prefill", device=device, backend=backend)
    is_cuda = device.type == "cuda"
    return {
        "mlacast": mlacast.__version__,
        "python": platform.python_version(),
        # torch's own word says which build it is (cpu, cu130), the package's version may not.
        "packages": {
            "torch": torch.__version__,
            **{package: version_of(package) for package in _OPTIONAL_PACKAGES},
        },
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
        "arch": explanation.arch,
        "backend": explanation.backend,
    }


def check(
    device: Annotated[
        str | None, typer.Option(help="Device to test; a GPU if there is one, else the CPU.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend to test: reference, triton or hopper.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Print the environment and run a short self-test on a device.

    The tests compare number formats code by code, and fused calls with a float64 computation of
    their own. Exit code 1 if one fails.
    """
    place = read_device(device)
    try:
        environment = _environment(place, backend)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    names = [test.title for test in SELF_TESTS]
    results = [
        run_self_test(test, place, backend)
        for test in with_progress(SELF_TESTS, names, shown=not json)
    ]
    passed = all(result.passed for result in results)
    if json:
        tests = [
            {"name": result.name, "passed": result.passed, "detail": result.detail}
            for result in results
        ]
        print_json({"passed": passed, "environment": environment, "tests": tests})
    else:
        out = console()
        facts = Table(show_header=False, box=None)
        packages = environment.pop("packages")
        for key, value in (*environment.items(), *packages.items()):
            absent = "not installed" if key in packages else "none covers the call"
            facts.add_row(key, absent if value is None else str(value))
        out.print(facts)
        table = Table("", "self-test", "result")
        for result in results:
            mark = "[green]pass[/]" if result.passed else "[bold red]FAIL[/]"
            table.add_row(mark, result.name, escape(result.detail))
        out.print(table)
    raise typer.Exit(0 if passed else 1)

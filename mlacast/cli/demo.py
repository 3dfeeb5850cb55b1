"""The main job: a small DeepSeek-V4 model through mlacast, compared with transformers itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import typer

import mlacast
from mlacast.cli.demo_mixed import run_mixed_step
from mlacast.cli.demo_model import LAYER_TYPES, build_model, passage_tokens
from mlacast.cli.demo_picture import draw_picture
from mlacast.cli.demo_report import Report, as_json, print_report
from mlacast.cli.demo_stages import Models, run_decode, run_prefill, warm_up
from mlacast.cli.device import read_device
from mlacast.cli.output import console, print_json, progress_bar
from mlacast.integrations.transformers import fuse
from mlacast.integrations.transformers.modeling import load_modeling

PICTURE = "mlacast_demo.png"
PROMPT_TOKENS = 128
DECODE_TOKENS = 16
WARM_UP_TOKENS = 20
MIXED_LAYER = LAYER_TYPES.index("compressed_sparse_attention")


def run_demo(json: bool, out: Path | None, device: str | None, seed: int) -> int:
    """Run the demo, print its report and draw its picture.

    Warnings and progress go to standard error.

    Args:
        json: Print JSON and nothing else.
        out: Folder of the picture, created if needed; None: the current one.
        device: Name of a device; None: a GPU if there is one, else the CPU.
        seed: Seed of the model's weights. The same seed gives the same figures, times apart.

    Returns:
        0 if mlacast and transformers agree, 1 if they do not or transformers is too old.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        typer.BadParameter: The device does not exist, or ``out`` is no folder.
    """
    try:
        load_modeling()
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        typer.echo(f"mlacast demo: {error}", err=True)
        return 1
    place = read_device(device)
    folder = _folder(out)
    with _one_thread(place):
        report = _work(place, folder / PICTURE, seed, shown=not json)
    if json:
        print_json(as_json(report))
    else:
        print_report(report, console())
    return 0 if report.agrees else 1


def _folder(out: Path | None) -> Path:
    folder = Path() if out is None else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"out {str(folder)!r}: {error.strerror}") from None
    return folder


def _work(device: torch.device, picture: Path, seed: int, *, shown: bool) -> Report:
    """Run all stages under a progress bar."""
    with progress_bar(shown=shown) as bar:
        task = bar.add_task("building the model", total=5)
        eager = build_model(seed, device)
        models = Models(
            eager=eager,
            fp8=fuse(copy.deepcopy(eager)),
            bf16=fuse(copy.deepcopy(eager), out_format=mlacast.Bf16()),
        )
        stream = passage_tokens(PROMPT_TOKENS + DECODE_TOKENS, device)
        prompt, following = stream[:, :PROMPT_TOKENS], stream[:, PROMPT_TOKENS:]
        warm_up(models, prompt[:, :WARM_UP_TOKENS])
        bar.update(task, description="prefill", advance=1)
        prefill = run_prefill(models, prompt)
        bar.update(task, description="decode", advance=1)
        decode = run_decode(models, prompt, following)
        bar.update(task, description="mixed step", advance=1)
        mixed = run_mixed_step(eager, MIXED_LAYER, seed)
        bar.update(task, description="picture", advance=1)
        layer_types = list(eager.config.layer_types)
        draw_picture(picture, layer_types, prefill, decode, mixed)
        bar.advance(task)
    backend = mlacast.explain("sparse_mla_prefill", device=device).backend
    return Report(
        device=str(device),
        backend=backend or "no",
        seed=seed,
        layer_types=layer_types,
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        picture=picture,
    )


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Use one thread on the CPU: the matrices are too small to share, and sums stay the same."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

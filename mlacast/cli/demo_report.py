"""How the demo's figures are said: one table for people, one object for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from mlacast.cli.demo_metrics import FUSED_LAUNCHES, SEPARATE_LAUNCHES, Stage
from mlacast.cli.demo_mixed import MixedRun
from mlacast.cli.demo_stages import StageRun


@dataclass(frozen=True)
class Report:
    """Everything the demo found out.

    Attributes:
        device: Where it ran.
        backend: Backend of the attention ops.
        seed: Seed of the weights.
        layer_types: Kind of each layer.
        prefill: First stage.
        decode: Second stage.
        mixed: Third stage.
        picture: The PNG that was written.
    """

    device: str
    backend: str
    seed: int
    layer_types: list[str]
    prefill: StageRun
    decode: StageRun
    mixed: MixedRun
    picture: Path

    @property
    def stages(self) -> tuple[Stage, Stage, Stage]:
        """The stages in the order they ran."""
        return (self.prefill.stage, self.decode.stage, self.mixed.stage)

    @property
    def agrees(self) -> bool:
        """Whether every cosine of every stage is above 0.99."""
        return all(stage.agrees for stage in self.stages)

    @property
    def notes(self) -> list[str]:
        """What the figures mean and what they do not."""
        timed = "Times are of one run each"
        if self.backend == "reference":
            timed += ", of the reference implementation: they say nothing about fused GPU kernels"
        return [
            "Errors are norms relative to transformers' eager attention in float32; out error is "
            "that of an attention layer's output, mean over layers.",
            "The mixed step covers one layer, so it has no logits; its decode rows read FP8 pages.",
            f"Launches are counted by construction: {SEPARATE_LAUNCHES} (norm and RoPE, attention, "
            f"inverse RoPE and cast) against {FUSED_LAUNCHES} per layer and forward.",
            timed + ".",
        ]


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as plain values."""
    stages = [
        {
            **asdict(stage),
            "bytes_saved": stage.bytes_saved,
            "launches_separate": SEPARATE_LAUNCHES * stage.launches,
            "launches_fused": FUSED_LAUNCHES * stage.launches,
            "agrees": stage.agrees,
        }
        for stage in report.stages
    ]
    for stage in stages:
        del stage["launches"]
    layers = [
        {
            "layer": index,
            "type": kind,
            "prefill_fp8_error": report.prefill.layers.fp8[index],
            "prefill_bf16_error": report.prefill.layers.bf16[index],
            "decode_fp8_error": report.decode.layers.fp8[index],
            "decode_bf16_error": report.decode.layers.bf16[index],
        }
        for index, kind in enumerate(report.layer_types)
    ]
    return {
        "agrees": report.agrees,
        "device": report.device,
        "backend": report.backend,
        "seed": report.seed,
        "stages": stages,
        "layers": layers,
        "decode_logit_errors": report.decode.positions,
        "mixed_row_errors": report.mixed.row_errors,
        "picture": str(report.picture),
        "notes": report.notes,
    }


def print_report(report: Report, out: Console) -> None:
    """Print the table and what its figures mean."""
    table = Table(title=f"mlacast demo on {report.device} ({report.backend} backend)")
    table.add_column("", no_wrap=True)
    for stage in report.stages:
        table.add_column(stage.name, justify="right", no_wrap=True)
    for name, show in _ROWS:
        table.add_row(name, *(show(stage) for stage in report.stages))
    out.print(table)
    for note in report.notes:
        out.print(Padding(note, (0, 0, 0, 2)), style="dim")
    verdict = "agree" if report.agrees else "DISAGREE"
    out.print(f"mlacast and transformers {verdict} (every cosine above 0.99 is asked for)")
    out.print(f"picture: {report.picture}")


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _bytes(count: int) -> str:
    return f"{count / 1024:,.0f} KiB"


_ROWS: Sequence[tuple[str, Callable[[Stage], str]]] = (
    ("query tokens", lambda s: str(s.tokens)),
    ("logits: cosine", lambda s: _number(s.logit_cosine, ".5f")),
    ("logits: error", lambda s: _number(s.logit_error, ".2%")),
    ("out: lowest cosine", lambda s: _number(s.out_cosine, ".5f")),
    ("out: error, FP8", lambda s: _number(s.out_error, ".2%")),
    ("out: error, bf16 instead", lambda s: _number(s.out_error_bf16, ".2%")),
    ("attention output in bf16", lambda s: _bytes(s.bytes_bf16)),
    ("attention output in FP8 + scales", lambda s: _bytes(s.bytes_fp8)),
    ("bytes saved", lambda s: f"{s.bytes_saved:.1%}"),
    ("launches, separate kernels", lambda s: str(SEPARATE_LAUNCHES * s.launches)),
    ("launches, fused", lambda s: str(FUSED_LAUNCHES * s.launches)),
    ("time, transformers eager", lambda s: f"{s.seconds_eager:.2f} s"),
    ("time, mlacast", lambda s: f"{s.seconds_mlacast:.2f} s"),
)

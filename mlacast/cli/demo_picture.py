"""The demo's picture: errors on top, the shared buffer of the mixed step below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from mlacast.cli.demo_mixed import DECODE, PADDING, PREFILL, UNTOUCHED, MixedRun
from mlacast.cli.demo_stages import StageRun

_BLUE, _ORANGE, _GREEN, _GREY, _DARK = "#3b6fb6", "#e08a2e", "#4c9f70", "#e6e6e6", "#8a8a8a"
_SHORT = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "CSA",
    "heavily_compressed_attention": "HCA",
}
_COLOURS = {UNTOUCHED: _GREY, DECODE: _ORANGE, PREFILL: _BLUE, PADDING: _DARK}


def draw_picture(
    path: Path, layer_types: list[str], prefill: StageRun, decode: StageRun, mixed: MixedRun
) -> None:
    """Write a PNG with the error of each layer and position and the layout of the shared buffer.

    Args:
        path: File to write; its folder must exist.
        layer_types: Kind of each layer, as transformers names them.
        prefill: Result of the prefill stage.
        decode: Result of the decode stage.
        mixed: Result of the mixed step.
    """
    figure = Figure(figsize=(13, 9.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, height_ratios=(1.0, 1.15))
    _draw_layers(axes[0, 0], layer_types, prefill, decode)
    _draw_positions(axes[0, 1], prefill, decode)
    _draw_rows(axes[1, 0], mixed)
    _draw_scales(axes[1, 1], mixed)
    figure.suptitle(
        "DeepSeek-V4 attention through mlacast, compared with transformers' eager attention",
        fontsize=14,
    )
    figure.savefig(path)


def _percent(axis: Any) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_layers(axes: Any, layer_types: list[str], prefill: StageRun, decode: StageRun) -> None:
    groups = (
        ("prefill, FP8 output", prefill.layers.fp8, _BLUE),
        ("decode, FP8 output", decode.layers.fp8, _ORANGE),
        ("prefill, bf16 output", prefill.layers.bf16, _GREEN),
    )
    width = 0.27
    for place, (label, errors, colour) in enumerate(groups):
        at = [layer + (place - 1) * width for layer in range(len(errors))]
        bars = axes.bar(at, errors, width * 0.92, label=label, color=colour)
        axes.bar_label(bars, [f"{100 * error:.1f}" for error in errors], fontsize=8, padding=2)
    axes.set_xticks(
        range(len(layer_types)),
        [f"layer {i}\n{_SHORT.get(kind, kind)}" for i, kind in enumerate(layer_types)],
    )
    # Room for the legend above the tallest bar.
    axes.set_ylim(0, 1.35 * max(max(errors) for _, errors, _ in groups))
    _percent(axes.yaxis)
    axes.set_ylabel("relative error of the layer's output")
    axes.set_title("Error per layer, each on the input the eager model gave it")
    axes.legend(
        ncols=3,
        loc="upper center",
        frameon=False,
        fontsize=9,
        columnspacing=1.2,
        handlelength=1.4,
    )
    _plain(axes)


def _draw_positions(axes: Any, prefill: StageRun, decode: StageRun) -> None:
    start = len(prefill.positions)
    axes.plot(range(start), prefill.positions, color=_BLUE, linewidth=1.2, label="prefill")
    axes.plot(
        range(start, start + len(decode.positions)),
        decode.positions,
        color=_ORANGE,
        marker="o",
        markersize=3.5,
        linewidth=1.2,
        label="decode, one token per step",
    )
    axes.set_ylim(0, 1.5 * max(max(prefill.positions), max(decode.positions)))
    _percent(axes.yaxis)
    axes.set_xlabel("position of the token")
    axes.set_ylabel("relative error of the logits")
    axes.set_title("Error of the logits after all layers, FP8 output")
    axes.legend(ncols=2, loc="upper center", frameon=False, fontsize=9)
    axes.text(
        0.5,
        0.87,
        "peaks: rounding made the indexer keep another entry,\nor the router pick another expert",
        transform=axes.transAxes,
        ha="center",
        va="top",
        fontsize=9,
        color="#555555",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},
    )
    _plain(axes)


def _draw_writers(axes: Any, writers: torch.Tensor, *, columns_too: bool) -> None:
    colours = ListedColormap([_COLOURS[writer] for writer in range(len(_COLOURS))])
    axes.imshow(
        writers.numpy(),
        cmap=colours,
        vmin=-0.5,
        vmax=len(_COLOURS) - 0.5,
        aspect="auto",
        interpolation="nearest",
    )
    rows, columns = writers.shape
    between_rows = [y - 0.5 for y in range(1, rows)]
    axes.hlines(between_rows, -0.5, columns - 0.5, color="white", linewidth=0.5)
    if columns_too:
        between_columns = [x - 0.5 for x in range(1, columns)]
        axes.vlines(between_columns, -0.5, rows - 0.5, color="white", linewidth=0.5)


def _legend(axes: Any, writers: torch.Tensor, names: dict[int, str]) -> None:
    patches = [
        Patch(color=_COLOURS[writer], label=name)
        for writer, name in names.items()
        if bool((writers == writer).any())
    ]
    axes.legend(
        handles=patches,
        ncols=len(patches),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        frameon=False,
        fontsize=9,
    )


def _draw_rows(axes: Any, mixed: MixedRun) -> None:
    writers = mixed.data_writers
    _draw_writers(axes, writers, columns_too=False)
    rows, blocks = writers.shape
    per_group = blocks // mixed.num_groups
    for group in range(1, mixed.num_groups):
        axes.axvline(group * per_group - 0.5, color="black", linewidth=1.2)
    centres = [group * per_group + per_group / 2 - 0.5 for group in range(mixed.num_groups)]
    axes.set_xticks(
        centres, [f"group {g}: {per_group * 32} codes" for g in range(mixed.num_groups)]
    )
    axes.set_yticks([0, mixed.num_decode, rows - 1])
    axes.set_ylabel("row of the buffer (token)")
    axes.set_title("Mixed step, FP8 codes: two launches, one buffer, no copy")
    _legend(
        axes,
        writers,
        {
            DECODE: f"decode launch ({mixed.num_decode} requests, V4 pages)",
            PREFILL: f"prefill launch ({rows - mixed.num_decode} tokens)",
            UNTOUCHED: "not written",
        },
    )


def _draw_scales(axes: Any, mixed: MixedRun) -> None:
    writers = mixed.sf_writers
    _draw_writers(axes, writers, columns_too=True)
    words, tokens = writers.shape
    per_group = words // mixed.num_groups
    for group in range(1, mixed.num_groups):
        axes.axhline(group * per_group - 0.5, color="black", linewidth=1.2)
    axes.set_yticks(
        [group * per_group + per_group / 2 - 0.5 for group in range(mixed.num_groups)],
        [f"group {group}:\n{per_group} words" for group in range(mixed.num_groups)],
    )
    last = len(mixed.row_errors) - 1
    axes.set_xticks([0, mixed.num_decode, last])
    axes.set_xlabel("token: neighbours in memory (MN-major)")
    axes.set_ylabel("scale word: 4 scales, each for 32 codes")
    axes.set_title(f"The same step's scale words, {tokens - last - 1} tokens of padding")
    _legend(
        axes,
        writers,
        {
            DECODE: "decode launch",
            PREFILL: "prefill launch",
            PADDING: "padding, zeroed by the last launch",
            UNTOUCHED: "not written",
        },
    )

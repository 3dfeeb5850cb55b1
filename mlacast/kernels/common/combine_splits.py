"""Merge the splits of ``sparse_mla_decode``, then the whole epilogue: split-KV's second launch.

Both GPU backends leave the same scratch: un-normalised float32 outputs [splits, s_q, h_q, 512],
maxima (base 2) and sums [splits, s_q, h_q].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.sparse_attention import find_angles, finish_rows
from mlacast.kernels.common.store import Target, store_output
from mlacast.kernels.common.targets import StoreTarget
from mlacast.kernels.config.attention import EndConfig
from mlacast.kernels.config.sparse_attention import combine_config

# Counts and strides that vary while serving must not pick another variant of the kernel.
VARYING_IN_EPILOGUE = [
    "table_rows",
    "stride_positions",
    "row_start",
    "padding_rows",
    "num_tokens",
    "num_splits",
    "stride_sf_token",
    "stride_sf_group",
    "stride_sf_word",
]
# Nor must where a slice of a bigger buffer happens to start.
UNALIGNED_IN_EPILOGUE = [
    "sink_ptr",
    "table_ptr",
    "positions_ptr",
    "lse_ptr",
    "partial_out_ptr",
    "partial_max_ptr",
    "partial_sum_ptr",
    "sf_ptr",
    "scale_ptr",
]
# Maxima of so many splits are read at a time.
_SPLITS_AT_ONCE = tl.constexpr(32)


class State(NamedTuple):
    """Softmax state of heads: ``acc`` [BLOCK_H, 512], un-normalised, maxima and sums [BLOCK_H]."""

    acc: Any
    running_max: Any
    running_sum: Any


class Partials(NamedTuple):
    """Where the states of splits lie, maxima in base 2."""

    out_ptr: Any
    max_ptr: Any
    sum_ptr: Any


class Heads(NamedTuple):
    """Which heads a program has: those of ``token`` (int64) from ``start`` on."""

    token: Any
    start: Any
    num_tokens: Any
    num_heads: Any


@triton.jit
def find_heads(num_tokens, num_heads, BLOCK_H: tl.constexpr):
    """The `Heads` of a program, whose first number goes over blocks of heads, then over tokens."""
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    return Heads(token, (tl.program_id(0) % head_blocks) * BLOCK_H, num_tokens, num_heads)


@triton.jit
def find_split_blocks(total_blocks, split, num_splits):
    """First block of a split and the one behind its last: equal runs, the last ones shorter."""
    per_split = tl.cdiv(total_blocks, num_splits)
    first = tl.minimum(split * per_split, total_blocks)
    last = tl.minimum(first + per_split, total_blocks)
    return first, last


@triton.jit
def _store_state(state, partials, split, heads):
    """Leave the `State` of a split in its `Partials`."""
    head = heads.start + tl.arange(0, state.acc.shape[0])  # [BLOCK_H]
    # No scratch of 4 TB: splits times tokens can be counted in 32 bits.
    row = (split * heads.num_tokens + heads.token) * heads.num_heads + head  # [BLOCK_H]
    d = tl.arange(0, 512)  # [512]
    mask = (head < heads.num_heads)[:, None] & (d >= 0)[None, :]  # [BLOCK_H, 512]
    tl.store(partials.out_ptr + row[:, None] * 512 + d[None, :], state.acc, mask=mask)
    tl.store(partials.max_ptr + row, state.running_max, mask=head < heads.num_heads)
    tl.store(partials.sum_ptr + row, state.running_sum, mask=head < heads.num_heads)


@triton.jit
def end_split(
    state,
    partials,
    split,
    heads,
    sink_ptr,
    angles,
    lse_ptr,
    target,
    padding_rows,
    IS_SPLIT: tl.constexpr,
    END: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    """Leave the state of a split, or store lse and output of a row's only one.

    ``state`` is a `State`, ``partials`` a `Partials`, ``heads`` a `Heads`, ``angles`` an `Angles`,
    ``target`` a `Target`.
    """
    if IS_SPLIT:
        _store_state(state, partials, split, heads)
    else:
        token, head_start, num_tokens, num_heads = heads
        acc, running_max, running_sum = state
        out, lse, _ = finish_rows(
            acc, running_max, running_sum, sink_ptr, head_start, num_heads, angles, 0, END
        )
        head = head_start + tl.arange(0, acc.shape[0])  # [BLOCK_H]
        tl.store(lse_ptr + token * num_heads + head, lse, mask=head < num_heads)
        padding = tl.where(token == num_tokens - 1, padding_rows, 0)
        store_output(out, head_start, num_heads, token, padding, target, 0, OUTPUT)


@triton.jit(
    do_not_specialize=VARYING_IN_EPILOGUE,
    do_not_specialize_on_alignment=UNALIGNED_IN_EPILOGUE,
)
def combine_splits_kernel(
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    sink_ptr,
    table_ptr,
    stride_table,
    table_rows,
    positions_ptr,
    stride_positions,
    lse_ptr,
    data_ptr,
    sf_ptr,
    scale_ptr,
    stride_data_token,
    stride_data_group,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    row_start,
    padding_rows,
    num_tokens,
    num_heads,
    num_splits,
    PROGRAM: tl.constexpr,
    END: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    """Merge WIDTH dimensions of BLOCK_H heads of one token, which PROGRAM names.

    Grid: (s_q * ceil(h_q / BLOCK_H), 512 / WIDTH). Partials are added in ascending order. A split
    without keys has the sum 0, the maximum -inf and a partial of zeros, written like any other.
    """
    BLOCK_H: tl.constexpr = PROGRAM.block_h
    WIDTH: tl.constexpr = PROGRAM.width
    token, head_start, _, _ = find_heads(num_tokens, num_heads, BLOCK_H)
    head = head_start + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    in_range = head < num_heads  # [BLOCK_H]
    first = tl.program_id(1) * WIDTH
    d = first + tl.arange(0, WIDTH)  # [WIDTH]
    mask = in_range[:, None] & (d >= 0)[None, :]  # [BLOCK_H, WIDTH]
    row = token * num_heads + head  # [BLOCK_H], int64
    step = num_tokens.to(tl.int64) * num_heads
    maxima = tl.full((BLOCK_H, _SPLITS_AT_ONCE), -float("inf"), tl.float32)
    for start in range(0, num_splits, _SPLITS_AT_ONCE):
        split = start + tl.arange(0, _SPLITS_AT_ONCE)  # [_SPLITS_AT_ONCE]
        part_max = tl.load(
            partial_max_ptr + split[None, :] * step + row[:, None],
            mask=in_range[:, None] & (split < num_splits)[None, :],
            other=-float("inf"),
        )  # [BLOCK_H, _SPLITS_AT_ONCE]
        maxima = tl.maximum(maxima, part_max)
    running_max = tl.max(maxima, 1)  # [BLOCK_H]
    # -inf - -inf is NaN: shift by 0 where no split has a key.
    shift = tl.where(running_max == -float("inf"), 0.0, running_max)  # [BLOCK_H]
    acc = tl.zeros((BLOCK_H, WIDTH), tl.float32)
    running_sum = tl.zeros((BLOCK_H,), tl.float32)
    for split in tl.range(0, num_splits, loop_unroll_factor=4):
        part_row = split * step + row  # [BLOCK_H], int64
        part_max = tl.load(partial_max_ptr + part_row, mask=in_range, other=-float("inf"))
        part_sum = tl.load(partial_sum_ptr + part_row, mask=in_range, other=0.0)  # [BLOCK_H]
        part_out = partial_out_ptr + part_row[:, None] * 512 + d[None, :]  # [BLOCK_H, WIDTH]
        part = tl.load(part_out, mask=mask, other=0.0)  # [BLOCK_H, WIDTH]
        weight = tl.exp2(part_max - shift)  # [BLOCK_H]
        acc += part * weight[:, None]
        running_sum += part_sum * weight
    angles = find_angles(
        table_ptr,
        stride_table,
        table_rows,
        positions_ptr,
        stride_positions,
        token,
        END.rotates_back,
    )
    out, lse, _ = finish_rows(
        acc, running_max, running_sum, sink_ptr, head_start, num_heads, angles, first, END
    )
    tl.store(lse_ptr + row, lse, mask=in_range & (first == 0))
    target = Target(
        data_ptr,
        sf_ptr,
        scale_ptr,
        stride_data_token,
        stride_data_group,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        row_start,
    )
    padding = tl.where(token == num_tokens - 1, padding_rows, 0)
    store_output(out, head_start, num_heads, token, padding, target, first, OUTPUT)


def split_scratch(
    rows: int, workspace: torch.Tensor | None, launches: Launches
) -> list[torch.Tensor]:
    """Scratch of split states: outputs [rows, 512], maxima and sums [rows], float32.

    A ``workspace`` holds them: the operation has checked its size and where it starts.
    """
    floats = rows * 514
    if workspace is None:
        base = scratch = launches.scratch(floats)
    else:
        base, scratch = workspace, workspace[: floats * 4].view(torch.float32)
    views = [scratch, scratch[rows * 512 :], scratch[rows * 513 :]]
    return [launches.inside(base, view) for view in views]


def split_places(
    num_splits: int,
    rows: int,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
    launches: Launches,
) -> list[torch.Tensor]:
    """Scratch for the splits of ``rows`` rows; ``lse``, not touched, where they are not split."""
    return split_scratch(num_splits * rows, workspace, launches) if num_splits > 1 else [lse] * 3


def combine_splits(
    launches: Launches,
    partials: list[torch.Tensor],
    rope_arguments: list[Any],
    lse: torch.Tensor,
    target: StoreTarget,
    num_tokens: int,
    num_heads: int,
    num_splits: int,
    end: EndConfig,
) -> None:
    """Launch the merge.

    Args:
        launches: Launches of the call.
        partials: From ``split_scratch``, filled.
        rope_arguments: From ``rope_arguments``.
        lse: [s_q, h_q] float32, filled here.
        target: Where the output goes.
        num_tokens: s_q.
        num_heads: h_q.
        num_splits: Splits of every row.
        end: What follows the merge.
    """
    program = combine_config(num_tokens, num_heads)
    launches.launch(
        combine_splits_kernel,
        (num_tokens * triton.cdiv(num_heads, program.block_h), 512 // program.width),
        *partials,
        *rope_arguments,
        lse,
        *target.tensors.values(),
        *target.numbers.values(),
        num_tokens,
        num_heads,
        num_splits,
        PROGRAM=program,
        END=end,
        OUTPUT=target.config,
        num_warps=program.num_warps,
        enable_fp_fusion=False,
    )

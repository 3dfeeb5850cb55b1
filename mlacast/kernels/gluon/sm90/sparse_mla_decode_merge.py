"""Merge of the split states of Hopper ``sparse_mla_decode``, then the whole epilogue.

The same numbers as ``mlacast.kernels.common.combine_splits``, in the same order of operations, from
a kernel whose threads hold 8 neighbouring dimensions and whose warps never wait for each other.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.sm90_store import load_output_scale, store_rows
from mlacast.kernels.common.targets import StoreTarget
from mlacast.kernels.config.attention import EndConfig
from mlacast.kernels.config.sparse_attention import merge_plan
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import LN_2

OPTIONS = {"enable_fp_fusion": False, "launch_pdl": True}

# Counts and strides that vary while serving must not pick another variant of the kernel, nor must
# where a slice of a bigger buffer happens to start. Partial outputs always start at a multiple of
# 16 bytes.
_VARYING = [
    "table_rows",
    "stride_positions",
    "padding_rows",
    "num_tokens",
    "num_splits",
    "stride_sf_token",
    "stride_sf_group",
    "stride_sf_word",
]
UNALIGNED = [
    "partial_max_ptr",
    "partial_sum_ptr",
    "sink_ptr",
    "table_ptr",
    "positions_ptr",
    "lse_ptr",
    "sf_ptr",
    "scale_ptr",
]


@gluon.jit
def _read_lane_4_away(x):
    """Value of the lane whose number differs by 4: where lanes hold 8 columns, 32 columns away."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 4, 0x1f, 0xffffffff;",
        "=r,r",
        [x],
        dtype=x.dtype,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_angles(
    table, position, PLACES: gl.constexpr, COUNT: gl.constexpr, HALF_PAIRING: gl.constexpr
):
    """Cosines and sines [1, COUNT] of dimensions (half pairing) or of pairs, the last of a head.

    Those before the last 64 dimensions get angles that nobody uses. ``table`` is its pointer,
    stride and rows, to which the position is clamped.
    """
    table_ptr, stride_table, table_rows = table
    row_ptr = table_ptr + gl.minimum(gl.maximum(position, 0), table_rows - 1) * stride_table
    at = gl.arange(0, COUNT, PLACES)  # [COUNT]
    cos = gl.load(row_ptr + at % 32)  # [COUNT]
    sin = gl.load(row_ptr + 32 + at % 32)  # [COUNT]
    if HALF_PAIRING:
        # The first of a pair adds its partner's share, the second subtracts it.
        sin = gl.where(at % 64 < 32, sin, -sin)
    return cos[None, :], sin[None, :]


@gluon.jit
def rotate_pairs(x, cos, sin, HALF_PAIRING: gl.constexpr):
    """Rotate [heads, n], 8 neighbours a thread, by the negative angles."""
    if HALF_PAIRING:
        return x * cos + _read_lane_4_away(x) * sin
    else:
        first, second = gl.split(gl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        PAIRS: gl.constexpr = cos.type.layout
        first = gl.convert_layout(first, PAIRS, assert_trivial=True)  # [heads, n / 2]
        second = gl.convert_layout(second, PAIRS, assert_trivial=True)  # [heads, n / 2]
        pairs = gl.join(first * cos + second * sin, second * cos - first * sin)  # [heads, n / 2, 2]
        rotated = gl.reshape(pairs, x.shape)
        return gl.convert_layout(rotated, x.type.layout, assert_trivial=True)


@gluon.jit
def _rotate_back(x, cos, sin, dead, N: gl.constexpr, HALF_PAIRING: gl.constexpr):
    """Rotate the last 64 of 512 columns by the negative angles; ``dead`` rows stay zero.

    The last N columns are 8 neighbours of every thread.
    """
    HEADS: gl.constexpr = x.shape[0]
    LAYOUT: gl.constexpr = x.type.layout
    blocks = gl.reshape(x, (HEADS, 512 // N, N))  # [heads, 512 / N, N]
    BLOCK: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, blocks.type.layout))
    is_last = (gl.arange(0, 512 // N, BLOCK) == 512 // N - 1)[None, :, None]  # [1, 512 / N, 1]
    # -0.0 is the identity of addition: the sum over blocks returns the last one bit for bit. Where
    # it is written as a number the language takes it for 0.0.
    negative_zero = gl.cast(gl.cast(-0x80000000, gl.int32), gl.float32, bitcast=True)
    last = gl.sum(gl.where(is_last, blocks, negative_zero), 1)  # [heads, N]
    last = gl.convert_layout(last, LAYOUT, assert_trivial=True)
    rotated = rotate_pairs(last, cos, sin, HALF_PAIRING)  # [heads, N]
    # Whatever the table holds at the position of an empty row, its output is zero.
    is_rope = gl.arange(0, N, gl.SliceLayout(0, LAYOUT)) >= N - 64  # [N]
    last = gl.where(is_rope[None, :] & (dead == 0)[:, None], rotated, last)
    last = gl.convert_layout(last, gl.SliceLayout(1, blocks.type.layout), assert_trivial=True)
    joined = gl.where(is_last, gl.expand_dims(last, 1), blocks)  # [heads, 512 / N, N]
    return gl.convert_layout(gl.reshape(joined, (HEADS, 512)), LAYOUT, assert_trivial=True)


@gluon.jit
def _load_states(partials, row, step, first, num_splits, d, AHEAD: gl.constexpr):
    """Partial outputs [heads, 512], maxima and sums [heads] of AHEAD splits from ``first`` on.

    Past the last split: no output is read, the numbers are those of the last.
    """
    out_ptr, max_ptr, sum_ptr = partials
    # Rows are counted in 32 bits, as in the kernel; what they have 512 times is in 64.
    parts = ()
    maxima = ()
    sums = ()
    for at in gl.static_range(AHEAD):
        split = gl.minimum(first + at, num_splits - 1) if at > 0 else first
        maxima = maxima + (gl.load(max_ptr + (row + split * step)),)
        sums = sums + (gl.load(sum_ptr + (row + split * step)),)
    for at in gl.static_range(AHEAD):
        pointers = (out_ptr + d)[None, :] + (row + (first + at) * step).to(gl.int64)[:, None] * 512
        if at == 0:
            parts = parts + (gl.load(pointers),)
        else:
            is_there = gl.full(row.shape, first + at, gl.int32, row.type.layout) < num_splits
            parts = parts + (gl.load(pointers, mask=is_there[:, None]),)
    return parts, maxima, sums


@gluon.jit
def _add_states(
    acc, running_sum, states, shift, first, num_splits, AHEAD: gl.constexpr, IS_START: gl.constexpr
):
    """Add the states of up to AHEAD splits from ``first`` on; IS_START: to zeros.

    ``acc`` is [heads, 512], ``running_sum`` and ``shift`` are [heads].
    """
    parts, maxima, sums = states
    for at in gl.static_range(AHEAD):
        if at == 0 or first + at < num_splits:
            weight = gl.exp2(maxima[at] - shift)  # [heads]
            if IS_START and at == 0:
                # One rounding, as of the product: adding zero is exact, and turns -0.0 into 0.0.
                acc = gl.fma(parts[at], gl.broadcast(weight[:, None], acc)[0], acc)
            else:
                acc = acc + parts[at] * weight[:, None]
            running_sum = running_sum + sums[at] * weight
    return acc, running_sum


@gluon.jit
def _sum_states(
    partials, states, row, step, shift, num_splits, d, AHEAD: gl.constexpr, LAYOUT: gl.constexpr
):
    """Output [heads, 512] and sums [heads] of all splits, un-normalised; ``states`` is loaded."""
    acc = gl.zeros((row.shape[0], 512), gl.float32, LAYOUT)
    running_sum = gl.zeros((row.shape[0],), gl.float32, gl.SliceLayout(1, LAYOUT))
    acc, running_sum = _add_states(acc, running_sum, states, shift, 0, num_splits, AHEAD, True)
    for first in range(AHEAD, num_splits, AHEAD):
        states = _load_states(partials, row, step, first, num_splits, d, AHEAD)
        acc, running_sum = _add_states(
            acc, running_sum, states, shift, first, num_splits, AHEAD, False
        )
    return acc, running_sum


@gluon.jit
def _find_heads(num_heads, BLOCK_H: gl.constexpr, FULL_TILES: gl.constexpr, ROW: gl.constexpr):
    """The program's first head, and those of its rows [heads]."""
    head_start = gl.program_id(1) * BLOCK_H
    head = head_start + gl.arange(0, BLOCK_H, ROW)  # [heads]
    if not FULL_TILES:
        # Threads without a head of their own repeat the last one; only its lse is stored again.
        head = gl.minimum(head, num_heads - 1)
    return head_start, head


@gluon.jit
def _find_factors(running_max, running_sum, sink, HAS_SINK: gl.constexpr):
    """What multiplies the output of each row, 0 for an empty one, and its lse; all [heads].

    ``sink`` [heads] is not looked at without HAS_SINK.
    """
    empty = running_sum == 0.0  # [heads]
    divisor = gl.where(empty, 1.0, running_sum)  # [heads]
    lse = gl.where(empty, -float("inf"), (running_max + gl.log2(divisor)) * LN_2)  # [heads]
    factor = gl.where(empty, 0.0, 1.0 / divisor)  # [heads]
    if HAS_SINK:
        # An empty row keeps the factor 0: sink - (-inf) would be +inf, -inf - (-inf) NaN.
        shifted = gl.where(empty, 0.0, sink - lse)  # [heads]
        factor = gl.where(sink == float("inf"), 0.0, factor / (1.0 + gl.exp(shifted)))  # [heads]
    return factor, lse


@gluon.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=UNALIGNED)
def merge_splits_kernel(
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
    padding_rows,
    num_tokens,
    num_heads,
    num_splits,
    PROGRAM: gl.constexpr,
    FULL_TILES: gl.constexpr,
    PDL: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Merge some heads of one token. Grid: (s_q, ceil(h_q / heads)).

    8 to 64 threads share a head. Partials are added in ascending order, several are on their way
    at a time. A split without keys has the sum 0, the maximum -inf and a partial of zeros,
    written like any other.

    PDL: launched ahead of the end of the kernel that writes the partials, which starts no dependent
    before the end of what was launched before it.
    """
    BLOCK_H: gl.constexpr = PROGRAM.heads
    AHEAD: gl.constexpr = PROGRAM.ahead
    THREADS: gl.constexpr = gl.num_warps() * 32 // BLOCK_H
    LANES: gl.constexpr = min(THREADS, 32)
    SHAPE: gl.constexpr = [32 // LANES, LANES]
    WARPS: gl.constexpr = [gl.num_warps() * LANES // THREADS, THREADS // LANES]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], SHAPE, WARPS, [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4], SHAPE, WARPS, [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    token = gl.program_id(0).to(gl.int64)
    head_start, head = _find_heads(num_heads, BLOCK_H, FULL_TILES, ROW)
    # No scratch of 4 TB: rows of all splits can be counted in 32 bits.
    row = gl.program_id(0) * num_heads + head  # [heads]
    step = num_tokens * num_heads
    d = gl.arange(0, 512, gl.SliceLayout(0, LAYOUT))  # [512]
    partials = (partial_out_ptr, partial_max_ptr, partial_sum_ptr)

    # Inputs that were complete before the splits began need not wait for them.
    scale = load_output_scale(scale_ptr, OUTPUT.kind)
    sink = scale
    if END.has_sink:
        sink = gl.load(sink_ptr + head)  # [heads]
    if END.rotates_back:
        position = gl.load(positions_ptr + token * stride_positions).to(gl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    states = _load_states(partials, row, step, 0, num_splits, d, AHEAD)
    parts, maxima, sums = states
    running_max = gl.full((BLOCK_H,), -float("inf"), gl.float32, ROW)  # [heads]
    for split in range(AHEAD, num_splits):
        running_max = gl.maximum(running_max, gl.load(partial_max_ptr + (row + split * step)))
    if END.rotates_back:
        # Only now, behind a branch: addresses wait for the position, and partials should not.
        ANGLES: gl.constexpr = gl.SliceLayout(0, LAYOUT if END.half_pairing else PAIRS)
        COUNT: gl.constexpr = 8 * THREADS if END.half_pairing else 4 * THREADS
        table = (table_ptr, stride_table, table_rows)
        cos, sin = load_angles(table, position, ANGLES, COUNT, END.half_pairing)
    for at in gl.static_range(AHEAD):
        running_max = gl.maximum(running_max, maxima[at])
    # -inf - -inf is NaN: shift by 0 where no split has a key.
    shift = gl.where(running_max == -float("inf"), 0.0, running_max)  # [heads]
    acc, running_sum = _sum_states(partials, states, row, step, shift, num_splits, d, AHEAD, LAYOUT)
    factor, lse = _find_factors(running_max, running_sum, sink, END.has_sink)
    gl.store(lse_ptr + row, lse)
    dead = factor == 0.0  # [heads]
    # where, not a product with 0: an all-masked accumulator may hold NaN from an infinite value.
    out = gl.where(dead[:, None], 0.0, acc * factor[:, None])  # [heads, 512]
    if END.rotates_back:
        out = _rotate_back(out, cos, sin, dead, 8 * THREADS, END.half_pairing)
    store_rows(
        out,
        data_ptr + token * stride_data_token,
        stride_data_group,
        sf_ptr,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        scale,
        token,
        gl.where(token == num_tokens - 1, padding_rows, 0),
        head_start,
        num_heads,
        0,
        FULL_TILES,
        OUTPUT,
    )


def merge_splits(
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
    """Launch the merge behind the kernel that fills ``partials``.

    It is launched ahead of that kernel's end and waits for it. What it reads before waiting, the
    sink, positions, table and scale of the output, was complete when that kernel began.

    Args:
        launches: Launches of the call.
        partials: From ``split_scratch``.
        rope_arguments: From ``rope_arguments``.
        lse: [s_q, h_q] float32, filled here.
        target: Where the output goes; groups of whole heads.
        num_tokens: s_q.
        num_heads: h_q.
        num_splits: Splits of every row.
        end: What follows the merge.
    """
    plan = merge_plan(num_tokens, num_heads)
    launches.launch(
        merge_splits_kernel,
        plan.grid,
        *partials,
        *rope_arguments,
        lse,
        *target.tensors.values(),
        *target.hopper_numbers,
        num_tokens,
        num_heads,
        num_splits,
        PROGRAM=plan.program,
        FULL_TILES=plan.full_tiles,
        PDL=OPTIONS["launch_pdl"],
        END=end,
        OUTPUT=target.hopper_config,
        num_warps=plan.program.warps,
        **OPTIONS,
    )

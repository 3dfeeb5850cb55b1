"""Storing epilogue of Hopper kernels whose accumulator rows are tokens: one head of 64 of them.

Same formats and bits as ``mlacast.kernels.common.store``; heads are 128 wide.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_division import invert
from mlacast.kernels.common.sm90_group_scales import divide_by_scales, find_group_scales
from mlacast.kernels.common.sm90_pack import pack_bf16, pack_e4m3
from mlacast.kernels.common.sm90_rotation import (
    find_aligned_offset,
    find_place_in_group,
    find_row_offset,
    hide_rows,
    hide_value,
)
from mlacast.kernels.common.sm90_store import BF16, FP8_TENSOR, FP8_UE8M0, NVFP4
from mlacast.kernels.common.sm90_token_nvfp4 import store_token_nvfp4

BLOCK_ROWS = gl.constexpr(64)


@gluon.jit
def _store_values(
    values, target, token, skipped, head, PER_VALUE: gl.constexpr, OUTPUT: gl.constexpr
):
    """Store words of PER_VALUE dimensions each [64, 128 / PER_VALUE] into the rows of tokens."""
    rows_of_data, _, _, group_heads = target
    data_ptr, stride_token, stride_group = rows_of_data
    LAYOUT: gl.constexpr = values.type.layout
    COLUMNS: gl.constexpr = 128 // PER_VALUE
    CHUNK: gl.constexpr = 32 // PER_VALUE
    # Codes are bytes, and leave as words of four.
    WORD: gl.constexpr = 1 if PER_VALUE == 1 else 4
    if WORD == 4:
        data_ptr = data_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    local = hide_rows(gl.SliceLayout(1, LAYOUT))  # [64]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))  # [COLUMNS]
    group, within = find_place_in_group(head, group_heads)
    start = find_aligned_offset(group, stride_group // WORD)
    if OUTPUT.chunk32:
        # In this order a head is 512 wide, and a head here a quarter of one.
        wide_heads = group_heads // 4
        start += ((within % 4) * 4 * wide_heads + within // 4) * CHUNK
        column = (column // CHUNK) * (wide_heads * CHUNK) + column % CHUNK
    else:
        start += within * COLUMNS
    rows = find_aligned_offset(token + local, stride_token // WORD)  # [64], int64
    pointers = data_ptr + start + rows[:, None] + column[None, :]  # [64, COLUMNS]
    gl.store(pointers, values, mask=(local >= skipped)[:, None])


@gluon.jit
def _store_scale_rows(
    scales,
    target,
    token,
    first,
    stop,
    head,
    OUTPUT: gl.constexpr,
):
    """Store scales [64, n] of a head, rows ``first`` up to ``stop``."""
    _, rows_of_scales, _, group_heads = target
    sf_ptr, stride_token, stride_group, stride_word, _, _, _, _ = rows_of_scales
    GROUP: gl.constexpr = OUTPUT.group
    LAYOUT: gl.constexpr = scales.type.layout
    local = hide_rows(gl.SliceLayout(1, LAYOUT))  # [64]
    # Scales of 64 values are there, and stored, twice.
    COPIES: gl.constexpr = 2 if GROUP == 64 else 1
    block = hide_value(gl.arange(0, scales.shape[1], gl.SliceLayout(0, LAYOUT))) // COPIES  # [n]
    mask = ((local >= first) & (local < stop))[:, None]  # [64, 1]
    group, within = find_place_in_group(head, group_heads)
    if OUTPUT.chunk32:
        wide_heads = group_heads // 4
        index = ((within % 4) * 4 + block) * wide_heads + within // 4  # [n]
    else:
        index = within * (128 // GROUP) + block  # [n]
    rows = find_row_offset(token + local, stride_token)  # [64], int64
    start = find_row_offset(group, stride_group)
    if OUTPUT.kind == FP8_UE8M0:
        # Scale ``index`` of a group is byte index % 4 of word index // 4.
        bytes_ptr = sf_ptr.to(gl.pointer_type(gl.uint8), bitcast=True)
        in_column = (start + find_row_offset(index // 4, stride_word)) * 4 + index % 4  # [n], int64
        pointers = bytes_ptr + rows[:, None] * 4 + in_column[None, :]  # [64, n]
        gl.store(pointers, scales.to(gl.uint8), mask=mask)
        # The last head of a group also zeroes the rest of its last word.
        count = group_heads * (128 // GROUP)
        rest = gl.where(within == group_heads - 1, (4 - count % 4) % 4, 0)
        for byte in range(rest):
            last = (start + find_row_offset(count // 4, stride_word)) * 4 + count % 4 + byte
            unused = bytes_ptr + rows * 4 + last  # [64]
            gl.store(
                unused,
                gl.zeros((BLOCK_ROWS,), gl.uint8, gl.SliceLayout(1, LAYOUT)),
                mask=(local >= first) & (local < stop),
            )
    else:
        in_column = start + find_row_offset(index, stride_word)  # [n], int64
        gl.store(sf_ptr + rows[:, None] + in_column[None, :], scales, mask=mask)


@gluon.jit
def _store_scales(
    scales,
    target,
    token,
    skipped,
    head,
    OUTPUT: gl.constexpr,
):
    """Store scales [64, n] of a head; after the last token also zeroes, the padding."""
    _, rows_of_scales, _, _ = target
    _, _, _, _, _, _, num_rows, padding_rows = rows_of_scales
    _store_scale_rows(scales, target, token, skipped, BLOCK_ROWS, head, OUTPUT)
    padding = gl.where(token + BLOCK_ROWS == num_rows, padding_rows, 0)
    for start in range(0, padding, BLOCK_ROWS):
        _store_scale_rows(
            gl.zeros_like(scales),
            target,
            num_rows + start,
            0,
            padding - start,
            head,
            OUTPUT,
        )


@gluon.jit
def store_token_block(
    x,
    factor,
    alive,
    target,
    token,
    skipped,
    head,
    stage,
    OUTPUT: gl.constexpr,
):
    """Quantise and store one head of 64 tokens: ``x * factor``.

    ``x`` is [64, 128] float32, ``factor`` float32 [64]; rows where ``alive`` (int32 [64], all ones
    or zero) is zero, and the factor with it, are stored as zeros whatever they hold. ``token``
    (int32) is the first row's, counted in the token range; the first ``skipped`` rows are not
    stored, so that it may be negative. After the range's last token the padding rows of the scales
    are zeroed.

    ``target`` is ((data pointer, strides of a token and of a group), (scale pointer, strides of a
    token, a group and a word, the range's first row in the buffer, column tiles of swizzled
    scales, tokens of the range, padding rows), pointer of the format's own scale, heads of a
    group). OUTPUT is an `OutputConfig`, of whose widths nothing is read. ``stage`` is shared memory
    of this warpgroup for Nvfp4, see there; of other formats nothing.
    """
    COLUMN: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    _, _, scale_ptr, _ = target
    per_row = gl.convert_layout(factor, COLUMN, assert_trivial=True)[:, None]  # [64, 1]
    if OUTPUT.kind == BF16:
        _store_values(pack_bf16(x * per_row, alive, True), target, token, skipped, head, 1, OUTPUT)
    elif OUTPUT.kind == FP8_TENSOR:
        ratio = x * per_row * invert(gl.load(scale_ptr))
        _store_values(pack_e4m3(ratio, alive, True), target, token, skipped, head, 4, OUTPUT)
    elif OUTPUT.kind == NVFP4:
        store_token_nvfp4(x, factor, target, token, skipped, head, stage)
    else:
        pairs, scale, scales = find_group_scales(x, factor, alive, True, OUTPUT)
        _store_scales(scales, target, token, skipped, head, OUTPUT)
        ratio = divide_by_scales(pairs, scale, OUTPUT)
        _store_values(pack_e4m3(ratio, alive, True), target, token, skipped, head, 4, OUTPUT)

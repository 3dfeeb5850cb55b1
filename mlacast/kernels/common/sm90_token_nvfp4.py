"""Nvfp4 rows of a Hopper accumulator [64, 128], one head of 64 tokens, by way of shared memory.

A loop of four passes of 32 columns: its code is fetched once, where that of 128 columns comes from
far caches at every tile. In a pass a thread has a whole group of a row, so nothing is exchanged.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_nvfp4 import encode_rows, find_row_scales
from mlacast.kernels.common.sm90_rotation import (
    find_aligned_offset,
    find_place_in_group,
    hide_value,
)

BLOCK_ROWS = gl.constexpr(64)
_PASSES = gl.constexpr(4)
_GROUPS = gl.constexpr(gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0]))
_WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [16, 2], [4, 1], [1, 0]))
# Of float32 [64, 32], a pass: groups p and p + 4 of every row. Pieces of 32 bytes are moved by the
# row, and halves of 16 bytes by the group, so that no bank is met twice at once: accumulators come
# as four rows of 32 bytes, and leave as 16 bytes of two groups of four rows.
STAGE_LAYOUT = gl.constexpr(
    gl.SharedLinearLayout(
        [
            [0, 1],
            [0, 2],
            [0, 4],
            [0, 8],
            [0, 20],
            [1, 8],
            [2, 20],
            [4, 0],
            [8, 0],
            [16, 0],
            [32, 0],
        ]
    )
)


@gluon.jit
def _split_passes(x):
    """Columns [64, 32] of each of the four passes: groups p and p + 4 of 16."""
    # [64, 2, 16, 2, 2]; a split takes the last dimension.
    columns = gl.permute(gl.reshape(x, (BLOCK_ROWS, 2, 2, 2, 16)), (0, 1, 4, 3, 2))
    early, late = gl.split(columns)
    zero, one = gl.split(early)
    two, three = gl.split(late)
    shape: gl.constexpr = (BLOCK_ROWS, 32)
    return (
        gl.reshape(zero, shape),
        gl.reshape(one, shape),
        gl.reshape(two, shape),
        gl.reshape(three, shape),
    )


@gluon.jit
def _fill_stage(stage, x, PASS: gl.constexpr):
    """Store the columns of a pass [64, 32]."""
    stage.store(x)
    # Says nothing, but differs: the branches' stores would else become one, behind 16 copies.
    gl.inline_asm_elementwise(
        f"mov.b32 $0, {PASS};", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _store_scale_words(scales, target, row, first, stop, head):
    """Store scales [64, 2] as words of four groups; rows ``first`` up to ``stop`` of ``row``.."""
    _, rows_of_scales, _, _ = target
    sf_ptr, _, _, _, row_start, tiles, _, _ = rows_of_scales
    LAYOUT: gl.constexpr = scales.type.layout
    local = hide_value(gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, LAYOUT)))  # [64]
    half = gl.arange(0, 2, gl.SliceLayout(0, LAYOUT))  # [2]
    # Tiles of 128 rows by 4 groups, of 512 bytes. Rows are no negative numbers where they matter.
    place = row_start + row + local  # [64]
    words_ptr = sf_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    # [64], int64
    in_row = (place >> 7).to(gl.int64) * (tiles * 128) + ((place & 31) * 4 + (place >> 5 & 3))
    pointers = words_ptr + in_row[:, None] + (head * 256 + half * 128)[None, :]  # [64, 2]
    mask = ((local >= first) & (local < stop))[:, None]  # [64, 1]
    gl.store(pointers, scales, mask=mask)


@gluon.jit
def _store_passes(
    parts,
    factor,
    stage,
    global_scale,
    pointers,
    mask,
    passes,
    IN_FLOAT32: gl.constexpr,
):
    """Quantise and store the columns of all passes; returns the scales, words of four [64, 2].

    ``parts`` are columns [64, 32], ``factor`` is [64], ``pointers`` and ``mask`` are those of words
    [64, 4]. Of a pass, ``part`` is [64, 32], scale bytes and multipliers are [64, 2].


    Scales of the next pass are looked for beside the codes of this one. After the last pass they
    are found again, and not used.
    """
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [4, 1], [1, 0])
    zero, one, two, three = parts
    scales = gl.zeros((BLOCK_ROWS, 2), gl.uint32, SCALES)
    stage.store(zero)
    part = stage.load(_GROUPS)
    byte, multiplier = find_row_scales(part, factor, global_scale, IN_FLOAT32)
    for step in range(passes):
        if step == 0:
            _fill_stage(stage, one, 1)
        elif step == 1:
            _fill_stage(stage, two, 2)
        elif step == 2:
            _fill_stage(stage, three, 3)
        normalised = part * factor[:, None]
        following = stage.load(_GROUPS)
        next_byte, next_multiplier = find_row_scales(following, factor, global_scale, IN_FLOAT32)
        words = encode_rows(normalised, byte, multiplier, IN_FLOAT32)
        words = gl.convert_layout(words, _WORDS, assert_trivial=True)
        if not IN_FLOAT32:
            # A row that counts as zeros may hold NaN.
            kept = gl.convert_layout(factor, gl.SliceLayout(1, _WORDS), assert_trivial=True) != 0.0
            words = gl.where(gl.broadcast(kept[:, None], words)[0], words, 0)
        gl.store(pointers + step * 2, words, mask=mask)
        byte = gl.convert_layout(byte, SCALES, assert_trivial=True)
        scales = (scales >> 8) | (byte.to(gl.uint32) << 24)
        part = following
        byte = next_byte
        multiplier = next_multiplier
    return scales


@gluon.jit
def store_token_nvfp4(x, factor, target, token, skipped, head, stage):
    """Quantise and store one head of 64 tokens; arguments as in ``store_token_block``.

    Rows whose factor is zero are stored as zeros. ``stage`` is float32 [64, 32] in shared memory,
    of this warpgroup alone. Four scales of a row, which are neighbours, leave as a word.
    """
    rows_of_data, rows_of_scales, scale_ptr, group_heads = target
    data_ptr, stride_token, stride_group = rows_of_data
    _, _, _, _, _, _, num_rows, padding_rows = rows_of_scales
    WORDS: gl.constexpr = _WORDS
    zero, one, two, three = _split_passes(x)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, _GROUPS))  # [64]
    global_scale = gl.load(scale_ptr)

    local = hide_value(gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, WORDS)))  # [64]
    word = gl.arange(0, 4, gl.SliceLayout(0, WORDS))  # [4]
    group, within = find_place_in_group(head, group_heads)
    start = find_aligned_offset(group, stride_group // 4) + within * 16
    rows = find_aligned_offset(token + local, stride_token // 4)  # [64], int64
    pointers = data_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + start
    pointers = pointers + rows[:, None] + (word // 2 * 8 + word % 2)[None, :]  # [64, 4]
    mask = (local >= skipped)[:, None]  # [64, 1]
    # Nothing is ever padded by less than no row, which the compiler cannot know: it would write
    # out the four passes.
    passes = _PASSES + gl.minimum(padding_rows, 0)
    parts = (zero, one, two, three)
    # From 2**-100 to 2**100 nothing leaves the range of normal numbers.
    if (global_scale >= 7.888609052210118e-31) & (global_scale <= 1.2676506002282294e30):
        scales = _store_passes(parts, factor, stage, global_scale, pointers, mask, passes, True)
    else:
        scales = _store_passes(parts, factor, stage, global_scale, pointers, mask, passes, False)
    scales = scales.to(gl.int32, bitcast=True)
    _store_scale_words(scales, target, token, skipped, BLOCK_ROWS, head)
    padding = gl.where(token + BLOCK_ROWS == num_rows, padding_rows, 0)
    for first in range(0, padding, BLOCK_ROWS):
        zeros = gl.zeros_like(scales)
        _store_scale_words(zeros, target, num_rows + first, 0, padding - first, head)

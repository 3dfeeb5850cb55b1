"""Copies of records for the Hopper decode kernel: units, unscaled dimensions, scales."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from mlacast.kernels.gluon.sm90.sparse_mla_decode_layouts import (
    FP4_SCALE_STAGE,
    ROW,
    SCALE_STAGE,
    SCALES_2,
    SCALES_4,
    SCALES_8,
    STAGE_16,
    STAGE_16_MIXED,
    WORDS_16,
    WORDS_32,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import (
    PLAIN_UNIT,
    count_scale_words,
    find_unit_words,
)


@gluon.jit
def find_own_word():
    """Word [64] of each 16 of a row that this thread copies first: four threads have a row.

    The compiler takes it to be the same for all of them. So addresses of rows are those of a
    thread's own words, and no second one is kept beside each.
    """
    zero = gl.zeros((64,), gl.int32, ROW)
    thread = gl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.u32 t, %laneid; and.b32 $0, t, 3; }",
        "=r,r",
        [zero],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return thread * 4


@gluon.jit
def _find_columns(WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Words [WIDTH] from the first one of a thread that it copies."""
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    return column % 4 + column // 16 * 16


@gluon.jit
def fetch_unit(stage, rows, valid, UNIT: gl.constexpr, FORMAT: gl.constexpr, MIXED: gl.constexpr):
    """Start copying one unit of 64 records; invalid ones: zeros.

    ``rows`` [64] point at a thread's own words of them (``find_own_word``), ``valid`` is [64].
    """
    FIRST: gl.constexpr = find_unit_words(FORMAT, UNIT)[0]
    WIDTH: gl.constexpr = find_unit_words(FORMAT, UNIT)[1]
    LAYOUT: gl.constexpr = WORDS_32 if WIDTH == 32 else WORDS_16
    WORD_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    column = FIRST + _find_columns(WIDTH, LAYOUT)  # [WIDTH]
    # [64, WIDTH]
    pointers = gl.convert_layout(rows, WORD_ROW, assert_trivial=True)[:, None] + column[None, :]
    mask = gl.convert_layout(valid, WORD_ROW, assert_trivial=True)[:, None]  # [64, 1]
    if WIDTH == 16:
        stage = stage._reinterpret(gl.int32, [64, 16], STAGE_16_MIXED if MIXED else STAGE_16)
    async_copy.async_copy_global_to_shared(stage, pointers, mask=mask)


@gluon.jit
def fetch_plain(target, rows, valid, FORMAT: gl.constexpr):
    """Start copying the unscaled 64 dimensions of 64 records to where they belong.

    ``target`` is an int32 view [64, 32].
    """
    column = find_unit_words(FORMAT, PLAIN_UNIT)[0] + _find_columns(32, WORDS_32)  # [32]
    # [64, 32]
    pointers = gl.convert_layout(rows, ROW, assert_trivial=True)[:, None] + column[None, :]
    mask = gl.convert_layout(valid, ROW, assert_trivial=True)[:, None]  # [64, 1]
    async_copy.async_copy_global_to_shared(target, pointers, mask=mask)


@gluon.jit
def view_fp4_scale_stage(stage):
    """Upper half of a stage as [64, 8] words: the units of "v41_fp4" leave it free."""
    return stage._reinterpret(gl.int32, [4, 64, 8], FP4_SCALE_STAGE).index(2)


@gluon.jit
def fetch_scales(scale_stage, scale_rows, valid, FORMAT: gl.constexpr):
    """Start copying the scales of 64 records; ``scale_rows`` [64] point at them.

    ``scale_stage`` is [64, 4] words, [64, 8] for "v41_fp4". Per-tensor FP8 has none.
    """
    WORDS: gl.constexpr = count_scale_words(FORMAT)
    if WORDS > 0:
        LAYOUT: gl.constexpr = SCALES_8 if WORDS == 8 else SCALES_4 if WORDS == 4 else SCALES_2
        SCALE_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
        column = gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))  # [WORDS]
        pointers = (
            gl.convert_layout(scale_rows, SCALE_ROW, assert_trivial=True)[:, None] + column[None, :]
        )  # [64, WORDS]
        mask = gl.convert_layout(valid, SCALE_ROW, assert_trivial=True)[:, None]  # [64, 1]
        if WORDS == 2:
            scale_stage = scale_stage._reinterpret(gl.int32, [2, 64, 2], SCALE_STAGE).index(0)
        async_copy.async_copy_global_to_shared(scale_stage, pointers, mask=mask)

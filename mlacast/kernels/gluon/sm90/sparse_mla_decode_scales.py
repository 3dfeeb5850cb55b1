"""Scales of records for the Hopper decode kernels: read by thread, and turned into multipliers.

A multiplier is 2**56 times a scale beside codes of e4m3, 2**62 beside those of e2m1
(``sparse_mla_decode_codes``). Scales of 2**72 and more are infinite: ue8m0 bytes above 198, and
those of "v32", which are NaN where ``split_float32`` has them in two parts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.gluon.sm90.sparse_mla_decode_layouts import (
    BY_THREAD,
    BY_THREAD_MIXED,
    ROW,
    SCALE_PAIRS,
    SCALE_PAIRS_STAGE,
    SCALE_STAGE,
    SCALES_2,
    SCALES_4,
    SCALES_4_MIXED,
    SCALES_4_WARP,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import count_scale_words

_EVEN_BYTES = gl.constexpr(0x6420)
_ODD_BYTES = gl.constexpr(0x7531)
# From the lane, where it is used: kept, a thread's selector spills beside codes of four bits.
_BYTES_OF_LANE = gl.constexpr("""{
.reg .b32 t;
mov.u32 t, %laneid;
shr.u32 t, t, 4;
mad.lo.u32 $0, t, 0x1111, $1;
}""")
# 2**56 of a scale, as a number.
_TO_SCALE_UNIT = gl.constexpr(72057594037927936.0)
# Operands of the two programs below, which PTX takes in registers only, each twice in a word: the
# first ue8m0 code that becomes infinite; 2**127 and 2**55, whose product no bfloat16 holds.
_INFINITE_CODES = gl.constexpr(0x00C700C7)
_E4M3_FIRST = gl.constexpr(0x7F007F00)
_E4M3_SECOND = gl.constexpr(0x5B005B00)


@gluon.constexpr_function
def _write_powers_of_ue8m0(UNIT):
    """Both codes of a unit, in the word that has them, to 2**(code - 127 + 56), or infinity."""
    return f"""{{
        .reg .b32 t;
        prmt.b32 t, $1, 0, {"0x4342" if UNIT % 2 else "0x4140"};
        min.u16x2 t, t, $2;
        mad.lo.u32 $0, t, 128, 0x1C001C00;
        }}"""


@gluon.constexpr_function
def _write_numbers_of_e4m3(UNIT):
    """Both e4m3 codes of a unit, in the word that has them, to their values times 2**62.

    Ones, which are NaN, take the place of a NaN code.
    """
    return f"""{{
        .reg .b32 t, n;
        and.b32 n, $1, 0x7F7F7F7F;
        add.u32 n, n, 0x01010101;
        prmt.b32 n, n, 0, {"0xBBAA" if UNIT % 2 else "0x9988"};
        prmt.b32 t, $1, 0, {"0xB3A2" if UNIT % 2 else "0x9180"};
        shl.b32 t, t, 4;
        lop3.b32 t, t, 0x87f087f0, n, 0xEA;
        mul.rn.bf16x2 t, t, $2;
        mul.rn.bf16x2 $0, t, $3;
        }}"""


@gluon.jit
def make_unit_multipliers(scales, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Multipliers of a thread's dimensions in a unit, two bfloat16 a word [64, 4]."""
    words = scales[UNIT // 2]
    if FORMAT == "v41_fp4":
        return gl.inline_asm_elementwise(
            _write_numbers_of_e4m3(UNIT),
            "=r,r,r,r",
            [words, _E4M3_FIRST, _E4M3_SECOND],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return gl.inline_asm_elementwise(
            _write_powers_of_ue8m0(UNIT),
            "=r,r,r",
            [words, _INFINITE_CODES],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )


@gluon.jit
def split_float32(bits):
    """Bits of float32 to the value times 2**56 as a sum of two bfloat16, the larger one below."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 s, h, l;
        .reg .b32 t;
        mul.f32 s, $1, 0f5B800000;
        cvt.rn.bf16x2.f32 t, s, s;
        and.b32 t, t, 0xffff0000;
        mov.b32 h, t;
        sub.f32 l, s, h;
        cvt.rn.bf16x2.f32 $0, l, s;
        }""",
        "=r,f",
        [bits.to(gl.float32, bitcast=True)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def shorten_float32(bits):
    """Bits of float32 to the value times 2**56, as bits whose upper half is bfloat16."""
    return (bits.to(gl.float32, bitcast=True) * _TO_SCALE_UNIT).to(gl.int32, bitcast=True)


@gluon.jit
def read_scales(scale_stage, FORMAT: gl.constexpr, MIXED: gl.constexpr):
    """Scales of 64 records, a tuple of words.

    Two words [64, 4] with the scale bytes of the thread's own dimensions, two a unit. Not those of
    "v32".
    """
    if FORMAT == "v41_fp4":
        pairs = scale_stage._reinterpret(gl.int16, [64, 4, 4], SCALE_PAIRS_STAGE)
        by_unit = gl.permute(gl.reshape(pairs.load(SCALE_PAIRS), (64, 2, 2, 4)), (0, 1, 3, 2))
        even, odd = gl.split(by_unit)  # [64, 2, 4] each
        words = (even.to(gl.int32) & 0xFFFF) | (odd.to(gl.int32) << 16)  # [64, 2, 4]
        first, second = gl.split(gl.permute(words, (0, 2, 1)))  # [64, 4] each
        return (
            gl.convert_layout(first, BY_THREAD_MIXED, assert_trivial=True),
            gl.convert_layout(second, BY_THREAD_MIXED, assert_trivial=True),
        )
    elif count_scale_words(FORMAT) == 0:
        return ()
    elif MIXED:
        gl.static_assert(FORMAT == "v41", "the only format beside codes of four bits")
        row = scale_stage.load(SCALES_4_MIXED)  # [64, 4]
        columns = split_columns(row, 4, gl.SliceLayout(1, BY_THREAD_MIXED))
        # [4]; what is chosen by it is [1, 4].
        even = gl.full((4,), _EVEN_BYTES, gl.int32, gl.SliceLayout(0, BY_THREAD_MIXED))
        chosen = gl.inline_asm_elementwise(
            _BYTES_OF_LANE, "=r,r", [even], dtype=gl.int32, is_pure=False, pack=1
        )[None, :]
        return (
            choose_bytes(columns[0], columns[1], chosen),
            choose_bytes(columns[2], columns[3], chosen),
        )
    else:
        WORDS: gl.constexpr = count_scale_words(FORMAT)
        LAYOUT: gl.constexpr = SCALES_4 if WORDS == 4 else SCALES_2
        if WORDS == 2:
            scale_stage = scale_stage._reinterpret(gl.int32, [2, 64, 2], SCALE_STAGE).index(0)
        columns = split_columns(scale_stage.load(LAYOUT), WORDS, ROW)
        chosen = select_bytes(BY_THREAD)  # [1, 4]
        if FORMAT == "v41":
            return (
                choose_bytes(columns[0], columns[1], chosen),
                choose_bytes(columns[2], columns[3], chosen),
            )
        else:
            return repeat_by_thread(columns[0], chosen), repeat_by_thread(columns[1], chosen)


@gluon.jit
def read_two_scales(scale_stage, FIRST: gl.constexpr):
    """Scales [64] of two units of "v32", from [64, 4] words: all four take too many registers."""
    return split_columns(scale_stage.slice(FIRST, 2, dim=1).load(SCALES_2), 2, ROW)


@gluon.jit
def _unite(x, y):
    """Bits of either."""
    return x | y


@gluon.jit
def have_lower_parts(scale_stage):
    """Bits of any of [64, 4] words that bfloat16 has not; as one number, for a branch."""
    # Every warp reads all of them: no exchange between warps.
    words = scale_stage.load(SCALES_4_WARP)
    return gl.reduce(gl.reduce(words, 1, _unite), 0, _unite) & 0xFFFF


@gluon.jit
def select_bytes(LAYOUT: gl.constexpr):
    """Selectors [1, 4] of a thread's scale bytes in two words; ``LAYOUT`` is that of [64, 4].

    Groups of "v41" are 8 words, and a thread has 4 of either half of a unit.
    """
    thread = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))  # [4]
    return gl.where(thread < 2, _EVEN_BYTES, _ODD_BYTES)[None, :]


@gluon.jit
def repeat_by_thread(x, like):
    """[64] as [64, 4] in the layout of ``like``: every thread of a row has it."""
    rows = gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)
    return gl.broadcast(rows[:, None], like)[0]


@gluon.jit
def choose_bytes(low, high, chosen):
    """Bytes of two words [64] by the selectors [1, 4] of each thread of a row."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [repeat_by_thread(low, chosen), repeat_by_thread(high, chosen), chosen],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def split_columns(x, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns of [64, COUNT] registers as a tuple of [64]."""
    if COUNT == 1:
        return (gl.convert_layout(gl.reshape(x, (64,)), LAYOUT, assert_trivial=True),)
    else:
        halves = gl.permute(gl.reshape(x, (64, 2, COUNT // 2)), (0, 2, 1))
        low, high = gl.split(halves)  # [64, COUNT / 2] each
        return split_columns(low, COUNT // 2, LAYOUT) + split_columns(high, COUNT // 2, LAYOUT)

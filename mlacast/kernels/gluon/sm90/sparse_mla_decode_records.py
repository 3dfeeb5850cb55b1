"""Records of the paged caches for the Hopper decode kernel: addresses, and codes to bfloat16.

A record is a run of units of at most 32 words a row, which is also how it is staged. Codes become
bfloat16 by moving their bits: an e4m3 code read as bfloat16 is 2**-120 of its value, an e2m1 code
2**-126. The multiplier that applies the scale makes up for all but 2**-64 of that, because a
larger one would not fit bfloat16 for every scale; the score scale and the end take care of 2**-64.
Scale bytes (ue8m0) above 198 become infinite. The NaN code of e4m3 is not recognised: it reads 480.
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
    STAGE_16,
    STAGE_16_MIXED,
    WORDS_16,
    WORDS_16_MIXED,
    WORDS_32,
)

EVEN_BYTES = gl.constexpr(0x6420)
ODD_BYTES = gl.constexpr(0x7531)
# From the lane, where it is used: kept, a thread's selector spills beside codes of four bits.
_BYTES_OF_LANE = gl.constexpr("""{
.reg .b32 t;
mov.u32 t, %laneid;
shr.u32 t, t, 4;
mad.lo.u32 $0, t, 0x1111, $1;
}""")
# Twice a word 2**56: e4m3 codes read as bfloat16 to 2**-64 of their value.
TO_KEY_UNIT = gl.constexpr(0x5B805B80)


# 2**56 of a scale, as a number.
_TO_SCALE_UNIT = gl.constexpr(72057594037927936.0)

# Units of codes of a record, 128 dimensions each; of "v4" the last has 64.
UNITS = gl.constexpr(4)
# Number of the last 64 dimensions of "fp8_576", which travel and are decoded with unit 3.
TAIL_UNIT = gl.constexpr(4)


@gluon.constexpr_function
def has_tail(FORMAT):
    """Whether keys have 64 dimensions more than values."""
    return FORMAT in ("v32", "fp8_576")


@gluon.constexpr_function
def has_plain(FORMAT):
    """Whether the last 64 dimensions of a key are bfloat16, which go to their place as they are.

    Their unit is one, where that of the others is 2**64: the query's last dimensions make up for
    it, and the outputs where these dimensions are values too.
    """
    return FORMAT in ("v32", "v4")


@gluon.constexpr_function
def find_unit_words(FORMAT, UNIT):
    """First word and number of words of a unit."""
    if FORMAT == "v41_fp4":
        return (16 * UNIT, 16)
    if FORMAT == "fp8_576" and UNIT == TAIL_UNIT:
        return (128, 16)
    if FORMAT == "v4" and UNIT >= 3:
        return (96, 16) if UNIT == 3 else (112, 32)
    if FORMAT == "v32" and UNIT == 4:
        return (132, 32)
    return (32 * UNIT, 32)


@gluon.constexpr_function
def count_scale_words(FORMAT):
    """Words of scales of a record."""
    return {"v41": 4, "v41_fp4": 8, "v4": 2, "v32": 4}.get(FORMAT, 0)


# Words from the codes of a record of "v32" to its scales.
V32_SCALES = gl.constexpr(128)


@gluon.jit
def find_record_words(page_size, offset, POOL: gl.constexpr):
    """Words from the start of a page to a token's codes, and to its scales.

    In 32 bits: pages have fewer than 2**31 words (``pages:large`` in ``ops.layout``).
    """
    FORMAT: gl.constexpr = POOL.record
    INLINE: gl.constexpr = POOL.is_inline
    if FORMAT == "v41":
        data = offset * (132 if INLINE else 128)
        scales = data + 128 if INLINE else page_size * 128 + offset * 4
    elif FORMAT == "v41_fp4":
        data = offset * (72 if INLINE else 64)
        scales = data + 64 if INLINE else page_size * 64 + offset * 8
    elif FORMAT == "v4":
        data = offset * 144
        scales = page_size * 144 + offset * 2
    elif FORMAT == "v32":
        data = offset * 164
        scales = data + V32_SCALES
    else:
        # Per-tensor FP8 has its scale in the score scale and in that of the values.
        data = offset * (144 if FORMAT == "fp8_576" else 128)
        scales = data
    return data, scales


@gluon.constexpr_function
def _fill_register(register, word, LANE):
    """PTX that fills both halves of ``register`` with one half of ``word``: free in a product."""
    chosen = "h" if LANE else "l"
    return f"mov.b32 {{l, h}}, {word}; mov.b32 {register}, {{{chosen}, {chosen}}};"


@gluon.constexpr_function
def _write_e4m3_program(LANE):
    """Four codes ``$2``, times half ``LANE`` of ``$3``: ``$0`` and ``$1``."""
    return f"""{{
        .reg .b16 l, h;
        .reg .b32 t, u, m;
        {_fill_register("m", "$3", LANE)}
        prmt.b32 t, $2, 0, 0x9180;
        prmt.b32 u, $2, 0, 0xB3A2;
        shl.b32 t, t, 4;
        shl.b32 u, u, 4;
        and.b32 t, t, 0x87f087f0;
        and.b32 u, u, 0x87f087f0;
        mul.rn.bf16x2 $0, t, m;
        mul.rn.bf16x2 $1, u, m;
        }}"""


@gluon.jit
def multiply_e4m3_by_power(words, multipliers, LANE: gl.constexpr):
    """Four codes a word, times one of two powers of two a word: two words of two bfloat16."""
    return gl.inline_asm_elementwise(
        _write_e4m3_program(LANE),
        "=r,=r,r,r",
        [words, multipliers],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _multiply_e4m3_by_number(words, parts):
    """Four codes a word, times the sum of the two parts of a number.

    Rounded once, like the float32 product, if the upper part has up to 4 bits; else its product was
    rounded before, and one result in about 500 is the other neighbour.
    """
    # Each part in a register of its own: as halves of one, which products take, they spill.
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t, u, v, w, first, second;
        prmt.b32 first, $3, 0, 0x1010;
        prmt.b32 second, $3, 0, 0x3232;
        prmt.b32 t, $2, 0, 0x9180;
        prmt.b32 u, $2, 0, 0xB3A2;
        shl.b32 t, t, 4;
        shl.b32 u, u, 4;
        and.b32 t, t, 0x87f087f0;
        and.b32 u, u, 0x87f087f0;
        mul.rn.bf16x2 v, t, second;
        mul.rn.bf16x2 w, u, second;
        fma.rn.bf16x2 $0, t, first, v;
        fma.rn.bf16x2 $1, u, first, w;
        }""",
        "=r,=r,r,r",
        [words, parts],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def _write_e2m1_program(LANE):
    """Eight codes ``$4``, times half ``LANE`` of ``$5``: ``$0`` to ``$3``.

    Each code in the upper half of a byte, which is sign-extended like one of e4m3.
    """
    selectors = ("0xC480", "0xD591", "0xE6A2", "0xF7B3")
    products = "".join(
        f"""
        prmt.b32 t, o, $4, {selector};
        shl.b32 t, t, 2;
        and.b32 t, t, 0x81C081C0;
        mul.rn.bf16x2 ${word}, t, m;"""
        for word, selector in enumerate(selectors)
    )
    return f"""{{
        .reg .b16 l, h;
        .reg .b32 o, t, m;
        {_fill_register("m", "$5", LANE)}
        shl.b32 o, $4, 4;{products}
        }}"""


@gluon.jit
def _multiply_e2m1_by_number(words, multipliers, LANE: gl.constexpr):
    """Eight codes a word, times one of two numbers a word: four words of two bfloat16."""
    return gl.inline_asm_elementwise(
        _write_e2m1_program(LANE),
        "=r,=r,=r,=r,r,r",
        [words, multipliers],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def multiply_by_2_to_minus_64(words):
    """Two bfloat16 a word."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;",
        "=r,r,r",
        [words, 0x1F801F80],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


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
def _split_float32(bits):
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
        even = gl.full((4,), EVEN_BYTES, gl.int32, gl.SliceLayout(0, BY_THREAD_MIXED))
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
        # Groups of "v41" are 8 words, and a thread has 4 of either half of a unit.
        thread = gl.arange(0, 4, gl.SliceLayout(0, BY_THREAD))  # [4]
        chosen = gl.where(thread < 2, EVEN_BYTES, ODD_BYTES)[None, :]  # [1, 4]
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
def end_branch(number):
    """Something that only one branch ends with, so that what both do stays in them.

    The compiler would do their stores behind both, of numbers that are all kept until then.
    """
    gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


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


@gluon.jit
def _repeat_by_word(multipliers, words):
    """Multipliers [64, 4] for words [64, 4, words of a thread]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, words.type.layout)
    return gl.convert_layout(multipliers, LAYOUT, assert_trivial=True)[:, :, None]


@gluon.jit
def decode_e4m3(words, multipliers, LANE: gl.constexpr):
    """Half a unit [64, 16] to its values, [64, 32] words, by ``multipliers`` [64, 4]."""
    words = gl.reshape(words, (64, 4, 4))  # [64, 4, 4], and so are both halves
    low, high = multiply_e4m3_by_power(words, _repeat_by_word(multipliers, words), LANE)
    return gl.reshape(gl.join(low, high), (64, 32))


@gluon.jit
def _decode_e2m1(words, multipliers):
    """A unit [64, 16] to its values, [64, 64] words: a thread's scales are for two words each."""
    # [64, 4, 2] each.
    first, second = gl.split(gl.permute(gl.reshape(words, (64, 4, 2, 2)), (0, 1, 3, 2)))
    a, b, c, d = _multiply_e2m1_by_number(first, _repeat_by_word(multipliers, first), 0)
    left = gl.join(gl.join(a, c), gl.join(b, d))  # [64, 4, 2, 2, 2]
    a, b, c, d = _multiply_e2m1_by_number(second, _repeat_by_word(multipliers, second), 1)
    right = gl.join(gl.join(a, c), gl.join(b, d))  # [64, 4, 2, 2, 2]
    return gl.reshape(gl.permute(gl.join(left, right), (0, 1, 5, 2, 3, 4)), (64, 64))


@gluon.jit
def store_words(target, values):
    """Store words into a part of the ring, a bank for each of eight neighbouring threads.

    It takes twice as long otherwise, and shared memory is what the kernel has least of.
    """
    gl.static_assert(gl.bank_conflicts(values.type, target.type) == 0, "threads meet in a bank")
    target.store(values)


@gluon.jit
def decode_unit(
    stage,
    scales,
    target_even,
    target_odd,
    UNIT: gl.constexpr,
    ONE_PRODUCT: gl.constexpr,
    FORMAT: gl.constexpr,
    MIXED: gl.constexpr,
):
    """Turn a staged unit into bfloat16 and store it where its dimensions belong.

    ``scales`` are those of the record, see ``read_scales`` and ``read_two_scales``. The targets are
    int32 views [64, 64] of the halves of a piece, ``target_even`` of TAIL_UNIT [64, 32]. Of four
    codes a word, ``low`` and ``high`` are like the words; multipliers are [64, 4]. Where scales of
    "v32" have no lower parts ONE_PRODUCT gives the same bits, but for scales of 2**72 and above:
    infinite where two products are NaN.
    """
    WIDTH: gl.constexpr = find_unit_words(FORMAT, UNIT)[1]
    target = target_even if UNIT % 2 == 0 else target_odd
    LAYOUT: gl.constexpr = WORDS_16_MIXED if MIXED else WORDS_16
    halves = stage._reinterpret(gl.int32, [2, 64, 16], STAGE_16_MIXED if MIXED else STAGE_16)
    if FORMAT == "v41_fp4":
        multipliers = make_unit_multipliers(scales, UNIT, FORMAT)
        store_words(target, _decode_e2m1(halves.index(0).load(LAYOUT), multipliers))
    elif FORMAT == "v4" and UNIT == 3:
        multipliers = make_unit_multipliers(scales, UNIT, FORMAT)
        values = decode_e4m3(halves.index(0).load(LAYOUT), multipliers, 0)
        target_odd.slice(0, 32, dim=1).store(values)
    elif FORMAT == "v4" or FORMAT == "v41":
        multipliers = make_unit_multipliers(scales, UNIT, FORMAT)
        left = decode_e4m3(halves.index(0).load(LAYOUT), multipliers, 0)
        right = decode_e4m3(halves.index(1).load(LAYOUT), multipliers, 1)
        # One store: between two to the same piece there would be a barrier.
        values = gl.permute(gl.join(left, right), (0, 2, 1))  # [64, 2, 32]
        store_words(target, gl.reshape(values, (64, 64)))
    elif FORMAT == "v32":
        words = stage.load(WORDS_32)  # [64, 32]
        if ONE_PRODUCT:
            number = scales[UNIT % 2].to(gl.float32, bitcast=True) * _TO_SCALE_UNIT  # [64]
            number = gl.convert_layout(number.to(gl.int32, bitcast=True), ROW, assert_trivial=True)
            low, high = multiply_e4m3_by_power(words, number[:, None], 1)
        else:
            parts = gl.convert_layout(_split_float32(scales[UNIT % 2]), ROW, assert_trivial=True)
            low, high = _multiply_e4m3_by_number(words, parts[:, None])
        store_words(target, gl.reshape(gl.join(low, high), (64, 64)))
    else:
        words = halves.index(0).load(LAYOUT) if WIDTH == 16 else stage.load(WORDS_32)
        low, high = multiply_e4m3_by_power(words, TO_KEY_UNIT, 0)
        store_words(target, gl.reshape(gl.join(low, high), (64, 2 * WIDTH)))

"""A staged unit of records to bfloat16 in the ring, for the Hopper decode kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.gluon.sm90.sparse_mla_decode_codes import (
    TO_KEY_UNIT,
    decode_e2m1,
    decode_e4m3,
    multiply_e4m3,
    multiply_e4m3_by_parts,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_layouts import (
    ROW,
    STAGE_16,
    STAGE_16_MIXED,
    WORDS_16,
    WORDS_16_MIXED,
    WORDS_32,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import find_unit_words
from mlacast.kernels.gluon.sm90.sparse_mla_decode_scales import (
    make_unit_multipliers,
    shorten_float32,
    split_float32,
)


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
        store_words(target, decode_e2m1(halves.index(0).load(LAYOUT), multipliers))
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
            number = gl.convert_layout(shorten_float32(scales[UNIT % 2]), ROW, assert_trivial=True)
            low, high = multiply_e4m3(words, number[:, None], 1)  # [64, 32] each
        else:
            parts = gl.convert_layout(split_float32(scales[UNIT % 2]), ROW, assert_trivial=True)
            low, high = multiply_e4m3_by_parts(words, parts[:, None])  # [64, 32] each
        store_words(target, gl.reshape(gl.join(low, high), (64, 64)))
    else:
        words = halves.index(0).load(LAYOUT) if WIDTH == 16 else stage.load(WORDS_32)
        low, high = multiply_e4m3(words, TO_KEY_UNIT, 0)
        store_words(target, gl.reshape(gl.join(low, high), (64, 2 * WIDTH)))

"""Codes of records to bfloat16 for the Hopper decode kernels: their bits moved, and one product.

An e4m3 code read as bfloat16 is 2**-120 of its value, an e2m1 code 2**-126. The multiplier that
applies the scale makes up for all but 2**-64 of that, because a larger one would not fit bfloat16
for every scale; the score scale and the end take care of 2**-64. The NaN code of e4m3 is not
recognised: it reads 480.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Twice a word 2**56: e4m3 codes read as bfloat16 to 2**-64 of their value.
TO_KEY_UNIT = gl.constexpr(0x5B805B80)


@gluon.constexpr_function
def _fill_register(register, word, LANE):
    """PTX that fills both halves of ``register`` with one half of ``word``: free in a product."""
    chosen = "h" if LANE else "l"
    return f"mov.b32 {{l, h}}, {word}; mov.b32 {register}, {{{chosen}, {chosen}}};"


@gluon.constexpr_function
def _spread_e4m3():
    """PTX that moves four codes ``$2`` to ``t`` and ``u``, two bfloat16 each."""
    return """prmt.b32 t, $2, 0, 0x9180;
        prmt.b32 u, $2, 0, 0xB3A2;
        shl.b32 t, t, 4;
        shl.b32 u, u, 4;
        and.b32 t, t, 0x87f087f0;
        and.b32 u, u, 0x87f087f0;"""


@gluon.constexpr_function
def _write_e4m3_program(LANE):
    """Four codes ``$2``, times half ``LANE`` of ``$3``: ``$0`` and ``$1``."""
    return f"""{{
        .reg .b16 l, h;
        .reg .b32 t, u, m;
        {_fill_register("m", "$3", LANE)}
        {_spread_e4m3()}
        mul.rn.bf16x2 $0, t, m;
        mul.rn.bf16x2 $1, u, m;
        }}"""


@gluon.jit
def multiply_e4m3(words, multipliers, LANE: gl.constexpr):
    """Four codes a word, times one of two bfloat16 a word, rounded once: two words of two."""
    return gl.inline_asm_elementwise(
        _write_e4m3_program(LANE),
        "=r,=r,r,r",
        [words, multipliers],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def _write_e4m3_program_of_parts():
    """Four codes ``$2``, times the sum of both halves of ``$3``: ``$0`` and ``$1``."""
    # Each part in a register of its own: as halves of one, which products take, they spill.
    return f"""{{
        .reg .b32 t, u, v, w, first, second;
        prmt.b32 first, $3, 0, 0x1010;
        prmt.b32 second, $3, 0, 0x3232;
        {_spread_e4m3()}
        mul.rn.bf16x2 v, t, second;
        mul.rn.bf16x2 w, u, second;
        fma.rn.bf16x2 $0, t, first, v;
        fma.rn.bf16x2 $1, u, first, w;
        }}"""


@gluon.jit
def multiply_e4m3_by_parts(words, parts):
    """Four codes a word, times the sum of the two parts of a number.

    Rounded once, like the float32 product, if the upper part has up to 4 bits; else its product was
    rounded before, and one result in about 500 is the other neighbour.
    """
    return gl.inline_asm_elementwise(
        _write_e4m3_program_of_parts(),
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
def _multiply_e2m1(words, multipliers, LANE: gl.constexpr):
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


@gluon.jit
def _repeat_by_word(multipliers, words):
    """Multipliers [64, 4] for words [64, 4, words of a thread]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, words.type.layout)
    return gl.convert_layout(multipliers, LAYOUT, assert_trivial=True)[:, :, None]


@gluon.jit
def decode_e4m3(words, multipliers, LANE: gl.constexpr):
    """Half a unit [64, 16] to its values, [64, 32] words, by ``multipliers`` [64, 4]."""
    words = gl.reshape(words, (64, 4, 4))  # [64, 4, 4], and so are both halves
    low, high = multiply_e4m3(words, _repeat_by_word(multipliers, words), LANE)
    return gl.reshape(gl.join(low, high), (64, 32))


@gluon.jit
def decode_e2m1(words, multipliers):
    """A unit [64, 16] to its values, [64, 64] words: a thread's scales are for two words each."""
    # [64, 4, 2] each.
    first, second = gl.split(gl.permute(gl.reshape(words, (64, 4, 2, 2)), (0, 1, 3, 2)))
    a, b, c, d = _multiply_e2m1(first, _repeat_by_word(multipliers, first), 0)
    left = gl.join(gl.join(a, c), gl.join(b, d))  # [64, 4, 2, 2, 2]
    a, b, c, d = _multiply_e2m1(second, _repeat_by_word(multipliers, second), 1)
    right = gl.join(gl.join(a, c), gl.join(b, d))  # [64, 4, 2, 2, 2]
    return gl.reshape(gl.permute(gl.join(left, right), (0, 1, 5, 2, 3, 4)), (64, 64))

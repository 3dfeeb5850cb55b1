"""Records of the paged caches for the Hopper decode kernels: their units, and where they lie.

A record is a run of units of at most 32 words a row, which is also how it is staged.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Units of codes of a record, 128 dimensions each; of "v4" the last has 64.
UNITS = gl.constexpr(4)
# Number of the last 64 dimensions of "fp8_576", which travel and are decoded with unit 3.
TAIL_UNIT = gl.constexpr(4)
# And of the unscaled ones of "v4" and "v32".
PLAIN_UNIT = gl.constexpr(4)
# Words from the codes of a record of "v32" to its scales.
V32_SCALES = gl.constexpr(128)


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
    if FORMAT == "v32" and UNIT == PLAIN_UNIT:
        return (132, 32)
    return (32 * UNIT, 32)


@gluon.constexpr_function
def count_scale_words(FORMAT):
    """Words of scales of a record."""
    return {"v41": 4, "v41_fp4": 8, "v4": 2, "v32": 4}.get(FORMAT, 0)


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

"""What the roles of the Hopper prefill kernel agree on: ring order, lengths, table rows.

A tile is 64 heads of one token. Programs are persistent and take tiles at a stride of the grid.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_rotation import find_row_offset

BLOCK_H = gl.constexpr(64)
BLOCK_N = gl.constexpr(64)
NUM_SLOTS = gl.constexpr(3)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# Numbers of rows that the score role hands on, each for even and odd blocks: rescale factors, and
# at the end of a tile the sums and maxima. One array: a thread keeps one address.
TOTAL = gl.constexpr(2)
MAXIMUM = gl.constexpr(4)

# Counts and strides that vary while serving must not pick another variant of the kernel.
VARYING = [
    "s_kv",
    "stride_indices",
    "topk",
    "stride_length",
    "table_rows",
    "stride_positions",
    "stride_sf_token",
    "stride_sf_group",
    "stride_sf_word",
    "padding_rows",
    "num_tokens",
]
# Nor must where a slice of a bigger buffer happens to start.
UNALIGNED = [
    "indices_ptr",
    "length_ptr",
    "sink_ptr",
    "table_ptr",
    "positions_ptr",
    "max_logits_ptr",
    "lse_ptr",
    "sf_ptr",
    "scale_ptr",
]


@gluon.jit
def find_tile_range(num_tiles, WORK: gl.constexpr):
    """First tile of the program, the end of its tiles, and the step from one to the next.

    Where programs share a tile each has one, and the compiler sees it.
    """
    if WORK.parts == 1:
        first = gl.program_id(0)
        return first, num_tiles, gl.num_programs(0)
    else:
        first = gl.program_id(0) // WORK.parts
        return first, first + 1, 1


@gluon.jit
def advance_slot(slot):
    """Slot of the ring after ``slot``."""
    return gl.where(slot == NUM_SLOTS - 1, 0, slot + 1)


@gluon.jit
def advance_phase(slot, phase):
    """Phase of the slot after ``slot``: it flips when the ring wraps."""
    return gl.where(slot == NUM_SLOTS - 1, phase ^ 1, phase)


@gluon.jit
def advance_place(place):
    """Place after ``place``: bits 0 and 1 are a slot, bit 2 its phase; the others stay.

    One register for what ``advance_slot`` and ``advance_phase`` have in two.
    """
    return gl.where((place & 3) == NUM_SLOTS - 1, place ^ (4 | (NUM_SLOTS - 1)), place + 1)


@gluon.jit
def load_row_length(length_ptr, stride_length, token, topk, POOL: gl.constexpr):
    """Entries of the token's index row that count."""
    length = topk
    if POOL.has_length:
        length = gl.load(length_ptr + find_row_offset(token, stride_length))
        length = gl.minimum(gl.maximum(length, 0), topk)
    return length


@gluon.jit
def count_blocks(length):
    """Blocks of keys of a tile. A row without entries takes one block with every key masked."""
    return gl.maximum((length + BLOCK_N - 1) // BLOCK_N, 1)

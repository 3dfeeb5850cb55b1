"""What the roles of the Hopper prefill kernel agree on: ring order, lengths, table rows.

A tile is 64 heads of one token. Programs are persistent and take tiles at a stride of the grid.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK_H = gl.constexpr(64)
BLOCK_N = gl.constexpr(64)
NUM_SLOTS = gl.constexpr(3)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def next_slot(slot):
    """Slot of the ring after ``slot``."""
    return gl.where(slot == NUM_SLOTS - 1, 0, slot + 1)


@gluon.jit
def next_phase(slot, phase):
    """Phase of the slot after ``slot``: it flips when the ring wraps."""
    return gl.where(slot == NUM_SLOTS - 1, phase ^ 1, phase)


@gluon.jit
def opaque(x):
    """``x`` (int32, 0..255) as a value that nobody computes with ahead of time.

    Addresses that do not change from tile to tile would otherwise be kept in registers, and spill.
    The mask tells the compiler that the value is not negative.
    """
    value = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )
    return value & 0xFF


@gluon.jit
def row_length(length_ptr, stride_length, token, topk, HAS_LENGTH: gl.constexpr):
    """Entries of the token's index row that count."""
    length = topk
    if HAS_LENGTH:
        length = gl.load(length_ptr + token.to(gl.int64) * stride_length)
        length = gl.minimum(gl.maximum(length, 0), topk)
    return length


@gluon.jit
def block_count(length):
    """Blocks of keys of a tile. A row without entries takes one block with every key masked."""
    return gl.maximum((length + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def table_row(table_rows, positions_ptr, stride_positions, token):
    """Row of the RoPE table of a token (int32); positions outside are clamped."""
    position = gl.load(positions_ptr + token.to(gl.int64) * stride_positions).to(gl.int64)
    return gl.minimum(gl.maximum(position, 0), table_rows - 1).to(gl.int32)


@gluon.jit
def split_pairs(x, HALF_PAIRING: gl.constexpr):
    """Split [64, 64] into the first and second elements [64, 32] of its pairs."""
    if HALF_PAIRING:
        first, second = gl.split(gl.permute(gl.reshape(x, (64, 2, 32)), (0, 2, 1)))
    else:
        first, second = gl.split(gl.reshape(x, (64, 32, 2)))
    return first, second


@gluon.jit
def join_pairs(first, second, HALF_PAIRING: gl.constexpr):
    """Inverse of ``split_pairs``."""
    pairs = gl.join(first, second)
    if HALF_PAIRING:
        pairs = gl.permute(pairs, (0, 2, 1))
    return gl.reshape(pairs, (64, 64))


@gluon.jit
def load_angles(table_ptr, stride_table, table_row, pairs):
    """Cosines and sines [1, 32] of a table row, laid out like the columns of ``pairs`` [64, 32]."""
    row_ptr = table_ptr + table_row.to(gl.int64) * stride_table
    LAYOUT: gl.constexpr = pairs.type.layout
    pair = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))
    return gl.load(row_ptr + pair)[None, :], gl.load(row_ptr + 32 + pair)[None, :]

"""Tiles of heads of the Hopper decode of few heads, and the ring of values that its roles share.

Chunks are 128 dimensions of a block of 64 keys: the first two of a block are decoded by one role,
the last two by the other. Up to 16 heads the ring has two blocks. With 32 the query takes that
room: either half of the ring has three chunks, which both halves' chunks take in turn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_layouts import stage_layout


@gluon.constexpr_function
def count_chunks(HEADS):
    """Chunks of the ring."""
    return 8 if HEADS == 16 else 6


@gluon.constexpr_function
def count_places(HEADS):
    """Barriers of the ring: a block's, or those of a chunk of either half."""
    return 2 if HEADS == 16 else 3


@gluon.jit
def find_tile(HEADS: gl.constexpr, WORK: gl.constexpr):
    """Token and first head of a program."""
    if WORK.head_blocks == 1:
        return gl.program_id(0), 0
    else:
        item = gl.program_id(0)
        return item // WORK.head_blocks, item % WORK.head_blocks * HEADS


@gluon.jit
def find_chunk(block, NUMBER: gl.constexpr, HEADS: gl.constexpr):
    """Index of chunk ``NUMBER`` of a block of keys in the ring."""
    if HEADS == 16:
        return 4 * (block & 1) + NUMBER
    else:
        return 3 * (NUMBER // 2) + (2 * block + NUMBER % 2) % 3


@gluon.jit
def wait_for_chunk(k_free, block, NUMBER: gl.constexpr, HEADS: gl.constexpr):
    """Wait until the ring has room for chunk ``NUMBER`` of a block: its half was read."""
    if HEADS == 16:
        mbarrier.wait(k_free.index(block & 1), (block >> 1 & 1) ^ 1)
    else:
        chunk = 2 * block + NUMBER % 2
        mbarrier.wait(k_free.index(chunk % 3), (chunk // 3 & 1) ^ 1)


@gluon.jit
def free_chunks(k_free, block, NUMBER: gl.constexpr):
    """Hand back chunk ``NUMBER`` (0 or 1) of both halves of a block; of a ring of three."""
    mbarrier.arrive(k_free.index((2 * block + NUMBER) % 3), count=1)


@gluon.jit
def view_output_stage(k_smem, HEADS: gl.constexpr):
    """The ring as a stage [n, heads, 128] of float32; see ``find_output_piece``."""
    PIECES: gl.constexpr = count_chunks(HEADS) * 32 // HEADS
    return k_smem._reinterpret(gl.float32, [PIECES, HEADS, 128], stage_layout(HEADS, 128))


@gluon.constexpr_function
def find_output_piece(NUMBER, HEADS):
    """Piece of the stage that chunk ``NUMBER`` of the output has: it begins with one of the ring."""
    return NUMBER * 32 // HEADS

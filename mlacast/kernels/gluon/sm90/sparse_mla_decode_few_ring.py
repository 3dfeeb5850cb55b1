"""The ring of values that the roles of the Hopper decode of few heads share.

A chunk is 128 dimensions of a block of 64 keys; the first two of a block are decoded by one role,
the last two by the other. For 16 heads the ring has two blocks. With 32 the query takes some of
that room: either half of the ring has three chunks, in the order in which their role decodes them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_layouts import make_stage_layout


@gluon.constexpr_function
def count_chunks(HEADS):
    """Chunks of the ring."""
    return 8 if HEADS == 16 else 6


@gluon.constexpr_function
def count_places(HEADS):
    """Barriers of the ring: one a block, or one a chunk of each half."""
    return 2 if HEADS == 16 else 3


@gluon.jit
def find_place(block, NUMBER: gl.constexpr, HEADS: gl.constexpr):
    """Barrier of chunk ``NUMBER``, 0 to 3, of a block, and how many had its place before."""
    if HEADS == 16:
        return block & 1, block >> 1
    else:
        chunk = 2 * block + NUMBER % 2
        return chunk % count_places(HEADS), chunk // count_places(HEADS)


@gluon.jit
def find_chunk(block, NUMBER: gl.constexpr, HEADS: gl.constexpr):
    """Index of chunk ``NUMBER`` of a block of keys in the ring."""
    place, _ = find_place(block, NUMBER, HEADS)
    if HEADS == 16:
        return 4 * place + NUMBER
    else:
        return count_places(HEADS) * (NUMBER // 2) + place


@gluon.jit
def wait_for_chunk(k_free, block, NUMBER: gl.constexpr, HEADS: gl.constexpr):
    """Consume ``k_free`` of chunk ``NUMBER`` of a block: the ring has room for it."""
    place, before = find_place(block, NUMBER, HEADS)
    mbarrier.wait(k_free.index(place), (before & 1) ^ 1)


@gluon.jit
def free_chunks(k_free, block, NUMBER: gl.constexpr, HEADS: gl.constexpr):
    """Produce ``k_free`` of a block; of 32 heads, of chunks ``NUMBER`` and ``NUMBER + 2`` of it."""
    place, _ = find_place(block, NUMBER, HEADS)
    mbarrier.arrive(k_free.index(place), count=1)


@gluon.jit
def view_output_stage(k_smem, HEADS: gl.constexpr):
    """The ring as a stage [n, heads, 128] of float32; see ``find_output_piece``."""
    PIECES: gl.constexpr = count_chunks(HEADS) * 32 // HEADS
    return k_smem._reinterpret(gl.float32, [PIECES, HEADS, 128], make_stage_layout(HEADS, 128))


@gluon.constexpr_function
def find_output_piece(NUMBER, HEADS):
    """Piece of the stage that chunk ``NUMBER`` of the output has: that of a chunk of the ring."""
    return NUMBER * 32 // HEADS

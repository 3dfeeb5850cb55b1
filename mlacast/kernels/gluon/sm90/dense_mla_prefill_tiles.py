"""Tiles of the Hopper dense prefill kernel: their order, and what the roles know about one.

A tile is some rows of one head. Tiles of a sequence are laid out from its end, so that the
incomplete one is the first, which has the fewest keys. Sequences and heads are cut into sections
whose keys and values fit into L2. Within a section the level of a tile is the number of tiles
before it in its sequence; high levels come first, so that what remains at the end is short.

A ticket is a number in that order. The load role turns tickets into tiles by counting the tiles of
level after level: nobody writes a list, and empty sequences cost nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Consumers of a program, and rows that each takes of a tile.
CONSUMERS = gl.constexpr(2)
BLOCK_M = gl.constexpr(64)
TILE_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(128)
# Blocks of keys in shared memory, and of values.
STAGES = gl.constexpr(2)
# A block of values has arrived when the load role's 32 threads have copied it, or none had to.
V_ARRIVALS = gl.constexpr(33)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)

# Words of a tile in shared memory. A negative number of blocks says that no tile follows.
NUM_BLOCKS = gl.constexpr(0)
FIRST_ROW = gl.constexpr(1)
SEQUENCE_START = gl.constexpr(2)
NUM_KEYS = gl.constexpr(3)
# The key on the diagonal of the sequence's first row; without a diagonal, the number of keys.
DIAGONAL = gl.constexpr(4)
HEAD = gl.constexpr(5)
TILE_WORDS = gl.constexpr(8)


@gluon.jit
def read_word(words, WORD: gl.constexpr):
    """One word of a tile as a number."""
    ANY: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(words.slice(WORD, 1, dim=0).load(ANY), 0)


@gluon.jit
def write_words(words, num_blocks, first_row, sequence_start, num_keys, diagonal, head):
    """Describe a tile to the consumers."""
    # Every thread has all words: no register for its own place among them.
    # [TILE_WORDS]
    word = gl.arange(0, TILE_WORDS, gl.BlockedLayout([TILE_WORDS], [32], [gl.num_warps()], [0]))
    value = gl.where(word == NUM_BLOCKS, num_blocks, head)
    value = gl.where(word == FIRST_ROW, first_row, value)
    value = gl.where(word == SEQUENCE_START, sequence_start, value)
    value = gl.where(word == NUM_KEYS, num_keys, value)
    value = gl.where(word == DIAGONAL, diagonal, value)
    words.store(value)


@gluon.jit
def _add_counts(a, b):
    """Add two counts of sequences, which a scan wants as a function."""
    return a + b


@gluon.jit
def count_section_tiles(
    cu_seqlens_q_ptr,
    batch,
    num_rows,
    section,
    head_sections,
    section_batch,
    SEQUENCES: gl.constexpr,
):
    """Tiles of the sequences of a section, int32 [SEQUENCES]; none past the last section.

    After the last sequence comes one of the rows that belong to none; it has no keys.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([SEQUENCES // 32], [32], [gl.num_warps()], [0])
    place = gl.arange(0, SEQUENCES, LAYOUT)  # [SEQUENCES]
    sequence = (section // head_sections) * section_batch + place  # [SEQUENCES]
    inside = (place < section_batch) & (sequence <= batch)  # [SEQUENCES]
    start = gl.load(cu_seqlens_q_ptr + sequence, mask=inside, other=0)  # [SEQUENCES]
    # [SEQUENCES]
    stop = gl.load(cu_seqlens_q_ptr + sequence + 1, mask=inside & (sequence < batch), other=0)
    stop = gl.where(inside & (sequence == batch), num_rows, stop)
    return (stop - start + (TILE_M - 1)) // TILE_M


@gluon.jit
def find_section_heads(section, head_sections, section_heads, num_heads):
    """First head of a section, and how many it has."""
    first = (section % head_sections) * section_heads
    return first, gl.minimum(section_heads, num_heads - first)


@gluon.jit
def count_level(tiles, level):
    """Sequences that have a tile of this level; ``tiles`` [SEQUENCES] counts those of each."""
    return gl.sum(((tiles > level) & (level >= 0)).to(gl.int32), 0)


@gluon.jit
def find_sequence_of_rank(tiles, level, rank):
    """Number of the sequence that is the ``rank``-th of those with a tile of this level.

    ``tiles`` as in ``count_level``.
    """
    seen = gl.associative_scan((tiles > level).to(gl.int32), 0, _add_counts)  # [SEQUENCES]
    return gl.sum((seen <= rank).to(gl.int32), 0)

"""Barriers of the Hopper prefill kernel for d_qk 576: one array, so that shared memory suffices.

An array of its own for each costs the descriptor that every role keeps of it in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import NUM_SLOTS

# Producer -> consumer, and what the array index means. The first two have one barrier per slot.
K_READY = gl.constexpr(0)  # gather -> score: a block, or a query, with all that belongs to it
K_FREE = gl.constexpr(3)  # output (of a query: score) -> gather
TAIL_FREE = gl.constexpr(6)  # score -> gather
Q_FREE = gl.constexpr(7)  # score -> gather: the part of the query that stays in shared memory
P_READY = gl.constexpr(8)  # score -> output: weights and rescale factors stored
P_GO = gl.constexpr(9)  # score -> output: weights may be multiplied; two, for even and odd blocks
P_FREE = gl.constexpr(11)  # output -> score: weights multiplied
ALPHA_FREE = gl.constexpr(12)  # output -> score: a tile's last rescale factors read
FACTOR_READY = gl.constexpr(13)  # score -> output: final factors in the place of rescale factors
FACTOR_FREE = gl.constexpr(14)  # output -> score: final factors read
NUM_BARRIERS = gl.constexpr(15)


@gluon.jit
def init_barriers(barriers):
    """Set the arrivals that complete each barrier.

    129 are the gather role's copies and one, 2 both halves of the output.
    """
    for i in gl.static_range(NUM_SLOTS):
        mbarrier.init(barriers.index(K_READY + i), count=129)
        mbarrier.init(barriers.index(K_FREE + i), count=2)
    mbarrier.init(barriers.index(TAIL_FREE), count=1)
    mbarrier.init(barriers.index(Q_FREE), count=1)
    mbarrier.init(barriers.index(P_READY), count=1)
    mbarrier.init(barriers.index(P_GO), count=1)
    mbarrier.init(barriers.index(P_GO + 1), count=1)
    mbarrier.init(barriers.index(P_FREE), count=2)
    mbarrier.init(barriers.index(ALPHA_FREE), count=2)
    mbarrier.init(barriers.index(FACTOR_READY), count=1)
    mbarrier.init(barriers.index(FACTOR_FREE), count=2)

"""Which thread of the Hopper decode's decoding role has what: words and scales of 64 records.

Layouts named MIXED are those of a kernel with codes of eight bits and of four, which both kinds
are decoded by there; records are copied by the others everywhere.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Four threads a row, 64 bytes: whole sectors from global memory, and neither the copies nor the
# decoded codes of eight bits, of two rows for each eight threads, meet in a bank. Codes of four
# bits would: there eight neighbours hold one 16-byte piece of eight rows, which the tiles of the
# ring keep apart. (The unscaled dimensions of "v4" do meet, two threads to a bank: the other order
# gained nothing for them.)
_LANES = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
_LANES_MIXED = [[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]]
_WARPS = [[8, 0], [16, 0]]
WORDS_32 = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 16], [32, 0]], _LANES, _WARPS, [], [64, 32])
)
WORDS_16 = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [32, 0]], _LANES, _WARPS, [], [64, 16])
)
WORDS_16_MIXED = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [32, 0]], _LANES_MIXED, _WARPS, [], [64, 16])
)
# Either half of a row apart: every thread's pieces are at one address and constants, and those of
# two rows, read or written at once, are neighbours.
_HALF_STAGE = [
    [0, 1],
    [0, 2],
    [0, 4],
    [0, 8],
    [1, 0],
    [2, 0],
    [4, 0],
    [8, 0],
    [16, 0],
    [32, 0],
]
# The same with pieces swizzled, so that those of eight rows are in banks of their own as well.
_HALF_STAGE_MIXED = [*_HALF_STAGE[:5], [2, 4], [4, 8], *_HALF_STAGE[7:]]
STAGE_16 = gl.constexpr(gl.SharedLinearLayout(_HALF_STAGE, alignment=128))
STAGE_16_MIXED = gl.constexpr(gl.SharedLinearLayout(_HALF_STAGE_MIXED, alignment=128))
_STAGE_32 = gl.constexpr(gl.SharedLinearLayout([*_HALF_STAGE, [0, 16]], alignment=128))
_STAGE_32_MIXED = gl.constexpr(gl.SharedLinearLayout([*_HALF_STAGE_MIXED, [0, 16]], alignment=128))
ROW = gl.constexpr(gl.SliceLayout(1, WORDS_32))
_COPIED_ROWS = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
SCALES_2 = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [32, 0]], _COPIED_ROWS, _WARPS, [], [64, 2])
)
SCALES_4 = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [32, 0]], _COPIED_ROWS, _WARPS, [], [64, 4])
)
# All of them in every warp.
SCALES_4_WARP = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0]],
        [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        [[0, 0], [0, 0]],
        [],
        [64, 4],
    )
)
SCALES_8 = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [32, 0]], _COPIED_ROWS, _WARPS, [], [64, 8])
)
SCALES_4_MIXED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 0], [0, 0]],
        _WARPS,
        [],
        [64, 4],
    )
)
# Scale bytes of a record of "v41_fp4" by unit and thread of the row, in pairs.
SCALE_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [32, 0, 0]],
        [[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 0, 1], [0, 0, 2]],
        [[8, 0, 0], [16, 0, 0]],
        [],
        [64, 4, 4],
    )
)
# Something of each thread of a row, and the bytes of its two scales of two units in two words.
BY_THREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        [[32, 0]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [64, 4],
    )
)
BY_THREAD_MIXED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[32, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 1], [0, 2]],
        [[8, 0], [16, 0]],
        [],
        [64, 4],
    )
)
# Scales of "v41_fp4" as two runs of 16 bytes a row, each where those of "v41" are in a stage.
FP4_SCALE_STAGE = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0], [0, 4]], alignment=16
    )
)
SCALE_PAIRS_STAGE = gl.constexpr(
    gl.SharedLinearLayout(
        [
            [0, 0, 1],
            [0, 0, 2],
            [0, 1, 0],
            [1, 0, 0],
            [2, 0, 0],
            [4, 0, 0],
            [8, 0, 0],
            [16, 0, 0],
            [32, 0, 0],
            [0, 2, 0],
        ],
        alignment=16,
    )
)
SCALE_STAGE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def choose_stage_layout(MIXED):
    """Layout of a stage [64, 32] of words; ``MIXED`` beside a pool with codes of four bits."""
    return _STAGE_32_MIXED if MIXED else _STAGE_32

"""Which thread of the Hopper decode of few heads has what: records, operands, weights, rows.

A decoding warpgroup's rows of records are those of a product's left operand: what it has decoded is
multiplied from its registers. Dimensions are summed over in any order, so that of the query follows
the threads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK_N = gl.constexpr(64)

# Four threads a row, 64 bytes, as in ``sparse_mla_decode_layouts``; of a thread's rows the second
# is 8 further, and a warp has 16 neighbours.
_LANES = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
_WARPS = [[16, 0], [32, 0]]
WORDS_32 = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 16], [8, 0]], _LANES, _WARPS, [], [64, 32])
)
WORDS_16 = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], _LANES, _WARPS, [], [64, 16])
)
ROW = gl.constexpr(gl.SliceLayout(1, WORDS_32))
SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], _WARPS, [], [64, 2]
    )
)
BY_THREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], _WARPS, [], [64, 4]
    )
)
_GROUP_LANES = [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
_PAIR_LANES = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
_PARTIAL_LANES = [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]]
_HEAD_WARPS = [[4, 0], [8, 0]]
# Numbers of a product in shared memory with its columns as rows: neither eight rows by four pairs
# of columns, which are written at once, nor eight pieces of 16 bytes, which are read, meet in a
# bank.
_TURNED = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 36]]
_TURNED_HEADS = [[1, 0], [2, 8], [4, 16], [8, 0]]


@gluon.constexpr_function
def make_product_layout(HEADS):
    """Both products: keys or dimensions as rows, heads as columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])


@gluon.constexpr_function
def make_operand_layout(HEADS):
    """Keys as left operand of a product."""
    return gl.DotOperandLayout(0, make_product_layout(HEADS), 2)


@gluon.constexpr_function
def _divide_heads(REGISTERS, LANES, HEADS, WIDTH):
    """Layout of [HEADS, WIDTH]: a warp has all columns of four heads; of 32, also 16 further on."""
    registers = [*REGISTERS, [16, 0]] if HEADS == 32 else [*REGISTERS]
    return gl.DistributedLinearLayout(registers, LANES, _HEAD_WARPS, [], [HEADS, WIDTH])


@gluon.constexpr_function
def make_group_layout(HEADS):
    """[heads, 64], 8 neighbours a thread."""
    return _divide_heads([[0, 1], [0, 2], [0, 4]], _GROUP_LANES, HEADS, 64)


@gluon.constexpr_function
def make_pair_layout(HEADS):
    """[heads, 32], the pairs of ``make_group_layout``."""
    return _divide_heads([[0, 1], [0, 2]], _PAIR_LANES, HEADS, 32)


@gluon.constexpr_function
def make_partial_layout(HEADS):
    """[heads, 8], what every thread of ``make_group_layout`` has summed."""
    return _divide_heads([], _PARTIAL_LANES, HEADS, 8)


@gluon.constexpr_function
def make_chunk_layout(HEADS):
    """Rows [heads, 128] of the query and the output: two of ``make_group_layout`` side by side."""
    return _divide_heads([[0, 1], [0, 2], [0, 4], [0, 64]], _GROUP_LANES, HEADS, 128)


@gluon.constexpr_function
def make_stage_layout(HEADS, WIDTH):
    """Scores [heads, 64] of a product, or sums [heads, 128], in shared memory."""
    columns = _TURNED if WIDTH == 64 else [*_TURNED, [0, 64]]
    heads = [*_TURNED_HEADS, [16, 0]] if HEADS == 32 else _TURNED_HEADS
    return gl.SharedLinearLayout([*columns, *heads], alignment=128)


@gluon.constexpr_function
def find_digits(FORMAT, GROUP):
    """How threads share group ``GROUP`` of 64 dimensions of a record.

    Returns:
        the dimensions as digits: halves of a thread's pieces, threads, steps of 4, pairs, both of a
        pair. A product's steps take them by halves and steps, then by pairs, threads, both.
    """
    # Codes: 16 a thread. Unscaled: 8 a thread of either half.
    return (2, 4, 2, 2, 2) if FORMAT == "v4" and GROUP == 7 else (1, 4, 4, 2, 2)


@gluon.jit
def order_group(x, FORMAT: gl.constexpr, GROUP: gl.constexpr):
    """Dimensions [n, 64] of a group in the order in which products take them."""
    DIGITS: gl.constexpr = find_digits(FORMAT, GROUP)
    digits = gl.reshape(x, (x.shape[0], DIGITS[0], DIGITS[1], DIGITS[2], DIGITS[3], DIGITS[4]))
    return gl.reshape(gl.permute(digits, (0, 1, 3, 4, 2, 5)), (x.shape[0], 64))


@gluon.jit
def split_groups(x):
    """Both groups [heads, 64] of a chunk [heads, 128]."""
    HEADS: gl.constexpr = x.shape[0]
    GROUP: gl.constexpr = make_group_layout(HEADS)
    left, right = gl.split(gl.permute(gl.reshape(x, (HEADS, 2, 64)), (0, 2, 1)))
    return (
        gl.convert_layout(left, GROUP, assert_trivial=True),
        gl.convert_layout(right, GROUP, assert_trivial=True),
    )


@gluon.jit
def join_groups(left, right):
    """Inverse of ``split_groups``, of groups in any layout."""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), (left.shape[0], 128))

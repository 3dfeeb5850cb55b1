"""Query and output tiles of 64 heads in the registers of a Hopper kernel: RoPE, squares, halves."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def hide_value(x):
    """``x`` (int32, 0..255) as a value that nobody computes with ahead of time.

    Addresses that do not change from tile to tile would otherwise be kept in registers, and spill.
    The mask tells the compiler that the value is not negative.
    """
    value = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )
    return value & 0xFF


# A row of an accumulator from what is the same in a warp: its quads have neighbouring ones.
_ROW_OF_QUAD = gl.constexpr("""{
.reg .b32 quad;
mov.u32 quad, %laneid;
shr.u32 quad, quad, 2;
or.b32 $0, quad, $1;
}""")


@gluon.jit
def hide_rows(LAYOUT: gl.constexpr):
    """Rows 0..63 of an accumulator, ``hide_value``: of a thread two, 8 apart.

    They come from the thread's lane where they are needed, so that no register keeps them.
    """
    ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row = gl.arange(0, 64, gl.SliceLayout(1, ACCUMULATOR))  # [64]
    rows = gl.inline_asm_elementwise(
        _ROW_OF_QUAD, "=r,r", [row & 0x38], dtype=gl.int32, is_pure=False, pack=1
    )
    return gl.convert_layout(rows & 0x3F, LAYOUT, assert_trivial=True)


@gluon.jit
def find_row_offset(row, stride):
    """``row * stride`` in 64 bits, ``row`` an int32.

    The upper half of a stride that is kept from tile to tile would take a register, and spill.
    """
    # A stride of one is no tensor.
    stride += row * 0
    if stride.dtype == gl.int32:
        return gl.inline_asm_elementwise(
            "mul.wide.s32 $0, $1, $2;",
            "=l,r,r",
            [row, stride],
            dtype=gl.int64,
            is_pure=True,
            pack=1,
        )
    else:
        return row.to(gl.int64) * stride


@gluon.jit
def find_aligned_offset(row, stride):
    """``find_row_offset`` where what is stored there leaves in wide pieces.

    The compiler still sees that the product is a multiple of what the stride is a multiple of.
    """
    # A zero that only ptxas sees through: nothing before it can compute with the sum ahead of time.
    zero = gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [row], dtype=gl.int32, is_pure=False, pack=1
    )
    return row.to(gl.int64) * (stride + zero * 16)


# $0 = $1 / $2, rounded down, of numbers below 2**20: the quotient of $1 + 0.5 is at least 0.5 / $2
# from every integer, and two roundings and an approximation of a reciprocal move it by less.
_DIVIDE_HEADS = gl.constexpr("""{
.reg .f32 head, heads;
cvt.rn.f32.s32 head, $1;
add.rn.f32 head, head, 0f3F000000;
cvt.rn.f32.s32 heads, $2;
rcp.approx.ftz.f32 heads, heads;
mul.rn.f32 head, head, heads;
cvt.rzi.s32.f32 $0, head;
}""")


@gluon.jit
def find_place_in_group(head, group_heads):
    """Group of a head (int32, below 2**20), and its place in it.

    An integer division takes four times as many instructions, and registers from tile to tile.
    """
    group = gl.inline_asm_elementwise(
        _DIVIDE_HEADS, "=r,r,r", [head, group_heads], dtype=gl.int32, is_pure=True, pack=1
    )
    return group, head - group * group_heads


@gluon.jit
def find_table_row(table_rows, positions_ptr, stride_positions, token):
    """Row of the RoPE table of a token (int32); positions outside are clamped."""
    position = gl.load(positions_ptr + find_row_offset(token, stride_positions)).to(gl.int64)
    # In one piece, because the last row in 64 bits would be kept from tile to tile, and spill.
    return gl.inline_asm_elementwise(
        """{
        .reg .s32 last;
        .reg .s64 wide, row;
        sub.s32 last, $2, 1;
        cvt.s64.s32 wide, last;
        max.s64 row, $1, 0;
        min.s64 row, row, wide;
        cvt.s32.s64 $0, row;
        }""",
        "=r,l,r",
        [position, table_rows],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


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
    """Inverse of ``split_pairs``: [64, 64] of two [64, 32]."""
    pairs = gl.join(first, second)  # [64, 32, 2]
    if HALF_PAIRING:
        pairs = gl.permute(pairs, (0, 2, 1))
    return gl.reshape(pairs, (64, 64))


@gluon.jit
def load_angles(table_ptr, stride_table, table_row, pairs):
    """Cosines and sines [1, 32] of a table row, laid out like the columns of ``pairs`` [64, 32]."""
    row_ptr = table_ptr + find_row_offset(table_row, stride_table)
    LAYOUT: gl.constexpr = pairs.type.layout
    pair = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))  # [32]
    return gl.load(row_ptr + pair)[None, :], gl.load(row_ptr + 32 + pair)[None, :]


@gluon.jit
def prefetch_angles(table_ptr, stride_table, table_row):
    """Send for a table row, 256 bytes, into the L1 cache."""
    # Lane l asks for byte 8 * l: whatever the alignment, every line of the row is asked for. Its
    # address is computed here, because it would be kept from tile to tile, and spill.
    gl.inline_asm_elementwise(
        """{
        .reg .b32 lane;
        .reg .b64 address;
        mov.u32 lane, %laneid;
        mad.wide.u32 address, lane, 8, $1;
        prefetch.global.L1 [address];
        mov.b32 $0, 0;
        }""",
        "=r,l",
        [table_ptr + find_row_offset(table_row, stride_table)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _turn(first, second, cos, sin):
    """``first * cos + second * sin`` and ``second * cos - first * sin``, of pairs [64, 32].

    Which product of a sum is rounded by itself is said, not left to the compiler: kernels that
    share a row's bits, one and two programs a tile of a prefill, would differ in it.
    """
    cos = gl.broadcast(first, cos)[1]
    sin = gl.broadcast(first, sin)[1]
    return gl.fma(first, cos, second * sin), gl.fma(second, cos, -(first * sin))


@gluon.jit
def rotate(x, cos, sin, HALF_PAIRING: gl.constexpr):
    """Rotate the pairs of a bfloat16 tile [64, 64] in float32; ``cos`` and ``sin`` are [1, 32]."""
    first, second = split_pairs(x, HALF_PAIRING)  # [64, 32] each
    first = first.to(gl.float32)
    second = second.to(gl.float32)
    rotated_first, rotated_second = _turn(first, second, cos, -sin)
    return join_pairs(rotated_first.to(gl.bfloat16), rotated_second.to(gl.bfloat16), HALF_PAIRING)


@gluon.jit
def split_halves(x, N: gl.constexpr):
    """Split [64, N] into its left and right columns, [64, N / 2] each."""
    return gl.split(gl.permute(gl.reshape(x, (64, 2, N // 2)), (0, 2, 1)))


@gluon.jit
def rotate_back(x, cos, sin, HALF_PAIRING: gl.constexpr):
    """Rotate the last 64 columns of [64, 128] by the negative angles; ``cos``, ``sin`` [1, 32]."""
    plain, rope = split_halves(x, 128)  # [64, 64] each
    first, second = split_pairs(rope, HALF_PAIRING)  # [64, 32] each
    turned_first, turned_second = _turn(first, second, cos, sin)
    rope = join_pairs(turned_first, turned_second, HALF_PAIRING)
    joined = gl.join(plain, gl.convert_layout(rope, plain.type.layout))  # [64, 64, 2]
    return gl.reshape(gl.permute(joined, (0, 2, 1)), (64, 128))


@gluon.jit
def sum_squares(x, ROW: gl.constexpr):
    """Sums [64] over the columns of a bfloat16 tile [64, n], in float32."""
    wide = x.to(gl.float32)
    return gl.convert_layout(gl.sum(wide * wide, 1), ROW)

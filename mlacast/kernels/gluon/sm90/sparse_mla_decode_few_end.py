"""End of a row of the Hopper decode of few heads: every role takes a chunk of 128 dimensions.

Code that runs once is paid for by its length, and all roles but that of the outputs are idle then.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlacast.kernels.common.sm90_division import invert
from mlacast.kernels.common.sm90_rotation import find_aligned_offset, find_row_offset
from mlacast.kernels.common.sm90_store import FP8_TENSOR, load_output_scale, store_rows
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_layouts import (
    join_groups,
    make_chunk_layout,
    make_group_layout,
    make_pair_layout,
    split_groups,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_ring import (
    find_output_piece,
    view_output_stage,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_merge import load_angles, rotate_pairs


@gluon.jit
def load_position(rope, token):
    """Position of a token, from ``rope``: table, its stride and rows, positions, their stride."""
    _, _, _, positions_ptr, stride_positions = rope
    return gl.load(positions_ptr + find_row_offset(token, stride_positions)).to(gl.int64)


@gluon.jit
def load_row_angles(rope, position, HEADS: gl.constexpr, HALF_PAIRING: gl.constexpr):
    """Cosines and sines of a position, for ``rotate_end``: those of the way back."""
    table_ptr, stride_table, table_rows, _, _ = rope
    ANGLES: gl.constexpr = gl.SliceLayout(
        0, make_group_layout(HEADS) if HALF_PAIRING else make_pair_layout(HEADS)
    )
    COUNT: gl.constexpr = 64 if HALF_PAIRING else 32
    table = (table_ptr, stride_table, table_rows)
    return load_angles(table, position, ANGLES, COUNT, HALF_PAIRING)


@gluon.jit
def rotate_end(x, cos, sin, HALF_PAIRING: gl.constexpr):
    """Rotate the last 64 of a float32 chunk [heads, 128] by the negative angles."""
    plain, last = split_groups(x)
    last = rotate_pairs(last, cos, sin, HALF_PAIRING)
    joined = join_groups(plain, last)
    return gl.convert_layout(joined, make_chunk_layout(x.shape[0]), assert_trivial=True)


@gluon.jit
def end_chunk(
    ends,
    token,
    angles,
    NUMBER: gl.constexpr,
    HEADS: gl.constexpr,
    WORK: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Store dimensions ``128 * NUMBER``.. of all heads: outputs times the factor of their head.

    ``ends`` are ring, factors, the barriers of both, the target, and the numbers of tokens and
    heads. Consumes ``o_ready`` and ``factor_ready``. ``angles`` are for the last chunk.
    """
    k_smem, factor_smem, o_ready, factor_ready, target, num_tokens, num_heads = ends
    (
        data_ptr,
        sf_ptr,
        scale_ptr,
        stride_data_token,
        stride_data_group,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        padding_rows,
    ) = target
    if OUTPUT.kind == FP8_TENSOR:
        # Without a division that calls its slow path.
        scale = invert(gl.load(scale_ptr))
    else:
        scale = load_output_scale(scale_ptr, OUTPUT.kind)
    mbarrier.wait(factor_ready, 0)
    CHUNK: gl.constexpr = make_chunk_layout(HEADS)
    factor = factor_smem.load(gl.SliceLayout(1, CHUNK))  # [heads]
    dead = (factor == 0.0)[:, None]  # [heads, 1]
    mbarrier.wait(o_ready, 0)
    stage = view_output_stage(k_smem, HEADS).index(find_output_piece(NUMBER, HEADS))
    x = stage.load(CHUNK) * factor[:, None]  # [heads, 128]
    if END.rotates_back and NUMBER == 3:
        cos, sin = angles
        x = rotate_end(x, cos, sin, END.half_pairing)
    # where, not the product with 0: sums may hold NaN from an infinite value, and so may the table
    # at the position of an empty row.
    store_rows(
        gl.where(dead, 0.0, x),
        data_ptr + find_aligned_offset(token, stride_data_token),
        stride_data_group,
        sf_ptr,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        scale,
        token.to(gl.int64),
        gl.where(token == num_tokens - 1, padding_rows, 0),
        0,
        num_heads,
        128 * NUMBER,
        WORK.full_tiles,
        OUTPUT,
    )

"""RoPE on the last 64 columns of a tile, in float32."""

import triton
import triton.language as tl

from mlacast.kernels.common.numbers import make_negative_zero


@triton.jit
def load_rotated(
    base_ptr,
    offsets,
    partner_offsets,
    mask,
    angles,
    D: tl.constexpr,
    HALF_PAIRING: tl.constexpr,
):
    """Load a tile [BLOCK_H, D] and rotate its last 64 columns; the result has the dtype of memory.

    Each rotated element loads its partner as well, which keeps the work elementwise.
    ``partner_offsets`` addresses the partner of each column (``find_partner_column``), ``angles``
    is a table with the row of the token.
    """
    d = tl.arange(0, D)  # [D]
    is_rope = d >= D - 64  # [D]
    x = tl.load(base_ptr + offsets, mask=mask, other=0.0)  # [BLOCK_H, D]
    partner = tl.load(base_ptr + partner_offsets, mask=mask & is_rope[None, :], other=0.0)
    within = d - (D - 64)  # [D]
    pair = within % 32 if HALF_PAIRING else within // 2
    is_first = (within < 32) if HALF_PAIRING else (within % 2 == 0)
    row_ptr = angles.table_ptr + angles.row * angles.stride_table
    cos = tl.load(row_ptr + pair, mask=is_rope, other=1.0)  # [D]
    sin = tl.load(row_ptr + 32 + pair, mask=is_rope, other=0.0)  # [D]
    signed_sin = tl.where(is_first, -sin, sin)  # [D]
    rotated = x.to(tl.float32) * cos[None, :] + partner.to(tl.float32) * signed_sin[None, :]
    return tl.where(is_rope[None, :], rotated.to(x.dtype), x)


@triton.jit
def find_partner_column(d, D: tl.constexpr, HALF_PAIRING: tl.constexpr):
    """Column that ``d`` of the last 64 is rotated with; other columns name themselves."""
    within = d - (D - 64)
    partner = tl.where(within < 32, d + 32, d - 32) if HALF_PAIRING else d ^ 1
    return tl.where(within >= 0, partner, d)


@triton.jit
def rotate_back_last_64(x, angles, HALF_PAIRING: tl.constexpr):
    """Rotate the last 64 columns of ``x [BLOCK_H, WIDTH]`` by the negative angle of a table row.

    The 64 columns are taken out, rotated and put back: cosines for all columns would cost a
    thread hundreds of registers.
    """
    BLOCK_H: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    LAST: tl.constexpr = WIDTH // 64 - 1
    blocks = tl.reshape(x, (BLOCK_H, LAST + 1, 64))  # [BLOCK_H, blocks, 64]
    is_rope = (tl.arange(0, LAST + 1) == LAST)[None, :, None]  # [1, blocks, 1]
    # -0.0 is the identity of addition: the sum over blocks returns the last one bit for bit.
    rope = tl.sum(tl.where(is_rope, blocks, make_negative_zero()), 1)  # [BLOCK_H, 64]
    pair = tl.arange(0, 32)  # [32]
    row_ptr = angles.table_ptr + angles.row * angles.stride_table
    cos = tl.load(row_ptr + pair)[None, :]  # [1, 32]
    sin = tl.load(row_ptr + 32 + pair)[None, :]  # [1, 32]
    if HALF_PAIRING:
        first, second = tl.split(tl.permute(tl.reshape(rope, (BLOCK_H, 2, 32)), (0, 2, 1)))
    else:
        first, second = tl.split(tl.reshape(rope, (BLOCK_H, 32, 2)))
    rotated = tl.join(first * cos + second * sin, second * cos - first * sin)  # [BLOCK_H, 32, 2]
    if HALF_PAIRING:
        rotated = tl.permute(rotated, (0, 2, 1))
    rotated = tl.reshape(rotated, (BLOCK_H, 1, 64))
    return tl.reshape(tl.where(is_rope, rotated, blocks), (BLOCK_H, WIDTH))

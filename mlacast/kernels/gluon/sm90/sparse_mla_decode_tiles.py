"""What the roles of the Hopper decode kernel agree on: ring of pieces, work items, key blocks.

A work item is one split of 64 heads of one token. Programs are persistent and take items at a
stride of the grid. The ring holds pieces [64, 256] of bfloat16: a query or a block of 64 keys is
two of them, left and right dimensions. Each piece is freed by the one output role that reads it.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_rotation import find_row_offset

BLOCK_H = gl.constexpr(64)
BLOCK_N = gl.constexpr(64)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# Codes stand in shared memory as 2**-64 of their value: see ``sparse_mla_decode_codes``.
KEY_UNIT = gl.constexpr(18446744073709551616.0)


class Pool(NamedTuple):
    """A cache and an index list over it; page strides count 16 bytes."""

    cache_ptr: Any
    stride_page: Any
    page_size: Any
    page_inverse: Any
    page_shift: Any
    num_slots: Any
    indices_ptr: Any
    stride_indices: Any
    topk: Any
    length_ptr: Any
    stride_length: Any


class Work(NamedTuple):
    """Sizes of a call, and how many items and programs it takes."""

    num_tokens: Any
    num_heads: Any
    num_items: Any
    num_programs: Any
    num_splits: Any


@gluon.jit
def advance_piece(slot, phase, NUM_PIECES: gl.constexpr):
    """Slot and phase of the piece after ``slot``; the phase flips when the ring wraps."""
    wraps = slot == NUM_PIECES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def advance_place(place, NUM_PIECES: gl.constexpr):
    """Place of the piece after ``place``: bits 0..2 are a slot of the ring, bit 3 its phase.

    One register for both. A ring of four counts its pieces: a slot has two bits there.
    """
    if NUM_PIECES == 4:
        return place + 1
    else:
        return gl.where((place & 7) == NUM_PIECES - 1, place ^ (8 | (NUM_PIECES - 1)), place + 1)


@gluon.jit
def find_slot(place, NUM_PIECES: gl.constexpr):
    """Slot of a place of the ring."""
    return place & (3 if NUM_PIECES == 4 else 7)


@gluon.jit
def find_phase(place, NUM_PIECES: gl.constexpr):
    """Phase of the barriers of a place of the ring."""
    return (place >> (2 if NUM_PIECES == 4 else 3)) & 1


@gluon.jit
def skip_pieces(slot, count: gl.constexpr, NUM_PIECES: gl.constexpr):
    """Slot ``count`` pieces further, for roles that need no phase."""
    slot += count
    return gl.where(slot >= NUM_PIECES, slot - NUM_PIECES, slot)


@gluon.jit
def _load_pool_length(pool, token, HAS_LENGTH: gl.constexpr):
    """Entries of the token's index row of one pool that count."""
    length = pool.topk
    if HAS_LENGTH:
        length = gl.load(pool.length_ptr + find_row_offset(token, pool.stride_length))
        length = gl.minimum(gl.maximum(length, 0), pool.topk)
    return length


@gluon.jit
def find_token(item, work, WORK: gl.constexpr):
    """Token of a work item."""
    if WORK.is_split:
        item = item // work.num_splits
    return item // WORK.head_blocks


@gluon.jit
def find_split(item, num_splits):
    """``item % num_splits``, computed where it is used: kept over the keys it would spill."""
    return gl.inline_asm_elementwise(
        "{ .reg .s32 whole; mul.lo.s32 whole, $2, $3; sub.s32 $0, $1, whole; }",
        "=r,r,r,r",
        [item, item // num_splits, num_splits],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def find_work_range(
    item,
    work,
    pool,
    extra_pool,
    WORK: gl.constexpr,
    POOL: gl.constexpr,
    EXTRA: gl.constexpr,
):
    """Blocks of keys of a work item, in the main list followed by the extra list.

    Returns:
        token, first block, number of blocks (at least 1: an item without keys takes one block with
        every key masked), lengths of the main and of the extra list.
    """
    token = find_token(item, work, WORK)
    length = _load_pool_length(pool, token, POOL.has_length)
    total = (length + BLOCK_N - 1) // BLOCK_N
    extra_length = 0
    if EXTRA is not None:
        extra_length = _load_pool_length(extra_pool, token, EXTRA.has_length)
        total += (extra_length + BLOCK_N - 1) // BLOCK_N
    first = 0
    count = total
    if WORK.is_split:
        per_split = (total + work.num_splits - 1) // work.num_splits
        first = gl.minimum((item % work.num_splits) * per_split, total)
        count = gl.minimum(per_split, total - first)
    return token, first, gl.maximum(count, 1), length, extra_length


@gluon.jit
def find_head_start(item, work, WORK: gl.constexpr):
    """First head of a work item."""
    if WORK.is_split:
        item = item // work.num_splits
    return (item % WORK.head_blocks) * BLOCK_H

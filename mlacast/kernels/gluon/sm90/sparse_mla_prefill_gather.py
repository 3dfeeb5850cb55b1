"""Gather role of the Hopper prefill kernel: queries and selected rows into the ring."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from mlacast.kernels.common.sm90_rotation import find_row_offset, hide_value
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import (
    BLOCK_H,
    BLOCK_N,
    advance_place,
    count_blocks,
    load_row_length,
)


@gluon.jit
def load_ids(indices_ptr, stride_indices, token, first, lane, length):
    """Row numbers [64] of one block; -1 at or past ``length``."""
    # One address a thread: what is the same in all threads is added before the lane.
    first_ptr = indices_ptr + find_row_offset(token, stride_indices) + first
    return gl.load(first_ptr + lane, mask=first + lane < length, other=-1)


@gluon.jit
def find_largest_of_thread(x):
    """Largest of a thread's four numbers of [64]: [16], in one register."""
    return gl.max(gl.reshape(x, (BLOCK_N // 16, 16)), 0)


@gluon.jit
def repeat_by_thread(x, lane):
    """Repeat numbers [16] of threads, from ``find_largest_of_thread``, in their rows [64]."""
    rows = gl.expand_dims(x, 0).broadcast_to((BLOCK_N // 16, 16))
    return gl.convert_layout(gl.reshape(rows, (BLOCK_N,)), lane.type.layout, assert_trivial=True)


@gluon.jit
def publish(slot, k_ready):
    """Produce ``k_ready`` of a slot once this warpgroup's copies have landed: 128 arrivals, one."""
    async_copy.mbarrier_arrive(k_ready.index(slot), increment_count=False)
    mbarrier.arrive(k_ready.index(slot), count=1)


@gluon.jit
def gather_query(
    base,
    stride_q_head,
    num_heads,
    tile,
    k_smem,
    slot,
    lane,
    WORK: gl.constexpr,
    QUERY: gl.constexpr,
):
    """Ask for the query of a tile, [64, 512], of the token at ``base``: into ``slot``.

    Heads of a token are less than 2**31 elements apart (``heads:far_apart`` in ``ops.layout``).
    """
    LAYOUT: gl.constexpr = lane.type.layout.parent
    # In chunk16 order the address of each chunk is its own: fewer columns at a time.
    WIDTH: gl.constexpr = 64 if QUERY.chunk16 else 512
    for first in gl.static_range(0, 512, WIDTH):
        head = (tile % WORK.head_blocks) * BLOCK_H + hide_value(lane)  # [64]
        q_d = first + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))  # [WIDTH]
        if QUERY.chunk16:
            chunk = (q_d // 16) * (hide_value(num_heads) * 16) + q_d % 16
            query = base + ((head * 16)[:, None] + chunk[None, :])  # [64, WIDTH]
        else:
            query = base + (head * stride_q_head)[:, None] + q_d[None, :]  # [64, WIDTH]
        target = k_smem.index(slot).slice(first, WIDTH, dim=1)
        if WORK.full_tiles:
            async_copy.async_copy_global_to_shared(target, query)
        else:
            mask = (head < num_heads)[:, None]
            async_copy.async_copy_global_to_shared(target, query, mask=mask)


@gluon.jit
def run_gather_role(
    q_ptr,
    stride_q_token,
    stride_q_head,
    kv_ptr,
    stride_kv,
    s_kv,
    indices_ptr,
    stride_indices,
    topk,
    length_ptr,
    stride_length,
    num_heads,
    num_tiles,
    k_smem,
    bias_smem,
    alive_smem,
    k_ready,
    k_free,
    WORK: gl.constexpr,
    QUERY: gl.constexpr,
    POOL: gl.constexpr,
):
    """Fill the ring: per tile the query [64, 512], then its blocks of 64 selected rows.

    Produces ``k_ready``, consumes ``k_free``. Row numbers are loaded one block ahead, across tiles.
    Rows that do not count are zero and get the bias -inf. ``alive_smem`` says by lane whether any
    row of a tile counts: NaN in the query of a tile without one would hide that from the scores.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lane = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))  # [64]
    d = gl.arange(0, 512, gl.SliceLayout(0, LAYOUT))  # [512]
    # Bits 0 and 1 are the slot, bit 2 its phase, the others count tiles: one register.
    place = 4
    step = gl.num_programs(0)
    first_token = gl.program_id(0) // WORK.head_blocks
    length = load_row_length(length_ptr, stride_length, first_token, topk, POOL)
    ids = load_ids(indices_ptr, stride_indices, first_token, 0, lane, length)  # [64]
    for tile in range(gl.program_id(0), num_tiles, step):
        token = tile // WORK.head_blocks
        next_token = gl.where(tile + step < num_tiles, tile + step, tile) // WORK.head_blocks
        next_length = load_row_length(length_ptr, stride_length, next_token, topk, POOL)
        base = q_ptr + token.to(gl.int64) * stride_q_token
        slot = place & 3
        mbarrier.wait(k_free.index(slot), (place >> 2) & 1)
        gather_query(
            base,
            stride_q_head,
            num_heads,
            tile,
            k_smem,
            slot,
            lane,
            WORK,
            QUERY,
        )
        publish(slot, k_ready)
        place = advance_place(place)
        num_blocks = count_blocks(length)
        best = find_largest_of_thread(
            gl.full((BLOCK_N,), float("-inf"), gl.float32, lane.type.layout)
        )
        alive_row = alive_smem.index((place >> 3) & 3)
        for i in range(num_blocks):
            valid = (ids >= 0) & (ids < s_kv)  # [64]
            rows = kv_ptr + (ids.to(gl.int64) * stride_kv)[:, None] + d[None, :]  # [64, 512]
            is_last = i == num_blocks - 1
            ids = load_ids(
                indices_ptr,
                stride_indices,
                gl.where(is_last, next_token, token),
                gl.where(is_last, 0, (i + 1) * BLOCK_N),
                lane,
                gl.where(is_last, next_length, length),
            )
            slot = place & 3
            mbarrier.wait(k_free.index(slot), (place >> 2) & 1)
            bias = gl.where(valid, 0.0, float("-inf"))  # [64]
            best = gl.maximum(best, find_largest_of_thread(bias))
            bias_smem.index(slot).store(bias)
            alive_row.store(repeat_by_thread((best == 0.0).to(gl.int8), lane))
            async_copy.async_copy_global_to_shared(k_smem.index(slot), rows, mask=valid[:, None])
            publish(slot, k_ready)
            place = advance_place(place)
        place += 8
        length = next_length

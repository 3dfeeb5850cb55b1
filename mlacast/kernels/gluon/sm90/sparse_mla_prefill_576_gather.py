"""Gather role of the Hopper prefill kernel for d_qk 576: main parts into the ring, tails beside it.

A row travels as its first 512 dimensions, which the output needs too, and its last 64, which only
the scores need. One tail buffer is enough: the scores read it first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from mlacast.kernels.common.sm90_rotation import find_row_offset, hide_value
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576_barriers import (
    K_FREE,
    K_READY,
    Q_FREE,
    TAIL_FREE,
)
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import (
    BLOCK_H,
    BLOCK_N,
    advance_phase,
    advance_slot,
    count_blocks,
    load_row_length,
)


@gluon.jit
def _load_ids(indices_ptr, stride_indices, token, first, lane, length):
    """Row numbers [64] of one block; -1 at or past ``length``."""
    # One address a thread: what is the same in all threads is added before the lane.
    first_ptr = indices_ptr + find_row_offset(token, stride_indices) + first
    return gl.load(first_ptr + lane, mask=first + lane < length, other=-1)


@gluon.jit
def _copy_query(
    target,
    base,
    stride_q_head,
    head,
    num_heads,
    FIRST: gl.constexpr,
    WIDTH: gl.constexpr,
    WORK: gl.constexpr,
):
    """Start copying dimensions ``FIRST``.. of 64 heads [64, WIDTH]; absent heads become zero.

    Heads of a token are less than 2**31 elements apart (``heads:far_apart`` in ``ops.layout``).
    """
    d = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, head.type.layout.parent))  # [WIDTH]
    query = base + (head * stride_q_head)[:, None] + d[None, :]  # [64, WIDTH]
    if WORK.full_tiles:
        async_copy.async_copy_global_to_shared(target, query)
    else:
        mask = (head < num_heads)[:, None]
        async_copy.async_copy_global_to_shared(target, query, mask=mask)


@gluon.jit
def _publish(barriers, slot):
    """Produce ``K_READY`` of the slot as this warpgroup's copies land: 128 arrivals and one."""
    async_copy.mbarrier_arrive(barriers.index(K_READY + slot), increment_count=False)
    mbarrier.arrive(barriers.index(K_READY + slot), count=1)


@gluon.jit
def run_gather_role(
    query,
    keys,
    lists,
    lengths,
    num_heads,
    num_tiles,
    barriers,
    memory,
    WORK: gl.constexpr,
    POOL: gl.constexpr,
):
    """Per tile: the query [64, 576], then its blocks of 64 selected rows [64, 576].

    Produces ``K_READY`` (of a slot and of what belongs to it elsewhere); consumes ``K_FREE``,
    ``TAIL_FREE`` and ``Q_FREE``. The last 128 dimensions of the query go to ``q_smem``, the rest of
    it takes a slot. Row numbers are loaded one block ahead, across tiles. Rows that do not count
    are zero and marked in ``mask_smem``.
    """
    q_ptr, stride_q_token, stride_q_head = query
    kv_ptr, stride_kv, s_kv = keys
    indices_ptr, stride_indices = lists
    topk, length_ptr, stride_length = lengths
    k_smem, tail_smem, q_smem, mask_smem = memory
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lane = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))  # [64]
    d = gl.arange(0, 512, gl.SliceLayout(0, LAYOUT))  # [512]
    d_tail = 512 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))  # [64]
    slot = 0
    phase = 1
    # Bit 0 is the tail's, bit 1 the query's: one register less.
    phases = 3
    step = gl.num_programs(0)
    first_token = gl.program_id(0) // WORK.head_blocks
    length = load_row_length(length_ptr, stride_length, first_token, topk, POOL)
    ids = _load_ids(indices_ptr, stride_indices, first_token, 0, lane, length)  # [64]
    for tile in range(gl.program_id(0), num_tiles, step):
        token = tile // WORK.head_blocks
        # A selection stays in uniform registers, where a minimum would not.
        next_token = gl.where(tile + step < num_tiles, tile + step, tile) // WORK.head_blocks
        next_length = load_row_length(length_ptr, stride_length, next_token, topk, POOL)
        base = q_ptr + token.to(gl.int64) * stride_q_token
        head = (tile % WORK.head_blocks) * BLOCK_H + hide_value(lane)  # [64]
        mbarrier.wait(barriers.index(K_FREE + slot), phase)
        left = k_smem.index(slot).slice(0, 256, dim=1)
        right = k_smem.index(slot).slice(256, 256, dim=1)
        _copy_query(left, base, stride_q_head, head, num_heads, 0, 256, WORK)
        _copy_query(right, base, stride_q_head, head, num_heads, 256, 256, WORK)
        mbarrier.wait(barriers.index(Q_FREE), phases >> 1)
        phases ^= 2
        _copy_query(q_smem.index(0), base, stride_q_head, head, num_heads, 448, 128, WORK)
        _publish(barriers, slot)
        phase = advance_phase(slot, phase)
        slot = advance_slot(slot)
        num_blocks = count_blocks(length)
        for i in range(num_blocks):
            valid = (ids >= 0) & (ids < s_kv)  # [64]
            rows = kv_ptr + (ids.to(gl.int64) * stride_kv)[:, None]  # [64, 1]
            is_last = i == num_blocks - 1
            ids = _load_ids(
                indices_ptr,
                stride_indices,
                gl.where(is_last, next_token, token),
                gl.where(is_last, 0, (i + 1) * BLOCK_N),
                lane,
                gl.where(is_last, next_length, length),
            )
            mbarrier.wait(barriers.index(K_FREE + slot), phase)
            mask_smem.index(slot).store(gl.where(valid, 0, 1).to(gl.int8))
            async_copy.async_copy_global_to_shared(
                k_smem.index(slot), rows + d[None, :], mask=valid[:, None]
            )
            # The scores of the block before have to be under way; its main part was free earlier.
            mbarrier.wait(barriers.index(TAIL_FREE), phases & 1)
            phases ^= 1
            async_copy.async_copy_global_to_shared(
                tail_smem, rows + d_tail[None, :], mask=valid[:, None]
            )
            _publish(barriers, slot)
            phase = advance_phase(slot, phase)
            slot = advance_slot(slot)
        length = next_length

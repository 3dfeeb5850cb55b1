"""Gather role of a Hopper prefill program with one tile, which it shares with another program."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from mlacast.kernels.common.sm90_rotation import hide_value
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_gather import (
    find_largest_of_thread,
    gather_query,
    load_ids,
    publish,
    repeat_by_thread,
)
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import (
    BLOCK_N,
    NUM_SLOTS,
    advance_phase,
    advance_slot,
    count_blocks,
    load_row_length,
)


@gluon.jit
def run_lone_gather_role(
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
    is_free,
    WORK: gl.constexpr,
    QUERY: gl.constexpr,
    POOL: gl.constexpr,
):
    """Fill the ring: the query [64, 512], then the blocks of 64 selected rows of the only tile.

    As ``run_gather_role``, same slots. The left half of the first block has a barrier of its
    own, the last of ``k_ready``. Of a block's rows only the program's part, 256 dimensions, is
    multiplied by weights: the other half of a slot is filled again when the weights are out.

    Produces ``k_ready``; consumes ``k_free`` and ``p_ready``.
    """
    k_free, p_ready = is_free
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # What is computed from it ahead of the roles would spill.
    lane = hide_value(gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT)))  # [64]
    d = gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))  # [256]
    halves = k_smem._reinterpret(gl.bfloat16, [2 * NUM_SLOTS, BLOCK_N, 256], k_smem.layout)
    part = gl.program_id(0) % 2
    tile = gl.program_id(0) // 2
    token = tile // WORK.head_blocks
    # Without the length, which is on its way as well: entries behind it are masked below. Of two
    # blocks, because at the start every load comes from far.
    ids = load_ids(indices_ptr, stride_indices, token, 0, lane, topk)
    next_ids = load_ids(indices_ptr, stride_indices, token, BLOCK_N, lane, topk)
    length = load_row_length(length_ptr, stride_length, token, topk, POOL)
    gather_query(
        q_ptr + token.to(gl.int64) * stride_q_token,
        stride_q_head,
        num_heads,
        tile,
        k_smem,
        0,
        lane,
        WORK,
        QUERY,
    )
    publish(0, k_ready)
    slot = 1
    phase = 1
    best = find_largest_of_thread(gl.full((BLOCK_N,), float("-inf"), gl.float32, lane.type.layout))
    alive_row = alive_smem.index(0)
    num_blocks = count_blocks(length)
    for i in range(num_blocks):
        valid = (ids >= 0) & (ids < s_kv) & (i * BLOCK_N + lane < length)  # [64]
        rows = kv_ptr + (ids.to(gl.int64) * stride_kv)[:, None] + d[None, :]  # [64, 256]
        ids = next_ids
        next_ids = load_ids(indices_ptr, stride_indices, token, (i + 2) * BLOCK_N, lane, topk)
        bias = gl.where(valid, 0.0, float("-inf"))  # [64]
        best = gl.maximum(best, find_largest_of_thread(bias))
        # Weights of a block are out: nobody reads its rows but for P V. The third block follows the
        # query, which is not read by halves.
        mbarrier.wait(p_ready.index((i + 1) & 1), ((i - 3) >> 1) & 1, pred=i >= NUM_SLOTS)
        mbarrier.wait(k_free.index(slot), phase, pred=i < NUM_SLOTS)
        # The first scores begin with the left half.
        early = gl.where(i == 0, 0, 1 - part)
        async_copy.async_copy_global_to_shared(
            halves.index(2 * slot + early), rows + early * 256, mask=valid[:, None]
        )
        if i == 0:
            publish(NUM_SLOTS, k_ready)
        late = 1 - early
        mbarrier.wait(k_free.index(slot), phase)
        bias_smem.index(slot).store(bias)
        alive_row.store(repeat_by_thread((best == 0.0).to(gl.int8), lane))
        async_copy.async_copy_global_to_shared(
            halves.index(2 * slot + late), rows + late * 256, mask=valid[:, None]
        )
        publish(slot, k_ready)
        phase = advance_phase(slot, phase)
        slot = advance_slot(slot)

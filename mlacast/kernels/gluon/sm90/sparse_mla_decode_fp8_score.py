"""Score role of the Hopper decode kernel for FP8 queries: codes times codes, softmax.

The FP8 matrix unit aligns the 32 products of a step, and the sum so far, to the largest of them and
drops what is more than about 13 bits below it. A sum of all dimensions loses too much, so each unit
of 128 dimensions has a sum of its own, and float32 adds them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlacast.kernels.common.sm90_masks import apply_mask, has_marked
from mlacast.kernels.common.sm90_rotation import hide_value
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import UNITS, has_tail
from mlacast.kernels.gluon.sm90.sparse_mla_decode_softmax import (
    finish_item,
    fold_scores,
    publish_weights,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import BLOCK_H, find_work_range


@gluon.jit
def run_fp8_score_role(
    codes,
    tail_codes,
    q_last_smem,
    q_tail_smem,
    p_smem,
    alpha_smem,
    mask_smem,
    factor_smem,
    codes_ready,
    codes_free,
    p_ready,
    p_free,
    factor_ready,
    factor_free,
    pool,
    sink_ptr,
    lse_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    work,
    score_scale_log2,
    v_scale,
    WORK: gl.constexpr,
    POOL: gl.constexpr,
    END: gl.constexpr,
):
    """Scores and softmax of every work item; lse or the split's state to global memory.

    ``codes`` (one [2, 64, 128] a unit) and ``tail_codes`` [2, 64, 64] are e4m3: two stages, in turn
    the query of an item and its blocks of keys. ``q_last_smem`` [64, 128] and ``q_tail_smem``
    [64, 64] keep parts of the query during an item. Weights are float16. Consumes ``codes_ready``,
    ``p_free`` and, where items are whole rows, ``factor_free``; produces ``codes_free``, per block
    ``p_ready`` and per item of whole rows ``factor_ready``.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    Q: gl.constexpr = gl.DotOperandLayout(0, S, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    PARTIAL: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    row = gl.arange(0, BLOCK_H, ROW)  # [64]
    score_scale = gl.full((BLOCK_H,), 0.0, gl.float32, ROW) + score_scale_log2  # [64]
    taken = 0
    count = 0
    item_phase = 0
    for item in range(gl.program_id(0), work.num_items, work.num_programs):
        token, _, num_blocks, _, _ = find_work_range(item, work, pool, pool, WORK, POOL, None)
        stage = taken & 1
        mbarrier.wait(codes_ready.index(stage), (taken >> 1) & 1)
        query = (
            codes[0].index(stage).load(Q),
            codes[1].index(stage).load(Q),
            codes[2].index(stage).load(Q),
        )
        q_last_smem.store(codes[3].index(stage).load(Q))
        if has_tail(POOL.record):
            q_tail_smem.store(tail_codes.index(stage).load(Q))
        mbarrier.arrive(codes_free.index(stage), count=1)
        taken += 1
        base = gl.full((BLOCK_H,), -float("inf"), gl.float32, ROW)  # [64]
        partial_sum = gl.full((BLOCK_H, 4), 0.0, gl.float32, PARTIAL)  # [64, 4]
        for _ in range(num_blocks):
            stage = taken & 1
            mbarrier.wait(codes_ready.index(stage), (taken >> 1) & 1)
            fence_async_shared()
            s = gl.zeros((64, 64), gl.float32, S)
            right = gl.zeros((64, 64), gl.float32, S)
            keys = codes[0].index(stage).permute((1, 0))
            s = warpgroup_mma(query[0], keys, s, use_acc=False, is_async=True)
            keys = codes[1].index(stage).permute((1, 0))
            right = warpgroup_mma(query[1], keys, right, use_acc=False, is_async=True)
            for unit in gl.static_range(2, UNITS):
                s, right = warpgroup_mma_wait(0, deps=[s, right])
                s += right
                keys = codes[unit].index(stage).permute((1, 0))
                q_unit = q_last_smem if unit == 3 else query[unit]
                right = warpgroup_mma(q_unit, keys, right, use_acc=False, is_async=True)
            if has_tail(POOL.record):
                keys = tail_codes.index(stage).permute((1, 0))
                right = warpgroup_mma(q_tail_smem, keys, right, is_async=True)
            mask = mask_smem.index(taken & 3)
            masked = has_marked(mask)
            s, right = warpgroup_mma_wait(0, deps=[s, right])
            s += right
            mbarrier.arrive(codes_free.index(stage), count=1)
            taken += 1
            if masked != 0:
                s = apply_mask(s, mask, COLUMN)
            p, alpha, base, partial_sum = fold_scores(
                s, base, partial_sum, score_scale, PARTIAL, gl.float16
            )
            publish_weights(p, alpha, p_smem, alpha_smem, p_ready, p_free, count)
            count += 1
        finish_item(
            base,
            partial_sum,
            item,
            token,
            hide_value(row),
            factor_smem,
            factor_ready,
            factor_free,
            item_phase,
            sink_ptr,
            lse_ptr,
            partial_max_ptr,
            partial_sum_ptr,
            work,
            v_scale,
            WORK,
            END,
        )
        if not WORK.is_split:
            item_phase ^= 1

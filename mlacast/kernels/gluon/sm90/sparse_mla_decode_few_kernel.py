"""The Hopper decode of few heads: shared memory, barriers and who gets them.

Heads are the columns of both products, where ``sparse_mla_decode_kernel`` has them as 64 rows. A
program has one token, and nothing of it is split.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_decode import run_decode_role
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_layouts import (
    BLOCK_N,
    make_stage_layout,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_output import run_output_role
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_ring import count_chunks, count_places
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_softmax import run_softmax_role
from mlacast.kernels.gluon.sm90.sparse_mla_decode_kernel import UNALIGNED, VARYING
from mlacast.kernels.gluon.sm90.sparse_mla_decode_layouts import (
    SCALE_STAGE,
    STAGE_16,
    choose_stage_layout,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import LOG2_E, Pool

# The arguments of the other kernel, of which this one has no splits and items.
_ABSENT = ("num_splits", "num_items", "num_programs", "partial_max_ptr", "partial_sum_ptr")


@gluon.constexpr_function
def share_registers(HEADS):
    """Registers of a thread of the outputs and of either decoding; the softmax has what is left.

    That is 144 and 120, of 512. Sums take 64 or 128.
    """
    return [144, 112, 112] if HEADS == 16 else [168, 112, 112]


@gluon.jit(
    do_not_specialize=[name for name in VARYING if name not in _ABSENT],
    do_not_specialize_on_alignment=[name for name in UNALIGNED if name not in _ABSENT],
)
def sparse_mla_decode_few_kernel(
    q_ptr,
    stride_q_token,
    stride_q_head,
    cache_ptr,
    stride_page,
    page_size,
    page_inverse,
    page_shift,
    num_slots,
    indices_ptr,
    stride_indices,
    topk,
    length_ptr,
    stride_length,
    extra_cache_ptr,
    extra_stride_page,
    extra_page_size,
    extra_page_inverse,
    extra_page_shift,
    extra_num_slots,
    extra_indices_ptr,
    extra_stride_indices,
    extra_topk,
    extra_length_ptr,
    extra_stride_length,
    sink_ptr,
    table_ptr,
    stride_table,
    table_rows,
    positions_ptr,
    stride_positions,
    lse_ptr,
    data_ptr,
    sf_ptr,
    scale_ptr,
    stride_data_token,
    stride_data_group,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    padding_rows,
    num_tokens,
    num_heads,
    eps,
    sm_scale,
    sm_scale_ptr,
    v_scale,
    v_scale_ptr,
    HEADS: gl.constexpr,
    WORK: gl.constexpr,
    SCALES: gl.constexpr,
    QUERY: gl.constexpr,
    POOL: gl.constexpr,
    EXTRA: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """All heads of one token, at most HEADS: 16 or 32. Grid: (tokens,).

    Barriers (producer -> consumer): ``q_ready`` softmax -> decoding, ``s_ready`` decoding ->
    softmax, ``s_free`` softmax -> decoding, ``p_ready`` softmax -> output, ``p_free`` output ->
    softmax, ``k_free`` output -> decoding; ``o_ready`` output -> all, ``factor_ready`` softmax ->
    all.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    STAGE: gl.constexpr = choose_stage_layout(False)
    # Chunks of 128 dimensions of two blocks of keys, or of a block and a half.
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [count_chunks(HEADS), BLOCK_N, 128], TILE)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [4, HEADS, 128], TILE)
    # Units of records of two blocks; of what is unscaled in "v4" there is room for one.
    left_stages = (
        gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 32], STAGE),
        gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 32], STAGE),
    )
    if POOL.record == "v4":
        right_stages = (
            gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 32], STAGE),
            gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 16], STAGE_16),
            gl.allocate_shared_memory(gl.int32, [1, BLOCK_N, 32], STAGE),
        )
    else:
        right_stages = (
            gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 32], STAGE),
            gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 32], STAGE),
        )
    left_scales = gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 2], SCALE_STAGE)
    right_scales = gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 2], SCALE_STAGE)
    # Of the dimensions of either decoding role.
    score_smem = gl.allocate_shared_memory(
        gl.float32, [2, HEADS, BLOCK_N], make_stage_layout(HEADS, 64)
    )
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, BLOCK_N], TILE)
    alpha_smem = gl.allocate_shared_memory(gl.float32, [2, HEADS], NUMBERS)
    factor_smem = gl.allocate_shared_memory(gl.float32, [HEADS], NUMBERS)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    s_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    s_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    p_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [count_places(HEADS), 1], BARRIER)
    o_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    factor_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(q_ready, count=1)
    # Both decoding roles.
    mbarrier.init(s_ready, count=2)
    mbarrier.init(s_free, count=1)
    for i in gl.static_range(count_places(HEADS)):
        # Weights and factors of two blocks, whatever the ring has.
        if i < 2:
            mbarrier.init(p_ready.index(i), count=1)
            mbarrier.init(p_free.index(i), count=1)
        mbarrier.init(k_free.index(i), count=1)
    mbarrier.init(o_ready, count=1)
    mbarrier.init(factor_ready, count=1)
    # Every role waits for the kernel before this one (kernels/common/dependents.py): until then
    # they have been started, which takes as long as a load does.
    if SCALES.sm_on_device or SCALES.v_on_device:
        gdc_wait()
    pool = Pool(
        cache_ptr,
        stride_page,
        page_size,
        page_inverse,
        page_shift,
        num_slots,
        indices_ptr,
        stride_indices,
        topk,
        length_ptr,
        stride_length,
    )
    extra_pool = Pool(
        extra_cache_ptr,
        extra_stride_page,
        extra_page_size,
        extra_page_inverse,
        extra_page_shift,
        extra_num_slots,
        extra_indices_ptr,
        extra_stride_indices,
        extra_topk,
        extra_length_ptr,
        extra_stride_length,
    )
    if SCALES.sm_on_device:
        sm_scale = gl.load(sm_scale_ptr)
    if SCALES.v_on_device:
        v_scale = gl.load(v_scale_ptr)
    rope = (table_ptr, stride_table, table_rows, positions_ptr, stride_positions)
    target = (
        data_ptr,
        sf_ptr,
        scale_ptr,
        stride_data_token,
        stride_data_group,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        padding_rows,
    )
    # What every role gets for its chunk of the output.
    ends = (k_smem, factor_smem, o_ready, factor_ready, target, num_tokens, num_heads)
    gl.warp_specialize(
        [
            (
                run_softmax_role,
                (
                    (q_ptr, stride_q_token, stride_q_head),
                    q_smem,
                    score_smem,
                    p_smem,
                    alpha_smem,
                    factor_smem,
                    q_ready,
                    s_ready,
                    s_free,
                    p_ready,
                    p_free,
                    factor_ready,
                    pool,
                    extra_pool,
                    rope,
                    ends,
                    sink_ptr,
                    lse_ptr,
                    num_heads,
                    eps,
                    sm_scale * LOG2_E,
                    v_scale,
                    HEADS,
                    WORK,
                    QUERY,
                    POOL,
                    EXTRA,
                    END,
                    OUTPUT,
                ),
            ),
            (
                run_output_role,
                (
                    k_smem,
                    p_smem,
                    alpha_smem,
                    k_free,
                    p_ready,
                    p_free,
                    o_ready,
                    pool,
                    extra_pool,
                    ends,
                    HEADS,
                    WORK,
                    POOL,
                    EXTRA,
                    END,
                    OUTPUT,
                ),
            ),
            (
                run_decode_role,
                (
                    q_smem,
                    k_smem,
                    left_stages,
                    left_scales,
                    score_smem,
                    q_ready,
                    k_free,
                    s_ready,
                    s_free,
                    pool,
                    extra_pool,
                    ends,
                    0,
                    HEADS,
                    WORK,
                    POOL,
                    EXTRA,
                    END,
                    OUTPUT,
                ),
            ),
            (
                run_decode_role,
                (
                    q_smem,
                    k_smem,
                    right_stages,
                    right_scales,
                    score_smem,
                    q_ready,
                    k_free,
                    s_ready,
                    s_free,
                    pool,
                    extra_pool,
                    ends,
                    1,
                    HEADS,
                    WORK,
                    POOL,
                    EXTRA,
                    END,
                    OUTPUT,
                ),
            ),
        ],
        [4, 4, 4],
        share_registers(HEADS),
    )

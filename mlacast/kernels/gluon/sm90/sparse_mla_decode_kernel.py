"""The Hopper decode kernel: shared memory, barriers and who gets them.

Dequantisation is in ``sparse_mla_decode_dequant`` and ``_records``, scores and softmax in
``_score``, the two halves of the output in ``_output``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlacast.kernels.gluon.sm90.sparse_mla_decode_dequant import dequant_role
from mlacast.kernels.gluon.sm90.sparse_mla_decode_output import output_role
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import (
    SCALE_STAGE,
    STAGE_32,
    has_tail,
    unit_count,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_score import score_role
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import BLOCK_H, BLOCK_N, LOG2_E

# The outputs take 160 registers a thread, the dequantisation DEQUANT_REGISTERS, the scores what is
# left of 512.
OPTIONS = {"num_warps": 4, "maxnreg": 128, "launch_pdl": True}
OUTPUT_REGISTERS = gl.constexpr(160)


# Counts and strides that vary while serving must not pick another variant of the kernel.
VARYING = [
    "page_size",
    "page_inverse",
    "page_shift",
    "num_slots",
    "stride_page",
    "stride_indices",
    "topk",
    "stride_length",
    "extra_stride_page",
    "extra_page_size",
    "extra_page_inverse",
    "extra_page_shift",
    "extra_num_slots",
    "extra_stride_indices",
    "extra_topk",
    "extra_stride_length",
    "table_rows",
    "stride_positions",
    "stride_sf_token",
    "stride_sf_group",
    "stride_sf_word",
    "padding_rows",
    "num_tokens",
    "num_splits",
    "num_items",
    "num_programs",
]
# Nor must where a slice of a bigger buffer happens to start.
UNALIGNED = [
    "indices_ptr",
    "length_ptr",
    "extra_indices_ptr",
    "extra_length_ptr",
    "sink_ptr",
    "table_ptr",
    "positions_ptr",
    "lse_ptr",
    "partial_max_ptr",
    "partial_sum_ptr",
    "sf_ptr",
    "scale_ptr",
    "sm_scale_ptr",
    "v_scale_ptr",
]


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def sparse_mla_decode_kernel(
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
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
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
    num_splits,
    num_items,
    num_programs,
    eps,
    sm_scale,
    sm_scale_ptr,
    v_scale,
    v_scale_ptr,
    HEAD_BLOCKS: gl.constexpr,
    FULL_TILES: gl.constexpr,
    IS_SPLIT: gl.constexpr,
    CHUNK16: gl.constexpr,
    HAS_SM_SCALE: gl.constexpr,
    HAS_V_SCALE: gl.constexpr,
    ROTATE_QUERY: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    HALF_PAIRING: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_LENGTH: gl.constexpr,
    FORMAT: gl.constexpr,
    INLINE: gl.constexpr,
    HAS_EXTRA: gl.constexpr,
    HAS_EXTRA_LENGTH: gl.constexpr,
    EXTRA_FORMAT: gl.constexpr,
    EXTRA_INLINE: gl.constexpr,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    F: gl.constexpr,
    CHUNK32: gl.constexpr,
    AMAX_FLOOR: gl.constexpr,
    NUM_PIECES: gl.constexpr,
    DELAY_OUTPUT: gl.constexpr,
    DEQUANT_REGISTERS: gl.constexpr,
):
    """Work items (split, 64 heads of one token) at a stride of the grid. Grid: (programs,).

    Barriers (producer -> consumer): ``k_ready`` dequantisation -> score, ``k_free`` output (of a
    query: score) -> dequantisation, ``p_ready`` and ``p_go`` score -> output, ``p_free`` output ->
    score, ``factor_ready`` score -> output, ``factor_free`` output -> score.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    QUERY_PIECES: gl.constexpr = 3 if has_tail(FORMAT) else 2
    k_even = gl.allocate_shared_memory(gl.bfloat16, [NUM_PIECES, BLOCK_N, 128], TILE)
    k_odd = gl.allocate_shared_memory(gl.bfloat16, [NUM_PIECES, BLOCK_N, 128], TILE)
    if unit_count(FORMAT) == 4:
        stages = (
            gl.allocate_shared_memory(gl.int32, [BLOCK_N, 32], STAGE_32),
            gl.allocate_shared_memory(gl.int32, [BLOCK_N, 32], STAGE_32),
            gl.allocate_shared_memory(gl.int32, [BLOCK_N, 32], STAGE_32),
            gl.allocate_shared_memory(gl.int32, [BLOCK_N, 32], STAGE_32),
        )
    else:
        stages = gl.allocate_shared_memory(gl.int32, [4, BLOCK_N, 32], STAGE_32)
    tail_stage = k_even
    if FORMAT == "fp8_576":
        tail_stage = gl.allocate_shared_memory(gl.int32, [BLOCK_N, 32], STAGE_32)
    scale_stage = gl.allocate_shared_memory(gl.int32, [BLOCK_N, 4], SCALE_STAGE)
    tail_smem = k_even
    if has_tail(FORMAT):
        tail_smem = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, 64], TILE)
    q_64_smem = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, 64], TILE)
    q_128_smem = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, 128], TILE)
    q_tail_smem = q_128_smem
    if has_tail(FORMAT):
        q_tail_smem = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, 64], TILE)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], TILE)
    alpha_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_H], ROW)
    mask_smem = gl.allocate_shared_memory(gl.int8, [4, BLOCK_N], ROW)
    factor_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_H], ROW)
    k_ready = gl.allocate_shared_memory(gl.int64, [NUM_PIECES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [NUM_PIECES, 1], BARRIER)
    p_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    p_go = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    p_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    factor_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    factor_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(NUM_PIECES):
        mbarrier.init(k_ready.index(i), count=129)
        mbarrier.init(k_free.index(i), count=1)
    mbarrier.init(p_ready, count=1)
    mbarrier.init(p_go, count=1)
    mbarrier.init(p_free, count=2)
    mbarrier.init(factor_ready, count=1)
    mbarrier.init(factor_free, count=2)
    # Until here the kernel before this one may run: kernels/common/dependents.py.
    gdc_wait()
    gdc_launch_dependents()
    pool = (
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
    extra_pool = (
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
    if HAS_SM_SCALE:
        sm_scale = gl.load(sm_scale_ptr)
    if HAS_V_SCALE:
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
    gl.warp_specialize(
        [
            (
                score_role,
                (
                    k_even,
                    k_odd,
                    tail_smem,
                    q_64_smem,
                    q_128_smem,
                    q_tail_smem,
                    p_smem,
                    alpha_smem,
                    mask_smem,
                    factor_smem,
                    k_ready,
                    k_free,
                    p_ready,
                    p_go,
                    p_free,
                    factor_ready,
                    factor_free,
                    pool,
                    extra_pool,
                    rope,
                    sink_ptr,
                    lse_ptr,
                    partial_max_ptr,
                    partial_sum_ptr,
                    num_tokens,
                    num_heads,
                    num_items,
                    num_programs,
                    num_splits,
                    eps,
                    sm_scale * LOG2_E,
                    v_scale,
                    HEAD_BLOCKS,
                    FULL_TILES,
                    IS_SPLIT,
                    HAS_NORM,
                    ROTATE_QUERY,
                    HALF_PAIRING,
                    HAS_SINK,
                    HAS_LENGTH,
                    HAS_EXTRA,
                    HAS_EXTRA_LENGTH,
                    FORMAT,
                    NUM_PIECES,
                    DELAY_OUTPUT,
                ),
            ),
            (
                output_role,
                (
                    k_even,
                    k_odd,
                    p_smem,
                    alpha_smem,
                    factor_smem,
                    k_ready,
                    k_free,
                    p_ready,
                    p_go,
                    p_free,
                    factor_ready,
                    factor_free,
                    pool,
                    extra_pool,
                    rope,
                    target,
                    partial_out_ptr,
                    v_scale,
                    num_tokens,
                    num_heads,
                    num_items,
                    num_programs,
                    num_splits,
                    0,
                    HEAD_BLOCKS,
                    FULL_TILES,
                    IS_SPLIT,
                    HAS_ROPE and not has_tail(FORMAT),
                    HALF_PAIRING,
                    HAS_SINK,
                    HAS_LENGTH,
                    HAS_EXTRA,
                    HAS_EXTRA_LENGTH,
                    KIND,
                    GROUP,
                    F,
                    CHUNK32,
                    AMAX_FLOOR,
                    QUERY_PIECES,
                    NUM_PIECES,
                    DELAY_OUTPUT,
                ),
            ),
            (
                output_role,
                (
                    k_even,
                    k_odd,
                    p_smem,
                    alpha_smem,
                    factor_smem,
                    k_ready,
                    k_free,
                    p_ready,
                    p_go,
                    p_free,
                    factor_ready,
                    factor_free,
                    pool,
                    extra_pool,
                    rope,
                    target,
                    partial_out_ptr,
                    v_scale,
                    num_tokens,
                    num_heads,
                    num_items,
                    num_programs,
                    num_splits,
                    1,
                    HEAD_BLOCKS,
                    FULL_TILES,
                    IS_SPLIT,
                    HAS_ROPE and not has_tail(FORMAT),
                    HALF_PAIRING,
                    HAS_SINK,
                    HAS_LENGTH,
                    HAS_EXTRA,
                    HAS_EXTRA_LENGTH,
                    KIND,
                    GROUP,
                    F,
                    CHUNK32,
                    AMAX_FLOOR,
                    QUERY_PIECES,
                    NUM_PIECES,
                    DELAY_OUTPUT,
                ),
            ),
            (
                dequant_role,
                (
                    q_ptr,
                    stride_q_token,
                    stride_q_head,
                    pool,
                    extra_pool,
                    num_heads,
                    num_items,
                    num_programs,
                    num_splits,
                    k_even,
                    k_odd,
                    tail_smem,
                    stages,
                    tail_stage,
                    scale_stage,
                    mask_smem,
                    k_ready,
                    k_free,
                    HEAD_BLOCKS,
                    FULL_TILES,
                    IS_SPLIT,
                    CHUNK16,
                    HAS_LENGTH,
                    HAS_EXTRA,
                    HAS_EXTRA_LENGTH,
                    FORMAT,
                    INLINE,
                    EXTRA_FORMAT,
                    EXTRA_INLINE,
                    NUM_PIECES,
                ),
            ),
        ],
        [4, 4, 4],
        [OUTPUT_REGISTERS, OUTPUT_REGISTERS, DEQUANT_REGISTERS],
    )

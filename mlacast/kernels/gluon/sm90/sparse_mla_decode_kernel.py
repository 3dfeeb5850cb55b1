"""The Hopper decode kernel: shared memory, barriers and who gets them.

Dequantisation is in ``sparse_mla_decode_dequant``, that of a block in ``_block``: copies in
``_fetch``, numbers in ``_unit``, ``_codes`` and ``_scales``. Scores and softmax are in ``_score``,
the two halves of the output in ``_output``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlacast.kernels.gluon.sm90.sparse_mla_decode_dequant import run_dequant_role
from mlacast.kernels.gluon.sm90.sparse_mla_decode_layouts import SCALE_STAGE, choose_stage_layout
from mlacast.kernels.gluon.sm90.sparse_mla_decode_output import run_output_role
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import has_tail
from mlacast.kernels.gluon.sm90.sparse_mla_decode_score import run_score_role
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import (
    BLOCK_H,
    BLOCK_N,
    KEY_UNIT,
    LOG2_E,
    Pool,
    Work,
)

# The outputs take 160 registers a thread, the dequantisation what the ring says, the scores what is
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
    WORK: gl.constexpr,
    RING: gl.constexpr,
    SCALES: gl.constexpr,
    QUERY: gl.constexpr,
    POOL: gl.constexpr,
    EXTRA: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Work items (split, 64 heads of one token) at a stride of the grid. Grid: (programs,).

    Barriers (producer -> consumer): ``k_ready`` dequantisation -> score, ``k_free`` output (of a
    query: score) -> dequantisation, ``p_ready`` and ``p_go`` score -> output, ``p_free`` output ->
    score, ``factor_ready`` score -> output, ``factor_free`` output -> score.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    FORMAT: gl.constexpr = POOL.record
    STAGE: gl.constexpr = choose_stage_layout(EXTRA is not None and EXTRA.record != FORMAT)
    NUM_PIECES: gl.constexpr = RING.num_pieces
    QUERY_PIECES: gl.constexpr = 3 if has_tail(FORMAT) else 2
    k_even = gl.allocate_shared_memory(gl.bfloat16, [NUM_PIECES, BLOCK_N, 128], TILE)
    k_odd = gl.allocate_shared_memory(gl.bfloat16, [NUM_PIECES, BLOCK_N, 128], TILE)
    stages = (
        gl.allocate_shared_memory(gl.int32, [BLOCK_N, 32], STAGE),
        gl.allocate_shared_memory(gl.int32, [BLOCK_N, 32], STAGE),
        gl.allocate_shared_memory(gl.int32, [BLOCK_N, 32], STAGE),
        gl.allocate_shared_memory(gl.int32, [BLOCK_N, 32], STAGE),
    )
    tail_stage = k_even
    if FORMAT == "fp8_576":
        tail_stage = gl.allocate_shared_memory(gl.int32, [BLOCK_N, 32], STAGE)
    # Of "v32" read while those of the next block are copied.
    SCALE_SHAPE: gl.constexpr = [2, BLOCK_N, 4] if FORMAT == "v32" else [BLOCK_N, 4]
    scale_stage = gl.allocate_shared_memory(gl.int32, SCALE_SHAPE, SCALE_STAGE)
    tail_smem = k_even
    if has_tail(FORMAT):
        # As many blocks as the four pieces of this ring are: where a block's first piece is free,
        # the scores of the block before the last are done, and so is its tail.
        tail_smem = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, 64], TILE)
    q_64_smem = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, 64], TILE)
    q_128_smem = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, 128], TILE)
    q_tail_smem = q_128_smem
    if has_tail(FORMAT):
        q_tail_smem = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, 64], TILE)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], TILE)
    alpha_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_H], ROW)
    # A ring of five pieces holds parts of three blocks; four masks, and a block's place is two bits
    # of its number.
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
        # Of a query each of 128 threads arrives as its copies land, and one more when all are asked
        # for; keys, which are stored, arrive as often at once. The half of a block that unscaled
        # dimensions of "v4" are copied to is ready as a query is.
        mbarrier.init(k_ready.index(i), count=129)
        mbarrier.init(k_free.index(i), count=1)
    mbarrier.init(p_ready, count=1)
    mbarrier.init(p_go, count=1)
    # Both output roles read all of P, and the factors.
    mbarrier.init(p_free, count=2)
    mbarrier.init(factor_ready, count=1)
    mbarrier.init(factor_free, count=2)
    # Until here the kernel before this one may run: kernels/common/dependents.py.
    gdc_wait()
    gdc_launch_dependents()
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
    work = Work(num_tokens, num_heads, num_items, num_programs, num_splits)
    # What both halves of the output get.
    places = (
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
        KEY_UNIT * v_scale,
        work,
    )
    gl.warp_specialize(
        [
            (
                run_score_role,
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
                    work,
                    eps,
                    sm_scale * LOG2_E,
                    v_scale,
                    WORK,
                    QUERY,
                    POOL,
                    EXTRA,
                    END,
                    RING,
                ),
            ),
            (run_output_role, (places, 0, WORK, POOL, EXTRA, END, OUTPUT, QUERY_PIECES, RING)),
            (run_output_role, (places, 1, WORK, POOL, EXTRA, END, OUTPUT, QUERY_PIECES, RING)),
            (
                run_dequant_role,
                (
                    q_ptr,
                    stride_q_token,
                    stride_q_head,
                    pool,
                    extra_pool,
                    work,
                    k_even,
                    k_odd,
                    tail_smem,
                    stages,
                    tail_stage,
                    scale_stage,
                    mask_smem,
                    k_ready,
                    k_free,
                    WORK,
                    QUERY,
                    POOL,
                    EXTRA,
                    RING,
                ),
            ),
        ],
        [4, 4, 4],
        [OUTPUT_REGISTERS, OUTPUT_REGISTERS, RING.dequant_registers],
    )

"""The Hopper decode kernel for e4m3 queries over per-tensor FP8 caches: shared memory, barriers.

Scores are products of codes, so that keys become float16 for the outputs alone. Copies and
decoding are in ``sparse_mla_decode_fp8_dequant``, scores and softmax in ``_fp8_score``, the two
halves of the output in ``_output``, which the kernel for other queries has as well.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlacast.kernels.gluon.sm90.sparse_mla_decode_fp8_dequant import (
    WORDS_OF_TAIL,
    WORDS_OF_UNIT,
    run_fp8_dequant_role,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_fp8_score import run_fp8_score_role
from mlacast.kernels.gluon.sm90.sparse_mla_decode_kernel import (
    OUTPUT_REGISTERS,
    UNALIGNED,
    VARYING,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_output import run_output_role
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import has_tail
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import BLOCK_H, BLOCK_N, LOG2_E, Pool, Work


@gluon.jit(
    do_not_specialize=[*VARYING, "stride_q_token", "stride_q_head"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def sparse_mla_decode_fp8_kernel(
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
    sm_scale,
    sm_scale_ptr,
    v_scale,
    v_scale_ptr,
    WORK: gl.constexpr,
    RING: gl.constexpr,
    SCALES: gl.constexpr,
    POOL: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Work items (split, 64 heads of one token) at a stride of the grid. Grid: (programs,).

    ``q_ptr`` points at int32 words; strides of the query and of pages count 16 bytes.

    Barriers (producer -> consumer): ``codes_ready`` copies of the dequantisation -> score and
    dequantisation, ``codes_free`` score -> dequantisation, ``k_ready`` dequantisation -> output,
    ``k_free`` output -> dequantisation, ``p_ready`` score -> output, ``p_free`` output -> score,
    ``factor_ready`` score -> output, ``factor_free`` output -> score.
    """
    FORMAT: gl.constexpr = POOL.record
    NUM_PIECES: gl.constexpr = RING.num_pieces
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    TAIL_CODES: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    k_even = gl.allocate_shared_memory(gl.float16, [NUM_PIECES, BLOCK_N, 128], TILE)
    k_odd = gl.allocate_shared_memory(gl.float16, [NUM_PIECES, BLOCK_N, 128], TILE)
    # An allocation a unit, so that none waits for the reads of another.
    words = (
        gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 32], WORDS_OF_UNIT),
        gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 32], WORDS_OF_UNIT),
        gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 32], WORDS_OF_UNIT),
        gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 32], WORDS_OF_UNIT),
    )
    codes = (
        words[0]._reinterpret(gl.float8e4nv, [2, BLOCK_N, 128], CODES),
        words[1]._reinterpret(gl.float8e4nv, [2, BLOCK_N, 128], CODES),
        words[2]._reinterpret(gl.float8e4nv, [2, BLOCK_N, 128], CODES),
        words[3]._reinterpret(gl.float8e4nv, [2, BLOCK_N, 128], CODES),
    )
    # Of the query what the registers of the scores have no room for: the fourth unit and the tail.
    q_last_smem = gl.allocate_shared_memory(gl.float8e4nv, [BLOCK_H, 128], CODES)
    tail_words = words[0]
    tail_codes = codes[0]
    q_tail_smem = codes[0].index(0)
    if has_tail(FORMAT):
        tail_words = gl.allocate_shared_memory(gl.int32, [2, BLOCK_N, 16], WORDS_OF_TAIL)
        tail_codes = tail_words._reinterpret(gl.float8e4nv, [2, BLOCK_N, 64], TAIL_CODES)
        q_tail_smem = gl.allocate_shared_memory(gl.float8e4nv, [BLOCK_H, 64], TAIL_CODES)
    p_smem = gl.allocate_shared_memory(gl.float16, [BLOCK_H, BLOCK_N], TILE)
    alpha_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_H], ROW)
    mask_smem = gl.allocate_shared_memory(gl.int8, [4, BLOCK_N], ROW)
    factor_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_H], ROW)
    codes_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    codes_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_ready = gl.allocate_shared_memory(gl.int64, [NUM_PIECES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [NUM_PIECES, 1], BARRIER)
    p_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    p_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    factor_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    factor_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(2):
        # Each of 128 threads as its copies land, and one more when all are asked for.
        mbarrier.init(codes_ready.index(i), count=129)
        mbarrier.init(codes_free.index(i), count=1)
    for i in gl.static_range(NUM_PIECES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=1)
    mbarrier.init(p_ready, count=1)
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
    if SCALES.sm_on_device:
        sm_scale = gl.load(sm_scale_ptr)
    if SCALES.v_on_device:
        v_scale = gl.load(v_scale_ptr)
    query = (q_ptr, stride_q_token, stride_q_head)
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
        # Weights are multiplied as soon as they are stored.
        p_ready,
        p_free,
        factor_ready,
        factor_free,
        pool,
        pool,
        rope,
        target,
        partial_out_ptr,
        v_scale,
        work,
    )
    gl.warp_specialize(
        [
            (
                run_fp8_score_role,
                (
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
                    sm_scale * LOG2_E,
                    v_scale,
                    WORK,
                    POOL,
                    END,
                ),
            ),
            (run_output_role, (places, 0, WORK, POOL, None, END, OUTPUT, 0, RING)),
            (run_output_role, (places, 1, WORK, POOL, None, END, OUTPUT, 0, RING)),
            (
                run_fp8_dequant_role,
                (
                    query,
                    pool,
                    work,
                    words,
                    tail_words,
                    k_even,
                    k_odd,
                    mask_smem,
                    codes_ready,
                    codes_free,
                    k_ready,
                    k_free,
                    WORK,
                    POOL,
                    NUM_PIECES,
                ),
            ),
        ],
        [4, 4, 4],
        [OUTPUT_REGISTERS, OUTPUT_REGISTERS, RING.dequant_registers],
    )

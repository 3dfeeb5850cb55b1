"""Output role of the Hopper decode of few heads: V^T P of 512 dimensions, and the end of a row."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from mlacast.kernels.common.sm90_rescale import rescale_columns
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_end import end_chunk
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_layouts import make_product_layout
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_ring import (
    find_chunk,
    find_output_piece,
    free_chunks,
    view_output_stage,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import find_work_range


@gluon.jit
def _add_output(k_smem, weights, o, block, NUMBER: gl.constexpr, HEADS: gl.constexpr):
    """Issue the product of chunk ``NUMBER`` of a block of values with its weights [64, heads]."""
    values = k_smem.index(find_chunk(block, NUMBER, HEADS)).permute((1, 0))  # [128, 64]
    return warpgroup_mma(values, weights, o, is_async=True)


@gluon.jit
def run_output_role(
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
    HEADS: gl.constexpr,
    WORK: gl.constexpr,
    POOL: gl.constexpr,
    EXTRA: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Accumulate the output, dimensions as rows, and hand it to all roles.

    Consumes ``p_ready``, with which the values of a block are there too, and ``factor_ready`` and
    ``o_ready`` for its chunk; produces ``p_free``, ``k_free`` and ``o_ready``. The ring is the
    stage of the output: nobody needs it then. ``ends`` as in ``end_chunk``.
    """
    gdc_wait()
    PRODUCT: gl.constexpr = make_product_layout(HEADS)
    COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    token = gl.program_id(0)
    _, _, num_blocks, _, _ = find_work_range(token, 0, pool, extra_pool, WORK, POOL, EXTRA)
    o_0 = gl.zeros((128, HEADS), gl.float32, PRODUCT)
    o_1 = gl.zeros((128, HEADS), gl.float32, PRODUCT)
    o_2 = gl.zeros((128, HEADS), gl.float32, PRODUCT)
    o_3 = gl.zeros((128, HEADS), gl.float32, PRODUCT)
    for block in range(num_blocks):
        at = block & 1
        mbarrier.wait(p_ready.index(at), block >> 1 & 1)
        alpha = alpha_smem.index(at).load(COLUMN)  # [heads]
        o_0 = rescale_columns(o_0, alpha)
        o_1 = rescale_columns(o_1, alpha)
        o_2 = rescale_columns(o_2, alpha)
        o_3 = rescale_columns(o_3, alpha)
        weights = p_smem.index(at).permute((1, 0))  # [64, heads]
        fence_async_shared()
        if HEADS == 16:
            o_0 = _add_output(k_smem, weights, o_0, block, 0, HEADS)
            o_1 = _add_output(k_smem, weights, o_1, block, 1, HEADS)
            o_2 = _add_output(k_smem, weights, o_2, block, 2, HEADS)
            o_3 = _add_output(k_smem, weights, o_3, block, 3, HEADS)
            o_0, o_1, o_2, o_3 = warpgroup_mma_wait(0, deps=[o_0, o_1, o_2, o_3])
            mbarrier.arrive(p_free.index(at), count=1)
            free_chunks(k_free, block, 0, HEADS)
        else:
            # The next block's last chunks wait for the first of this one.
            o_0 = _add_output(k_smem, weights, o_0, block, 0, HEADS)
            o_2 = _add_output(k_smem, weights, o_2, block, 2, HEADS)
            o_1 = _add_output(k_smem, weights, o_1, block, 1, HEADS)
            o_3 = _add_output(k_smem, weights, o_3, block, 3, HEADS)
            o_0, o_2, o_1, o_3 = warpgroup_mma_wait(2, deps=[o_0, o_2, o_1, o_3])
            free_chunks(k_free, block, 0, HEADS)
            o_0, o_2, o_1, o_3 = warpgroup_mma_wait(0, deps=[o_0, o_2, o_1, o_3])
            mbarrier.arrive(p_free.index(at), count=1)
            free_chunks(k_free, block, 1, HEADS)
    stage = view_output_stage(k_smem, HEADS)
    outputs = (o_0, o_1, o_2, o_3)
    for n in gl.static_range(4):
        stage.index(find_output_piece(n, HEADS)).permute((1, 0)).store(outputs[n])
    mbarrier.arrive(o_ready, count=1)
    end_chunk(ends, token, (), 2, HEADS, WORK, END, OUTPUT)

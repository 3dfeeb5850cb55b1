"""Softmax of the Hopper decode kernels: weights of a block of keys, and the end of a work item."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mlacast.kernels.common.sm90_rotation import find_row_offset
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import LN_2, find_head_start, find_split

# Powers of two by which a row's maximum grows before the base of its weights moves.
LAZINESS = gl.constexpr(8.0)
# Where a base moves to, below the maximum. bfloat16 has room and the same bits everywhere. float16
# ends at 2**16 and has steps of 2**-24 below 2**-14: weights reach 2**(7 + 8), the largest of a row
# is 2**7 or more, and what is lost of another is at most 2**-32 of it.
_HEADROOM_BF16 = gl.constexpr(0.0)
_HEADROOM_F16 = gl.constexpr(7.0)


@gluon.jit
def fold_scores(s, base, partial_sum, score_scale, PARTIAL: gl.constexpr, WEIGHTS: gl.constexpr):
    """Fold one block of scores [64, 64] into the softmax state.

    Weights are relative to ``base``, which follows the maximum only when that has grown more than
    256-fold: most blocks leave what came before as it is.

    Returns:
        weights [64, 64] of type WEIGHTS (bfloat16 or float16), the factor alpha [64] of everything
        before, the new base [64] (base 2) and the new partial sums [64, 4], one per thread of a
        quad.
    """
    HEADROOM: gl.constexpr = _HEADROOM_F16 if WEIGHTS == gl.float16 else _HEADROOM_BF16
    block_max = gl.max(s, 1) * score_scale  # [64]
    new_base = gl.where(block_max > base + (HEADROOM + LAZINESS), block_max - HEADROOM, base)
    # -inf - -inf is NaN: shift by 0 while nothing valid has been seen.
    shift = gl.where(new_base == -float("inf"), 0.0, new_base)  # [64]
    p = gl.exp2(s * score_scale[:, None] - shift[:, None])  # [64, 64]
    # What came before a row's first key is zero and needs no factor.
    alpha = gl.where(base == -float("inf"), 1.0, gl.exp2(base - shift))  # [64]
    by_quad = gl.sum(gl.sum(gl.reshape(p, (64, 8, 4, 2)), 3), 1)  # [64, 4]
    by_quad = gl.convert_layout(by_quad, PARTIAL, assert_trivial=True)  # [64, 4]
    rescale = gl.convert_layout(alpha, gl.SliceLayout(1, PARTIAL))  # [64]
    return p.to(WEIGHTS), alpha, new_base, partial_sum * rescale[:, None] + by_quad


@gluon.jit
def publish_weights(p, alpha, p_smem, alpha_smem, p_ready, p_free, count):
    """Hand weights [64, 64] and rescale factors [64] of block ``count`` to the output roles.

    Consumes ``p_free``, produces ``p_ready``.
    """
    mbarrier.wait(p_free, (count & 1) ^ 1)
    p_smem.store(p)
    alpha_smem.store(alpha)
    fence_async_shared()
    mbarrier.arrive(p_ready, count=1)


@gluon.jit
def finish_item(
    base,
    partial_sum,
    item,
    token,
    row,
    factor_smem,
    factor_ready,
    factor_free,
    item_phase,
    sink_ptr,
    lse_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    work,
    unit,
    WORK: gl.constexpr,
    END: gl.constexpr,
):
    """Softmax state of a work item: of a split to global memory; else lse, and the outputs' factor.

    The factor's place is free with ``factor_free``, and it is there with ``factor_ready``; splits
    use neither. The outputs are ``1 / unit`` of their value before that factor. ``row`` numbers the
    64 heads, ``item_phase`` is the parity of the items before this one.
    """
    total = gl.convert_layout(gl.sum(partial_sum, 1), base.type.layout)  # [64]
    head = find_head_start(item, work, WORK) + row  # [64]
    if WORK.is_split:
        # No scratch of 4 TB: splits times tokens can be counted in 32 bits.
        state = (
            find_row_offset(
                find_split(item, work.num_splits) * work.num_tokens + token, work.num_heads
            )
            + head
        )
        gl.store(partial_max_ptr + state, base, mask=head < work.num_heads)
        gl.store(partial_sum_ptr + state, total, mask=head < work.num_heads)
    else:
        empty = total == 0.0
        divisor = gl.where(empty, 1.0, total)  # [64]
        lse = gl.where(empty, -float("inf"), (base + gl.log2(divisor)) * LN_2)  # [64]
        factor = gl.where(empty, 0.0, unit / divisor)  # [64]
        if END.has_sink:
            sink = gl.load(sink_ptr + head, mask=head < work.num_heads, other=-float("inf"))  # [64]
            # An empty row keeps the factor 0: -inf - (-inf) would be NaN.
            shifted = gl.where(empty, 0.0, sink - lse)  # [64]
            factor = gl.where(sink == float("inf"), 0.0, factor / (1.0 + gl.exp(shifted)))
        mbarrier.wait(factor_free, item_phase ^ 1)
        factor_smem.store(factor)
        mbarrier.arrive(factor_ready, count=1)
        target = find_row_offset(token, work.num_heads) + head
        gl.store(lse_ptr + target, lse, mask=head < work.num_heads)

"""Softmax role of the Hopper decode of few heads: the query, weights of a block, sums of a row."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlacast.kernels.common.sm90_rotation import find_row_offset
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_end import (
    end_chunk,
    load_position,
    load_row_angles,
    rotate_end,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_layouts import (
    join_groups,
    make_chunk_layout,
    make_group_layout,
    make_partial_layout,
    order_group,
    split_groups,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_softmax import LAZINESS
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import KEY_UNIT, LN_2, find_work_range


@gluon.jit
def _load_query(
    query,
    token,
    num_heads,
    HEADS: gl.constexpr,
    FULL_TILES: gl.constexpr,
    CHUNK16: gl.constexpr,
):
    """Query of a token as four chunks [heads, 128]; heads that are not there are zero.

    ``query`` is its pointer and the strides of tokens and heads. Heads of a token are less than
    2**31 elements apart (``heads:far_apart`` in ``ops.layout``).
    """
    q_ptr, stride_q_token, stride_q_head = query
    CHUNK: gl.constexpr = make_chunk_layout(HEADS)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, CHUNK))  # [heads]
    base = q_ptr + token.to(gl.int64) * stride_q_token
    chunks = ()
    for n in gl.static_range(4):
        d = 128 * n + gl.arange(0, 128, gl.SliceLayout(0, CHUNK))  # [128]
        if CHUNK16:
            within = (d // 16) * (num_heads * 16) + d % 16  # [128]
            pointers = base + ((head * 16)[:, None] + within[None, :])  # [heads, 128]
        else:
            pointers = base + ((head * stride_q_head)[:, None] + d[None, :])  # [heads, 128]
        if FULL_TILES:
            chunks = chunks + (gl.load(pointers),)
        else:
            chunks = chunks + (gl.load(pointers, mask=(head < num_heads)[:, None], other=0.0),)
    return chunks


@gluon.jit
def _order_chunk(x, FORMAT: gl.constexpr, NUMBER: gl.constexpr):
    """Dimensions [heads, 128] of a chunk in the order in which products take them."""
    left, right = split_groups(x)
    left = order_group(left, FORMAT, 2 * NUMBER)
    right = order_group(right, FORMAT, 2 * NUMBER + 1)
    return join_groups(left, gl.convert_layout(right, left.type.layout))


@gluon.jit
def _send_query(
    chunks,
    angles,
    q_smem,
    q_ready,
    eps,
    score_scale,
    QUERY: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """Query to shared memory, rotated, its dimensions ordered as those of keys.

    Produces ``q_ready``.

    Returns:
        what the scores of every head are multiplied by [heads]: ``score_scale``, with the norm.
    """
    for n in gl.static_range(4):
        chunk = chunks[n]
        if QUERY.is_rotated and n == 3:
            cos, sin = angles
            wide = chunk.to(gl.float32)
            chunk = rotate_end(wide, cos, -sin, QUERY.half_pairing).to(gl.bfloat16)
        q_smem.index(n).store(_order_chunk(chunk, FORMAT, n))
    fence_async_shared()
    mbarrier.arrive(q_ready, count=1)
    HEADS: gl.constexpr = chunks[0].shape[0]
    GROUP: gl.constexpr = make_group_layout(HEADS)
    scale = gl.full((HEADS,), 0.0, gl.float32, gl.SliceLayout(1, GROUP)) + score_scale
    if QUERY.has_norm:
        squares = gl.zeros((HEADS, 128), gl.float32, make_chunk_layout(HEADS))
        for n in gl.static_range(4):
            wide = chunks[n].to(gl.float32)
            squares += wide * wide
        # The norm is one factor per head, so it joins the score scale.
        inverse = gl.rsqrt(gl.sum(squares, 1) * (1.0 / 512.0) + eps)  # [heads]
        scale *= gl.convert_layout(inverse, gl.SliceLayout(1, GROUP), assert_trivial=True)
        # NaN in the query comes with the scores; here it would reach masked keys.
        scale = gl.where(scale != scale, 1.0, scale)
    return scale


@gluon.jit
def _fold_scores(s, base, partial_sum, scale):
    """Fold scores [heads, 64] of a block into the softmax state; see ``fold_scores``.

    Returns:
        weights [heads, 64] in bfloat16, the factor [heads] of everything before, the new base
        [heads] (base 2), and the new partial sums [heads, 8], one a thread.
    """
    block_max = gl.max(s, 1) * scale  # [heads]
    new_base = gl.where(block_max > base + LAZINESS, block_max, base)
    # -inf - -inf is NaN: shift by 0 while nothing valid has been seen.
    shift = gl.where(new_base == -float("inf"), 0.0, new_base)  # [heads]
    p = gl.exp2(s * scale[:, None] - shift[:, None])  # [heads, 64]
    # What came before a row's first key is zero and needs no factor.
    alpha = gl.where(base == -float("inf"), 1.0, gl.exp2(base - shift))  # [heads]
    by_thread = gl.sum(gl.reshape(p, (p.shape[0], 8, 8)), 2)  # [heads, 8]
    rescale = gl.convert_layout(
        alpha, gl.SliceLayout(1, partial_sum.type.layout), assert_trivial=True
    )
    by_thread = gl.convert_layout(by_thread, partial_sum.type.layout, assert_trivial=True)
    return p.to(gl.bfloat16), alpha, new_base, partial_sum * rescale[:, None] + by_thread


@gluon.jit
def _finish(
    base,
    partial_sum,
    token,
    num_heads,
    factor_smem,
    factor_ready,
    sink,
    lse_ptr,
    unit,
    END: gl.constexpr,
):
    """The lse of every head, and the outputs' factor; produces ``factor_ready``.

    ``sink`` [heads] is not looked at where there is none. The outputs are ``1 / unit`` of their
    value before that factor.
    """
    total = gl.convert_layout(gl.sum(partial_sum, 1), base.type.layout)  # [heads]
    head = gl.arange(0, base.shape[0], base.type.layout)  # [heads]
    empty = total == 0.0
    divisor = gl.where(empty, 1.0, total)  # [heads]
    lse = gl.where(empty, -float("inf"), (base + gl.log2(divisor)) * LN_2)  # [heads]
    factor = gl.where(empty, 0.0, unit / divisor)  # [heads]
    if END.has_sink:
        # An empty row keeps the factor 0: -inf - (-inf) would be NaN.
        shifted = gl.where(empty, 0.0, sink - lse)  # [heads]
        factor = gl.where(sink == float("inf"), 0.0, factor / (1.0 + gl.exp(shifted)))
    factor_smem.store(factor)
    mbarrier.arrive(factor_ready, count=1)
    gl.store(lse_ptr + find_row_offset(token, num_heads) + head, lse, mask=head < num_heads)


@gluon.jit
def run_softmax_role(
    query,
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
    score_scale_log2,
    v_scale,
    HEADS: gl.constexpr,
    WORK: gl.constexpr,
    QUERY: gl.constexpr,
    POOL: gl.constexpr,
    EXTRA: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Query to the decoding roles, weights of every block to the outputs, lse and end of the row.

    ``query`` is its pointer and strides, ``ends`` as in ``end_chunk``. Consumes ``s_ready``,
    ``p_free`` and, for its chunk, ``o_ready``; produces ``q_ready``, ``s_free``, ``p_ready`` and
    ``factor_ready``.
    """
    gdc_wait()
    gdc_launch_dependents()
    FORMAT: gl.constexpr = POOL.record
    GROUP: gl.constexpr = make_group_layout(HEADS)
    token = gl.program_id(0)
    # What comes from memory is asked for in the order in which it is needed, also the sink.
    position = 0
    if QUERY.is_rotated or END.rotates_back:
        position = load_position(rope, token)
    chunks = _load_query(query, token, num_heads, HEADS, WORK.full_tiles, QUERY.chunk16)
    angles = ()
    if QUERY.is_rotated or END.rotates_back:
        angles = load_row_angles(rope, position, HEADS, END.half_pairing)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, GROUP))  # [heads]
    sink = 0.0
    if END.has_sink:
        sink = gl.load(sink_ptr + head, mask=head < num_heads, other=-float("inf"))  # [heads]
    scale = _send_query(
        chunks, angles, q_smem, q_ready, eps, score_scale_log2 * KEY_UNIT, QUERY, FORMAT
    )
    _, _, num_blocks, _, _ = find_work_range(token, 0, pool, extra_pool, WORK, POOL, EXTRA)
    base = gl.full((HEADS,), -float("inf"), gl.float32, gl.SliceLayout(1, GROUP))
    partial_sum = gl.full((HEADS, 8), 0.0, gl.float32, make_partial_layout(HEADS))
    for block in range(num_blocks):
        at = block & 1
        mbarrier.wait(s_ready, at)
        s = score_smem.index(0).load(GROUP) + score_smem.index(1).load(GROUP)  # [heads, 64]
        mbarrier.arrive(s_free, count=1)
        p, alpha, base, partial_sum = _fold_scores(s, base, partial_sum, scale)
        mbarrier.wait(p_free.index(at), (block >> 1 & 1) ^ 1)
        p_smem.index(at).store(p)
        alpha_smem.index(at).store(alpha)
        fence_async_shared()
        mbarrier.arrive(p_ready.index(at), count=1)
    _finish(
        base,
        partial_sum,
        token,
        num_heads,
        factor_smem,
        factor_ready,
        sink,
        lse_ptr,
        KEY_UNIT * v_scale,
        END,
    )
    end_chunk(ends, token, angles, 3, HEADS, WORK, END, OUTPUT)

"""The query side and the key loop of sparse attention, shared by prefill and decode."""

import triton
import triton.language as tl

from mlacast.kernels.common.numbers import decode_e4m3
from mlacast.kernels.common.records import load_records, load_rope_tail
from mlacast.kernels.common.rotation import load_rotated, partner_column, rotate_back_last_64

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _query_offsets(head, d, stride_q_head, num_heads, CHUNK16: tl.constexpr):
    """Offsets [BLOCK_H, n] of dimensions ``d`` within a token."""
    if CHUNK16:
        offsets = (d // 16)[None, :] * (num_heads * 16) + head[:, None] * 16 + (d % 16)[None, :]
    else:
        offsets = head.to(tl.int64)[:, None] * stride_q_head + d[None, :]
    return offsets


@triton.jit
def _load_plain(ptr, offsets, mask):
    """Load a tile in the dtype of memory; e4m3 codes (bytes) become float16, which holds each."""
    if ptr.dtype.element_ty == tl.uint8:
        x = decode_e4m3(tl.load(ptr + offsets, mask=mask, other=0)).to(tl.float16)
    else:
        x = tl.load(ptr + offsets, mask=mask, other=0.0)
    return x


@triton.jit
def load_query(
    q_ptr,
    stride_q_token,
    stride_q_head,
    token,
    head_start,
    num_heads,
    eps,
    table_ptr,
    stride_table,
    table_row,
    sm_scale,
    BLOCK_H: tl.constexpr,
    D_QK: tl.constexpr,
    CHUNK16: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HALF_PAIRING: tl.constexpr,
):
    """Load, norm and rotate the heads of one token.

    Returns:
        The first 512 dimensions [BLOCK_H, 512] and the last 64 [BLOCK_H, 64] (of a 576-wide query;
        else zeros nobody reads), in the query's dtype (float16 for e4m3 codes, which come without
        norm and rotation), and the base-2 score scale [BLOCK_H].
    """
    head = head_start + tl.arange(0, BLOCK_H)
    d = tl.arange(0, 512)
    mask = (head < num_heads)[:, None] & (d >= 0)[None, :]
    base = q_ptr + token * stride_q_token
    offsets = _query_offsets(head, d, stride_q_head, num_heads, CHUNK16)
    if HAS_ROPE and D_QK == 512:
        partner = partner_column(d, 512, HALF_PAIRING)
        q = load_rotated(
            base,
            offsets,
            _query_offsets(head, partner, stride_q_head, num_heads, CHUNK16),
            mask,
            table_ptr,
            stride_table,
            table_row,
            512,
            HALF_PAIRING,
        )
    else:
        q = _load_plain(base, offsets, mask)
    scale = tl.full((BLOCK_H,), 0.0, tl.float32) + sm_scale * LOG2_E
    if HAS_NORM:
        # The norm is that of the un-rotated query.
        raw = tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)
        scale *= tl.rsqrt(tl.sum(raw * raw, 1) / 512.0 + eps)
    tail = tl.zeros((BLOCK_H, 64), q.dtype)
    if D_QK == 576:
        tail_d = tl.arange(0, 64)
        tail_mask = (head < num_heads)[:, None] & (tail_d >= 0)[None, :]
        tail_rows = head.to(tl.int64)[:, None] * stride_q_head
        tail_offsets = tail_rows + (512 + tail_d)[None, :]
        if HAS_ROPE:
            partner = 512 + partner_column(tail_d, 64, HALF_PAIRING)
            tail = load_rotated(
                base,
                tail_offsets,
                tail_rows + partner[None, :],
                tail_mask,
                table_ptr,
                stride_table,
                table_row,
                64,
                HALF_PAIRING,
            )
        else:
            tail = _load_plain(base, tail_offsets, tail_mask)
    return q, tail, scale


@triton.jit
def attend_block(
    q,
    q_tail,
    score_scale,
    acc,
    running_max,
    running_sum,
    cache_ptr,
    stride_page,
    stride_token,
    page,
    offset,
    page_size,
    valid,
    FORMAT: tl.constexpr,
    INLINE: tl.constexpr,
    D_QK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold the tokens at ``page``, ``offset`` [BLOCK_N] int64 into the softmax state.

    ``acc`` is [BLOCK_H, 512] float32, un-normalised; ``running_max`` (base 2) and ``running_sum``
    [BLOCK_H] belong to it. Tokens that are not ``valid`` are not read.
    """
    k = load_records(
        cache_ptr,
        stride_page,
        stride_token,
        page,
        offset,
        page_size,
        valid,
        FORMAT,
        INLINE,
        BLOCK_N,
    ).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if D_QK == 576:
        k_tail = load_rope_tail(
            cache_ptr, stride_page, stride_token, page, offset, valid, FORMAT
        ).to(q.dtype)
        scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
    scores = tl.where(valid[None, :], scores * score_scale[:, None], -float("inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    # -inf - -inf is NaN: shift by 0 while nothing valid has been seen.
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    alpha = tl.exp2(running_max - shift)
    weights = tl.exp2(scores - shift[:, None])
    running_sum = running_sum * alpha + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), k, acc * alpha[:, None], input_precision="ieee")
    return acc, new_max, running_sum


@triton.jit
def attend_pool(
    q,
    q_tail,
    score_scale,
    acc,
    running_max,
    running_sum,
    cache_ptr,
    stride_page,
    stride_token,
    page_size,
    num_slots,
    indices_ptr,
    length,
    first_block,
    last_block,
    FORMAT: tl.constexpr,
    INLINE: tl.constexpr,
    D_QK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold blocks ``first_block``.. below ``last_block`` of one index row into the softmax state.

    State as in ``attend_block``. ``indices_ptr`` is the first entry of the row; entries at or past
    ``length`` are not read.
    """
    lane = tl.arange(0, BLOCK_N)
    for block in range(first_block, last_block):
        column = block * BLOCK_N + lane
        slot = tl.load(indices_ptr + column, mask=column < length, other=-1)
        valid = (slot >= 0) & (slot < num_slots)
        slot = tl.where(valid, slot, 0).to(tl.int64)
        page = slot // page_size
        acc, running_max, running_sum = attend_block(
            q,
            q_tail,
            score_scale,
            acc,
            running_max,
            running_sum,
            cache_ptr,
            stride_page,
            stride_token,
            page,
            slot - page * page_size,
            page_size,
            valid,
            FORMAT,
            INLINE,
            D_QK,
            BLOCK_N,
        )
    return acc, running_max, running_sum


@triton.jit
def finish_rows(
    acc,
    running_max,
    running_sum,
    sink_ptr,
    head_start,
    num_heads,
    table_ptr,
    stride_table,
    table_row,
    first,
    BLOCK_H: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SINK: tl.constexpr,
    ROTATE_BACK: tl.constexpr,
    HALF_PAIRING: tl.constexpr,
):
    """Normalise, apply the sink, rotate back dimensions ``first``.. [BLOCK_H, WIDTH] of 512.

    Returns:
        out [BLOCK_H, WIDTH] (zeros for a row without keys), lse and the largest logit [BLOCK_H],
        natural units, -inf for a row without keys.
    """
    empty = running_sum == 0.0
    divisor = tl.where(empty, 1.0, running_sum)
    max_logits = running_max * LN_2
    lse = tl.where(empty, -float("inf"), (running_max + tl.log2(divisor)) * LN_2)
    factor = tl.where(empty, 0.0, 1.0 / divisor)
    if HAS_SINK:
        head = head_start + tl.arange(0, BLOCK_H)
        sink = tl.load(sink_ptr + head, mask=head < num_heads, other=-float("inf"))
        # An empty row keeps the factor 0: sink - (-inf) would be +inf, -inf - (-inf) NaN.
        shifted = tl.where(empty, 0.0, sink - lse)
        factor = tl.where(sink == float("inf"), 0.0, factor / (1.0 + tl.exp(shifted)))
    # where, not a product with 0: an all-masked accumulator may hold NaN from an infinite value.
    out = tl.where((factor == 0.0)[:, None], 0.0, acc * factor[:, None])
    if ROTATE_BACK:  # noqa: SIM102 - decided while compiling, the other while running
        if first + WIDTH == 512:
            rotated = rotate_back_last_64(
                out, table_ptr, stride_table, table_row, BLOCK_H, WIDTH, HALF_PAIRING
            )
            out = tl.where(empty[:, None], 0.0, rotated)
    return out, lse, max_logits

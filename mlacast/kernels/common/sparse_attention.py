"""The query side and the key loop of sparse attention, shared by prefill and decode.

Compile-time arguments are values of ``config.attention``.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mlacast.kernels.common.numbers import decode_e4m3
from mlacast.kernels.common.records import load_records, load_rope_tail
from mlacast.kernels.common.rotation import find_partner_column, load_rotated, rotate_back_last_64

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class IndexList(NamedTuple):
    """Index rows of all tokens: slots, and how many of a row count."""

    indices_ptr: Any
    stride_indices: Any
    width: Any
    length_ptr: Any
    stride_length: Any


class Angles(NamedTuple):
    """A table of cosines and sines, and the row of a token."""

    table_ptr: Any
    stride_table: Any
    row: Any


class Query(NamedTuple):
    """What `load_query` gives."""

    main: Any
    tail: Any
    score_scale: Any


@triton.jit
def load_row_length(entries, token, HAS_LENGTH: tl.constexpr):
    """Entries of a token's index row that count, clamped to its width."""
    length = entries.width
    if HAS_LENGTH:
        length = tl.load(entries.length_ptr + token * entries.stride_length)
        length = tl.minimum(tl.maximum(length, 0), entries.width)
    return length


@triton.jit
def find_angles(
    table_ptr, stride_table, table_rows, positions_ptr, stride_positions, token, HAS: tl.constexpr
):
    """The angles of a token, whose position is clamped to the table; without HAS nobody's."""
    row = token * 0
    if HAS:
        position = tl.load(positions_ptr + token * stride_positions).to(tl.int64)
        row = tl.minimum(tl.maximum(position, 0), table_rows - 1)
    return Angles(table_ptr, stride_table, row)


@triton.jit
def load_scales(sm_scale, v_scale, sm_scale_ptr, v_scale_ptr, SCALES: tl.constexpr):
    """Scales of scores and values, each the number or what the pointer points at."""
    if SCALES.sm_on_device:
        sm_scale = tl.load(sm_scale_ptr)
    if SCALES.v_on_device:
        v_scale = tl.load(v_scale_ptr)
    return sm_scale, v_scale


@triton.jit
def _find_query_offsets(head, d, stride_q_head, num_heads, CHUNK16: tl.constexpr):
    """Offsets [BLOCK_H, n] of dimensions ``d`` [n] of heads [BLOCK_H] within a token.

    A token in CHUNK16 order is contiguous, 512 elements a head: 32 bits are enough.
    """
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
        x = tl.load(ptr + offsets, mask=mask, other=0.0)  # [BLOCK_H, n]
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
    angles,
    sm_scale,
    BLOCK_H: tl.constexpr,
    QUERY: tl.constexpr,
):
    """Load, norm and rotate the heads of one token.

    Returns:
        A `Query`: the first 512 dimensions [BLOCK_H, 512] and the last 64 [BLOCK_H, 64] (of a
        576-wide query; else zeros nobody reads), in the query's dtype (float16 for e4m3 codes,
        which come without norm and rotation), and the base-2 score scale [BLOCK_H].
    """
    head = head_start + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    d = tl.arange(0, 512)  # [512]
    mask = (head < num_heads)[:, None] & (d >= 0)[None, :]  # [BLOCK_H, 512]
    base = q_ptr + token * stride_q_token
    offsets = _find_query_offsets(
        head, d, stride_q_head, num_heads, QUERY.chunk16
    )  # [BLOCK_H, 512]
    if QUERY.is_rotated and QUERY.d_qk == 512:
        partner = find_partner_column(d, 512, QUERY.half_pairing)  # [512]
        # [BLOCK_H, 512]
        partners = _find_query_offsets(head, partner, stride_q_head, num_heads, QUERY.chunk16)
        q = load_rotated(base, offsets, partners, mask, angles, 512, QUERY.half_pairing)
    else:
        q = _load_plain(base, offsets, mask)
    scale = tl.full((BLOCK_H,), 0.0, tl.float32) + sm_scale * LOG2_E  # [BLOCK_H]
    if QUERY.has_norm:
        # The norm is that of the un-rotated query.
        raw = tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_H, 512]
        scale *= tl.rsqrt(tl.sum(raw * raw, 1) / 512.0 + eps)
    tail = tl.zeros((BLOCK_H, 64), q.dtype)  # [BLOCK_H, 64]
    if QUERY.d_qk == 576:
        tail_d = tl.arange(0, 64)  # [64]
        tail_mask = (head < num_heads)[:, None] & (tail_d >= 0)[None, :]
        tail_rows = head.to(tl.int64)[:, None] * stride_q_head  # [BLOCK_H, 1]
        tail_offsets = tail_rows + (512 + tail_d)[None, :]  # [BLOCK_H, 64]
        if QUERY.is_rotated:
            partners = (
                tail_rows + (512 + find_partner_column(tail_d, 64, QUERY.half_pairing))[None, :]
            )  # [BLOCK_H, 64]
            tail = load_rotated(
                base, tail_offsets, partners, tail_mask, angles, 64, QUERY.half_pairing
            )
        else:
            tail = _load_plain(base, tail_offsets, tail_mask)
    return Query(q, tail, scale)


@triton.jit
def attend_block(
    query,
    acc,
    running_max,
    running_sum,
    cache,
    page,
    offset,
    valid,
    QUERY: tl.constexpr,
    POOL: tl.constexpr,
):
    """Fold the tokens at ``page``, ``offset`` [BLOCK_N] int64 into the softmax state.

    ``query`` is a `Query`, ``cache`` a `Cache`. ``acc`` is [BLOCK_H, 512] float32, un-normalised;
    ``running_max`` (base 2) and ``running_sum`` [BLOCK_H] belong to it. Tokens that are not
    ``valid`` are not read.
    """
    q = query.main
    k = load_records(cache, page, offset, valid, POOL).to(q.dtype)  # [BLOCK_N, 512]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_H, BLOCK_N]
    if QUERY.d_qk == 576:
        k_tail = load_rope_tail(cache, page, offset, valid, POOL).to(q.dtype)  # [BLOCK_N, 64]
        scores = tl.dot(query.tail, tl.trans(k_tail), scores, input_precision="ieee")
    scores = tl.where(valid[None, :], scores * query.score_scale[:, None], -float("inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 1))  # [BLOCK_H]
    # -inf - -inf is NaN: shift by 0 while nothing valid has been seen.
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # [BLOCK_H]
    alpha = tl.exp2(running_max - shift)  # [BLOCK_H]
    weights = tl.exp2(scores - shift[:, None])  # [BLOCK_H, BLOCK_N]
    running_sum = running_sum * alpha + tl.sum(weights, 1)
    if q.dtype == tl.float16:
        # Steps of float16 end at 2**-24: of weights up to 1, those below 2**-25 would vanish.
        weights = (weights * 32768.0).to(tl.float16)
        acc = acc * alpha[:, None] + tl.dot(weights, k, input_precision="ieee") * (1.0 / 32768.0)
    else:
        acc = tl.dot(weights.to(q.dtype), k, acc * alpha[:, None], input_precision="ieee")
    return acc, new_max, running_sum


@triton.jit
def attend_pool(
    query,
    acc,
    running_max,
    running_sum,
    cache,
    num_slots,
    indices_ptr,
    length,
    first_block,
    last_block,
    BLOCK_N: tl.constexpr,
    QUERY: tl.constexpr,
    POOL: tl.constexpr,
):
    """Fold blocks ``first_block``.. below ``last_block`` of one index row into the softmax state.

    State as in ``attend_block``. ``indices_ptr`` is the first entry of the row; entries at or past
    ``length`` are not read.
    """
    lane = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    for block in range(first_block, last_block):
        column = block * BLOCK_N + lane  # [BLOCK_N]
        slot = tl.load(indices_ptr + column, mask=column < length, other=-1)  # [BLOCK_N]
        valid = (slot >= 0) & (slot < num_slots)  # [BLOCK_N]
        slot = tl.where(valid, slot, 0).to(tl.int64)
        page = slot // cache.page_size  # [BLOCK_N], int64
        offset = slot - page * cache.page_size  # [BLOCK_N], int64
        acc, running_max, running_sum = attend_block(
            query, acc, running_max, running_sum, cache, page, offset, valid, QUERY, POOL
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
    angles,
    first,
    END: tl.constexpr,
):
    """Normalise, apply the sink, rotate back dimensions ``first``.. [BLOCK_H, WIDTH] of 512.

    Returns:
        out [BLOCK_H, WIDTH] (zeros for a row without keys), lse and the largest logit [BLOCK_H],
        natural units, -inf for a row without keys.
    """
    empty = running_sum == 0.0  # [BLOCK_H]
    divisor = tl.where(empty, 1.0, running_sum)  # [BLOCK_H]
    max_logits = running_max * LN_2  # [BLOCK_H]
    lse = tl.where(empty, -float("inf"), (running_max + tl.log2(divisor)) * LN_2)  # [BLOCK_H]
    factor = tl.where(empty, 0.0, 1.0 / divisor)  # [BLOCK_H]
    if END.has_sink:
        head = head_start + tl.arange(0, acc.shape[0])  # [BLOCK_H]
        sink = tl.load(sink_ptr + head, mask=head < num_heads, other=-float("inf"))  # [BLOCK_H]
        # An empty row keeps the factor 0: sink - (-inf) would be +inf, -inf - (-inf) NaN.
        shifted = tl.where(empty, 0.0, sink - lse)  # [BLOCK_H]
        factor = tl.where(sink == float("inf"), 0.0, factor / (1.0 + tl.exp(shifted)))
    # where, not a product with 0: an all-masked accumulator may hold NaN from an infinite value.
    out = tl.where((factor == 0.0)[:, None], 0.0, acc * factor[:, None])  # [BLOCK_H, WIDTH]
    if END.rotates_back:  # noqa: SIM102 - decided while compiling, the other while running
        if first + acc.shape[1] == 512:
            rotated = rotate_back_last_64(out, angles, END.half_pairing)
            out = tl.where(empty[:, None], 0.0, rotated)
    return out, lse, max_logits

"""Portable ``dense_mla_prefill``: attention of packed sequences and the output cast, one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.kernels.common.fp8_casts import has_fp8_casts
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.store import Padding, Target, packs_products, store_rows
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.dense_prefill import prefill_plan
from mlacast.kernels.config.shared_memory import shared_memory_of

LN_2 = tl.constexpr(0.6931471805599453)
# Sequences whose bounds are read at a time.
_SEQUENCES = tl.constexpr(128)

# Counts and strides that vary while serving must not pick another variant of the kernel.
_VARYING = [
    "num_keys",
    "num_sequences",
    "num_tokens",
    "tiles",
    "heads_at_a_time",
    "row_start",
    "padding_rows",
    "stride_sf_token",
    "stride_sf_group",
    "stride_sf_word",
]
# Nor must where a slice of a bigger buffer happens to start.
_UNALIGNED = ["cu_q_ptr", "cu_k_ptr", "lse_ptr", "sf_ptr", "scale_ptr"]


@triton.jit
def _load_bound(ptr, at, last, limit):
    """Bounds ``at`` [n] of the packed sequences: 0 before the first, ``limit`` behind ``last``."""
    value = tl.load(ptr + at, mask=(at >= 0) & (at <= last), other=0)  # [n]
    value = tl.minimum(tl.maximum(value, 0), limit)
    return tl.where(at > last, limit, value)


@triton.jit
def _find_tile(cu_ptr, num_sequences, num_tokens, tile, BLOCK_M: tl.constexpr):
    """Find tile number ``tile`` among the tiles of all sequences.

    The tokens before the first sequence and those behind the last are sequences without keys,
    numbered -1 and ``num_sequences``.

    Returns:
        Sequence (-2 if there is no such tile), its first token and its end, the tile's number in
        it, counted from its end: the last tile of a causal mask has the most keys.
    """
    sequence, start, stop, number, before = -2, 0, 0, 0, 0
    for first in range(-1, num_sequences + 1, _SEQUENCES):
        at = first + tl.arange(0, _SEQUENCES)  # [_SEQUENCES]
        # [_SEQUENCES] all three.
        starts = _load_bound(cu_ptr, at, num_sequences, num_tokens)
        stops = _load_bound(cu_ptr, at + 1, num_sequences, num_tokens)
        count = tl.where(
            at <= num_sequences, (tl.maximum(stops - starts, 0) + BLOCK_M - 1) // BLOCK_M, 0
        )
        ends = before + tl.cumsum(count, 0)  # [_SEQUENCES]
        is_here = (ends > tile) & (ends - count <= tile)  # [_SEQUENCES]
        sequence = tl.maximum(sequence, tl.max(tl.where(is_here, at, -2), 0))
        start += tl.sum(tl.where(is_here, starts, 0), 0)
        stop += tl.sum(tl.where(is_here, stops, 0), 0)
        number += tl.sum(tl.where(is_here, ends - 1 - tile, 0), 0)
        before += tl.sum(count, 0)
    return sequence, start, stop, number


class Query(NamedTuple):
    """Rows of a tile: the first 128 dimensions [BLOCK_M, 128] and the last 64 [BLOCK_M, 64]."""

    main: Any
    tail: Any


class Keys(NamedTuple):
    """Keys and values of a sequence, and which of them rows see.

    Attributes:
        k: Pointer to the first dimension of key 0.
        v: To that of its value.
        stride_k_token: Between keys.
        stride_v_token: Between values.
        count: How many there are.
        last: The last one that each row sees, [BLOCK_M].
    """

    k: Any
    v: Any
    stride_k_token: Any
    stride_v_token: Any
    count: Any
    last: Any


@triton.jit
def _find_keys(cu_ptr, sequence, num_sequences, num_keys):
    """First key of a sequence and how many it has; the tokens around all sequences have none."""
    start = 0
    count = 0
    if (sequence >= 0) & (sequence < num_sequences):
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), num_keys)
        stop = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence + 1), 0), num_keys)
        count = tl.maximum(stop - start, 0)
    return start, count


@triton.jit
def _find_visible(row, first_row, length, keys, TILES: tl.constexpr, CAUSAL: tl.constexpr):
    """Which of ``keys`` keys a tile sees: the last of each ``row`` [BLOCK_M], ends of the blocks.

    Returns:
        The last keys, the end of those that every row sees, in whole blocks, and of those that any
        row sees.
    """
    last = row + (keys - length)
    end, whole = keys, keys
    if CAUSAL:
        end = tl.minimum(keys, tl.maximum(first_row + TILES.block_m + keys - length, 0))
        whole = tl.minimum(keys, tl.maximum(first_row + 1 + keys - length, 0))
    else:
        last = row * 0 + keys
    return last, whole // TILES.block_n * TILES.block_n, end


@triton.jit
def _load_query(q_ptr, stride_token, stride_head, token, head, in_range, sign):
    """The `Query` of ``token`` [BLOCK_M], times ``sign``; zeros where not ``in_range``."""
    d = tl.arange(0, 128)  # [128]
    tail = 128 + tl.arange(0, 64)  # [64]
    rows = q_ptr + (token * stride_token + head.to(tl.int64) * stride_head)[:, None]  # [BLOCK_M, 1]
    q = tl.load(rows + d[None, :], mask=in_range[:, None], other=0.0)  # [BLOCK_M, 128]
    q = (q.to(tl.float32) * sign).to(q.dtype)
    q_tail = tl.load(rows + tail[None, :], mask=in_range[:, None], other=0.0)  # [BLOCK_M, 64]
    q_tail = (q_tail.to(tl.float32) * sign).to(q_tail.dtype)
    return Query(q, q_tail)


@triton.jit
def _attend(
    query,
    state,
    keys_of_rows,
    first_key,
    stop_key,
    score_scale,
    IS_MASKED: tl.constexpr,
    TILES: tl.constexpr,
):
    """Fold keys ``first_key``.. below ``stop_key`` of a sequence into the softmax state.

    ``query`` is a `Query`, ``keys_of_rows`` a `Keys`. The state is the un-normalised output
    [BLOCK_M, 128], maxima (base 2) and sums [BLOCK_M]. With IS_MASKED row i sees the keys up to
    ``last[i]`` below their count; without, every row sees all of whole blocks.
    """
    BLOCK_M: tl.constexpr = TILES.block_m
    BLOCK_N: tl.constexpr = TILES.block_n
    acc, running_max, running_sum = state
    k, v, stride_k_token, stride_v_token, num_keys, last_key = keys_of_rows
    lane = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    d = tl.arange(0, 128)  # [128]
    tail = 128 + tl.arange(0, 64)  # [64]
    k_rows = k + (first_key + lane).to(tl.int64)[:, None] * stride_k_token  # [BLOCK_N, 1]
    v_rows = v + (first_key + lane).to(tl.int64)[:, None] * stride_v_token  # [BLOCK_N, 1]
    k_step = stride_k_token.to(tl.int64) * BLOCK_N
    v_step = stride_v_token.to(tl.int64) * BLOCK_N
    scale = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32) + score_scale
    for first in tl.range(first_key, stop_key, BLOCK_N):
        if IS_MASKED:
            exists = (first + lane < num_keys)[:, None]  # [BLOCK_N, 1]
            keys = tl.load(k_rows + d[None, :], mask=exists, other=0.0)  # [BLOCK_N, 128]
            key_tails = tl.load(k_rows + tail[None, :], mask=exists, other=0.0)  # [BLOCK_N, 64]
            values = tl.load(v_rows + d[None, :], mask=exists, other=0.0)  # [BLOCK_N, 128]
        else:
            keys = tl.load(k_rows + d[None, :])  # [BLOCK_N, 128]
            key_tails = tl.load(k_rows + tail[None, :])  # [BLOCK_N, 64]
            values = tl.load(v_rows + d[None, :])  # [BLOCK_N, 128]
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(query.main, tl.trans(keys), input_precision="ieee")
        scores = tl.dot(query.tail, tl.trans(key_tails), scores, input_precision="ieee")
        if IS_MASKED:
            key = first + lane[None, :]  # [1, BLOCK_N]
            scores = tl.where((key <= last_key[:, None]) & (key < num_keys), scores, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1) * score_scale)  # [BLOCK_M]
        # -inf - -inf is NaN: shift by 0 while no key has been seen.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # [BLOCK_M]
        alpha = tl.exp2(running_max - shift)  # [BLOCK_M]
        negated = tl.broadcast_to(-shift[:, None], (BLOCK_M, BLOCK_N))
        weights = tl.exp2(tl.fma(scores, scale, negated))  # [BLOCK_M, BLOCK_N]
        running_sum = running_sum * alpha + tl.sum(weights, 1)
        running_max = new_max
        weights = weights.to(values.dtype)
        acc = tl.dot(weights, values, acc * alpha[:, None], input_precision="ieee")
        k_rows += k_step
        v_rows += v_step
    return acc, running_max, running_sum


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _dense_mla_prefill_kernel(
    q_ptr,
    stride_q_token,
    stride_q_head,
    k_ptr,
    stride_k_token,
    stride_k_head,
    v_ptr,
    stride_v_token,
    stride_v_head,
    cu_q_ptr,
    cu_k_ptr,
    num_keys,
    num_sequences,
    lse_ptr,
    data_ptr,
    sf_ptr,
    scale_ptr,
    stride_data_token,
    stride_data_group,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    row_start,
    padding_rows,
    num_tokens,
    tiles,
    num_heads,
    heads_per_key_head,
    heads_at_a_time,
    query_sign,
    score_scale,
    CAUSAL: tl.constexpr,
    TILES: tl.constexpr,
    NATIVE: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    """BLOCK_M tokens of one head of one sequence.

    Grid: (tiles * h,), where ``tiles`` is the most that a head can need; programs past those it
    does need end at once. ``heads_at_a_time`` heads take turns, tile after tile, those with the
    most keys of a sequence first. ``score_scale``, for base 2, is positive: the sign of the scale,
    0 included, is multiplied into the query.
    """
    BLOCK_M: tl.constexpr = TILES.block_m
    per_round = tiles * heads_at_a_time
    first_head = (tl.program_id(0) // per_round) * heads_at_a_time
    round_heads = tl.minimum(heads_at_a_time, num_heads - first_head)
    within = tl.program_id(0) % per_round
    head = first_head + within % round_heads
    sequence, start, stop, number = _find_tile(
        cu_q_ptr, num_sequences, num_tokens, within // round_heads, BLOCK_M
    )
    if sequence == -2:
        return
    length = stop - start
    first_row = number * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    in_range = row < length  # [BLOCK_M]
    token = (start + row).to(tl.int64)  # [BLOCK_M]
    key_start, keys = _find_keys(cu_k_ptr, sequence, num_sequences, num_keys)
    last_key, whole, end = _find_visible(row, first_row, length, keys, TILES, CAUSAL)
    query = _load_query(q_ptr, stride_q_token, stride_q_head, token, head, in_range, query_sign)
    key_head = (head // heads_per_key_head).to(tl.int64)
    k = k_ptr + (key_start.to(tl.int64) * stride_k_token + key_head * stride_k_head)
    v = v_ptr + (key_start.to(tl.int64) * stride_v_token + key_head * stride_v_head)
    keys_of_rows = Keys(k, v, stride_k_token, stride_v_token, keys, last_key)
    acc = tl.zeros((BLOCK_M, 128), tl.float32)  # [BLOCK_M, 128]
    running_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    state = (acc, running_max, tl.zeros((BLOCK_M,), tl.float32))
    state = _attend(query, state, keys_of_rows, 0, whole, score_scale, False, TILES)
    state = _attend(query, state, keys_of_rows, whole, end, score_scale, True, TILES)
    acc, running_max, running_sum = state
    is_empty = running_sum == 0.0  # [BLOCK_M]
    divisor = tl.where(is_empty, 1.0, running_sum)  # [BLOCK_M]
    lse = tl.where(is_empty, -float("inf"), (running_max + tl.log2(divisor)) * LN_2)  # [BLOCK_M]
    tl.store(lse_ptr + head.to(tl.int64) * num_tokens + token, lse, mask=in_range)
    # where, not a product with 0: hidden values that are infinite leave NaN in an empty row.
    out = tl.where(is_empty[:, None], 0.0, acc * (1.0 / divisor)[:, None])  # [BLOCK_M, 128]
    holds_last = tl.minimum(start + first_row + BLOCK_M, stop) == num_tokens
    lane = tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
    token = token[:, None]  # [BLOCK_M, 1]
    target = Target(
        data_ptr,
        sf_ptr,
        scale_ptr,
        stride_data_token,
        stride_data_group,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        row_start,
    )
    end = num_tokens.to(tl.int64)
    padding = Padding(end, tl.where(holds_last, padding_rows, 0), lane, lane >= 0)
    store_rows(
        out,
        head,
        token,
        in_range[:, None],
        0,
        target,
        padding,
        128,
        OUTPUT,
        0,
        BLOCK_M,
        NATIVE and packs_products(OUTPUT),
    )


def launch_dense_mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out: QuantizedTensor,
    lse: torch.Tensor,
) -> Launches:
    """Fill ``out`` and ``lse``; arguments as in ``mlacast.dense_mla_prefill``."""
    num_tokens, num_heads, _ = q.shape
    num_sequences = cu_seqlens_q.shape[0] - 1
    target = store_target(out)
    plan = prefill_plan(
        num_tokens,
        num_sequences,
        num_heads,
        k.shape[1],
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        shared_memory_of(q.device),
    )
    launches = Launches(q.device, target)
    launches.launch(
        _dense_mla_prefill_kernel,
        (plan.num_programs,),
        q,
        q.stride(0),
        q.stride(1),
        k,
        k.stride(0),
        k.stride(1),
        v,
        v.stride(0),
        v.stride(1),
        cu_seqlens_q,
        cu_seqlens_k,
        k.shape[0],
        num_sequences,
        lse,
        *target.tensors.values(),
        *target.numbers.values(),
        num_tokens,
        plan.tiles,
        num_heads,
        plan.heads_per_key_head,
        plan.heads_at_a_time,
        plan.query_sign,
        plan.score_scale,
        CAUSAL=causal,
        TILES=plan.config,
        NATIVE=has_fp8_casts(q.device),
        OUTPUT=target.config,
        num_warps=plan.config.num_warps,
        num_stages=plan.config.num_stages,
        enable_fp_fusion=False,
    )
    return launches

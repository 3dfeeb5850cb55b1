"""Portable ``rope_quantize_fp8``: queries, keys and values in one launch, paged or not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mlacast.kernels.common.dependents import after_previous_kernel, overlaps_launches
from mlacast.kernels.common.fp8_casts import as_bits, as_float32, has_fp8_casts, to_fp8
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.config.caches import (
    RopeConfig,
    codes_config,
    heads_config,
    pairs_config,
    rope_quantize_config,
)

# Counts that vary while serving must not pick another variant of the kernel, nor must where a slice
# of a list of numbers happens to start. Strides of rows and numbers of heads are those of a model
# and may: 16 bytes a thread need to know that strides are multiples of 16, and rows are divided by
# heads.
_VARYING = [
    "stride_positions",
    "table_rows",
    "num_requests",
    "num_entries",
    "num_pages",
    "num_tokens",
    "q_blocks",
    "k_blocks",
]
_UNALIGNED = ["positions_ptr", "entries_ptr", "starts_ptr", "requests_ptr", "places_ptr"]


class Rows(NamedTuple):
    """One row for each token and head, of queries, keys or values.

    Attributes:
        ptr: The first element.
        stride_token: Between tokens.
        stride_head: Between heads of a token.
    """

    ptr: Any
    stride_token: Any
    stride_head: Any


class Places(NamedTuple):
    """Where codes of keys or values go; without pages, tokens stand as in the input.

    Attributes:
        ptr: The first code.
        stride_page: Between pages.
        stride_token: Between tokens of a page, or of the output.
        stride_head: Between heads of a token.
    """

    ptr: Any
    stride_page: Any
    stride_token: Any
    stride_head: Any


class Angles(NamedTuple):
    """Cosines and sines, and which row of them each token takes.

    Attributes:
        table_ptr: The table, cosines before sines.
        stride_table: Between its rows.
        table_rows: How many it has; positions outside take the first or the last.
        positions_ptr: A position for each token.
        stride_positions: Between positions.
    """

    table_ptr: Any
    stride_table: Any
    table_rows: Any
    positions_ptr: Any
    stride_positions: Any


class PageTable(NamedTuple):
    """Pages of requests, and the request and place of each token.

    Attributes:
        entries_ptr: Pages of all requests, one after the other.
        starts_ptr: Where those of each request start.
        requests_ptr: Request of each token.
        places_ptr: Place of each token in its request.
        page_size: Tokens of a page.
        num_requests: Requests that there are.
        num_entries: Entries that there are.
        num_pages: Pages that there are.
    """

    entries_ptr: Any
    starts_ptr: Any
    requests_ptr: Any
    places_ptr: Any
    page_size: Any
    num_requests: Any
    num_entries: Any
    num_pages: Any


@triton.jit
def _split_row(block, HEADS: tl.constexpr, num_tokens, ROWS: tl.constexpr):
    """Rows ``block * ROWS``.. of [num_tokens, HEADS]: token, head, exists. Divides no int64.

    Products with a stride multiply int64 of these: one multiplication of 32 bits by 32.
    """
    within = (block % HEADS) * ROWS + tl.arange(0, ROWS)
    token = (block // HEADS) * ROWS + within // HEADS
    exists = token < num_tokens
    return token.to(tl.int64), (within % HEADS).to(tl.int64), exists


@triton.jit
def _find_places(token, exists, table):
    """Where each token goes, (page, offset, is_inside); nothing outside the tables is read."""
    request = tl.load(table.requests_ptr + token, mask=exists, other=-1).to(tl.int64)
    known = exists & (request >= 0) & (request < table.num_requests)
    place = tl.load(table.places_ptr + token, mask=known, other=-1).to(tl.int64)
    start = tl.load(table.starts_ptr + request, mask=known, other=0).to(tl.int64)
    inside = known & (place >= 0) & (start >= 0)
    place = tl.where(inside, place, 0)
    entry = start + place // table.page_size
    inside = inside & (entry < table.num_entries)
    page = tl.load(table.entries_ptr + entry, mask=inside, other=-1).to(tl.int64)
    return page, place % table.page_size, inside & (page >= 0) & (page < table.num_pages)


@triton.jit
def _load_rows(x_ptr, row, exists, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """N columns of each row, [ROWS, BLOCK_N], as float32."""
    column = tl.arange(0, BLOCK_N)
    mask = exists[:, None] & (column < N)[None, :]
    return as_float32(tl.load(x_ptr + row[:, None] + column[None, :], mask=mask))


@triton.jit
def _store_rows(x, out_ptr, row, exists, scale, SIDE: tl.constexpr, CODES: tl.constexpr):
    """Scale, cast and store the columns of each row that are not rotated, ``x`` [ROWS, block]."""
    column = tl.arange(0, SIDE.block)
    mask = exists[:, None] & (column < SIDE.columns)[None, :]
    codes = to_fp8(x * scale, CODES.is_e5m2, CODES.native)
    tl.store(out_ptr + row[:, None] + column[None, :], codes, mask=mask)


@triton.jit
def _load_pairs(x_ptr, row, exists, PAIRS: tl.constexpr):
    """The two of each pair of columns, float32 [ROWS, block] each."""
    ROWS: tl.constexpr = row.shape[0]
    R: tl.constexpr = PAIRS.columns
    pair = tl.arange(0, PAIRS.block)
    if PAIRS.half_pairing:
        mask = exists[:, None] & (pair < R // 2)[None, :]
        source = x_ptr + row[:, None] + pair[None, :]
        first = as_float32(tl.load(source, mask=mask))
        second = as_float32(tl.load(source + R // 2, mask=mask))
    else:
        x = _load_rows(x_ptr, row, exists, R, 2 * PAIRS.block)
        first, second = tl.split(tl.reshape(x, (ROWS, PAIRS.block, 2)))
    return first, second


@triton.jit
def _load_angles(table_ptr, row, exists, PAIRS: tl.constexpr):
    """Cosines and sines of rows of the table, float32 [ROWS, block] each."""
    R: tl.constexpr = PAIRS.columns
    pair = tl.arange(0, PAIRS.block)
    mask = exists[:, None] & (pair < R // 2)[None, :]
    angle = table_ptr + row[:, None] + pair[None, :]
    return as_float32(tl.load(angle, mask=mask)), as_float32(tl.load(angle + R // 2, mask=mask))


@triton.jit
def _store_rotated(
    first,
    second,
    cos,
    sin,
    out_ptr,
    row,
    exists,
    scale,
    PAIRS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Rotate, scale and cast the columns of each row that are pairs, [ROWS, block] each."""
    ROWS: tl.constexpr = first.shape[0]
    BLOCK_PAIRS: tl.constexpr = first.shape[1]
    R: tl.constexpr = PAIRS.columns
    first_code = to_fp8((first * cos - second * sin) * scale, CODES.is_e5m2, CODES.native)
    second_code = to_fp8((second * cos + first * sin) * scale, CODES.is_e5m2, CODES.native)
    if PAIRS.half_pairing:
        pair = tl.arange(0, BLOCK_PAIRS)
        mask = exists[:, None] & (pair < R // 2)[None, :]
        target = out_ptr + row[:, None] + pair[None, :]
        tl.store(target, first_code, mask=mask)
        tl.store(target + R // 2, second_code, mask=mask)
    else:
        column = tl.arange(0, 2 * BLOCK_PAIRS)
        codes = tl.reshape(tl.join(first_code, second_code), (ROWS, 2 * BLOCK_PAIRS))
        target = out_ptr + row[:, None] + column[None, :]
        tl.store(target, codes, mask=exists[:, None] & (column < R)[None, :])


@triton.jit
def _quantize_queries(
    block,
    rope,
    nope,
    rope_out,
    nope_out,
    angles,
    requests_ptr,
    num_tokens,
    scale,
    PAIRS: tl.constexpr,
    QUERY: tl.constexpr,
    CODES: tl.constexpr,
    PROGRAM: tl.constexpr,
    PAGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise the rows of a block of the queries, all of them `Rows`; ``angles`` is `Angles`."""
    token, head, exists = _split_row(block, QUERY.heads, num_tokens, PROGRAM.rows)
    plain_row = token * nope.stride_token + head * nope.stride_head
    row = token * rope.stride_token + head * rope.stride_head
    after_previous_kernel(PDL)
    if PAGED:
        exists = exists & (tl.load(requests_ptr + token, mask=exists, other=-1) >= 0)
    position = tl.load(angles.positions_ptr + token * angles.stride_positions, mask=exists, other=0)
    if QUERY.columns > 0:
        plain = _load_rows(nope.ptr, plain_row, exists, QUERY.columns, QUERY.block)
    first, second = _load_pairs(rope.ptr, row, exists, PAIRS)
    # Where the angles are depends on a load, the position. The columns leave before they come; when
    # pinned the compiler does not ask for columns behind them.
    if PROGRAM.pinned:
        tl.debug_barrier()
    at = tl.minimum(tl.maximum(position.to(tl.int64), 0), angles.table_rows - 1)
    cos, sin = _load_angles(angles.table_ptr, at * angles.stride_table, exists, PAIRS)
    if QUERY.columns > 0:
        row = token * nope_out.stride_token + head * nope_out.stride_head
        _store_rows(plain, nope_out.ptr, row, exists, scale, QUERY, CODES)
    row = token * rope_out.stride_token + head * rope_out.stride_head
    _store_rotated(first, second, cos, sin, rope_out.ptr, row, exists, scale, PAIRS, CODES)


@triton.jit
def _quantize_keys(
    token,
    head,
    page,
    place,
    exists,
    rope,
    nope,
    rope_out,
    nope_out,
    angles,
    scale,
    PAIRS: tl.constexpr,
    KEY: tl.constexpr,
    CODES: tl.constexpr,
    PROGRAM: tl.constexpr,
):
    """Quantise rows of the keys, `Rows`, to the `Places` of ``page`` and ``place`` [ROWS]."""
    position = tl.load(angles.positions_ptr + token * angles.stride_positions, mask=exists, other=0)
    if KEY.columns > 0:
        plain_row = token * nope.stride_token + head * nope.stride_head
        plain = _load_rows(nope.ptr, plain_row, exists, KEY.columns, KEY.block)
    rope_row = token * rope.stride_token + head * rope.stride_head
    first, second = _load_pairs(rope.ptr, rope_row, exists, PAIRS)
    # As for queries.
    if PROGRAM.pinned:
        tl.debug_barrier()
    at = tl.minimum(tl.maximum(position.to(tl.int64), 0), angles.table_rows - 1)
    cos, sin = _load_angles(angles.table_ptr, at * angles.stride_table, exists, PAIRS)
    if KEY.columns > 0:
        out_row = page * nope_out.stride_page + place * nope_out.stride_token
        out_row += head * nope_out.stride_head
        _store_rows(plain, nope_out.ptr, out_row, exists, scale, KEY, CODES)
    out_row = page * rope_out.stride_page + place * rope_out.stride_token
    out_row += head * rope_out.stride_head
    _store_rotated(first, second, cos, sin, rope_out.ptr, out_row, exists, scale, PAIRS, CODES)


@triton.jit
def _quantize_values(
    token,
    head,
    page,
    place,
    exists,
    v,
    v_out,
    scale,
    VALUE: tl.constexpr,
    CODES: tl.constexpr,
):
    """Quantise rows of the values, `Rows`, to the `Places` of ``page`` and ``place`` [ROWS]."""
    row = token * v.stride_token + head * v.stride_head
    value = _load_rows(v.ptr, row, exists, VALUE.columns, VALUE.block)
    out_row = page * v_out.stride_page + place * v_out.stride_token
    out_row += head * v_out.stride_head
    _store_rows(value, v_out.ptr, out_row, exists, scale, VALUE, CODES)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _rope_quantize_fp8_kernel(
    q_rope_ptr,
    q_nope_ptr,
    k_rope_ptr,
    k_nope_ptr,
    v_ptr,
    q_rope_out_ptr,
    q_nope_out_ptr,
    k_rope_out_ptr,
    k_nope_out_ptr,
    v_out_ptr,
    table_ptr,
    positions_ptr,
    entries_ptr,
    starts_ptr,
    requests_ptr,
    places_ptr,
    stride_q_rope_token,
    stride_q_rope_head,
    stride_q_nope_token,
    stride_q_nope_head,
    stride_k_rope_token,
    stride_k_rope_head,
    stride_k_nope_token,
    stride_k_nope_head,
    stride_v_token,
    stride_v_head,
    stride_q_rope_out_token,
    stride_q_rope_out_head,
    stride_q_nope_out_token,
    stride_q_nope_out_head,
    stride_k_rope_out_page,
    stride_k_rope_out_token,
    stride_k_rope_out_head,
    stride_k_nope_out_page,
    stride_k_nope_out_token,
    stride_k_nope_out_head,
    stride_v_out_page,
    stride_v_out_token,
    stride_v_out_head,
    stride_table,
    stride_positions,
    table_rows,
    page_size,
    num_requests,
    num_entries,
    num_pages,
    num_tokens,
    q_blocks,
    k_blocks,
    q_scale,
    kv_scale,
    PAIRS: tl.constexpr,
    QUERY: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CODES: tl.constexpr,
    PROGRAM: tl.constexpr,
    PAGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise a block of (token, head) rows. Grid: (query blocks + key blocks + value blocks,).

    Not paged, ``..._out_token`` are the strides of tokens and those of pages are not used.
    """
    # Without a sign, a product with one is a multiplication of 32 bits by 32.
    tl.assume(stride_q_rope_token >= 0)
    tl.assume(stride_q_rope_head >= 0)
    tl.assume(stride_q_nope_token >= 0)
    tl.assume(stride_q_nope_head >= 0)
    tl.assume(stride_q_rope_out_token >= 0)
    tl.assume(stride_q_rope_out_head >= 0)
    tl.assume(stride_q_nope_out_token >= 0)
    tl.assume(stride_q_nope_out_head >= 0)
    tl.assume(stride_table >= 0)
    tl.assume(stride_positions >= 0)
    angles = Angles(table_ptr, stride_table, table_rows, positions_ptr, stride_positions)
    program = tl.program_id(0)
    if program < q_blocks:
        _quantize_queries(
            program,
            Rows(q_rope_ptr, stride_q_rope_token, stride_q_rope_head),
            Rows(q_nope_ptr, stride_q_nope_token, stride_q_nope_head),
            Rows(q_rope_out_ptr, stride_q_rope_out_token, stride_q_rope_out_head),
            Rows(q_nope_out_ptr, stride_q_nope_out_token, stride_q_nope_out_head),
            angles,
            requests_ptr,
            num_tokens,
            q_scale,
            PAIRS,
            QUERY,
            CODES,
            PROGRAM,
            PAGED,
            PDL,
        )
    else:
        block = program - q_blocks
        is_value = block >= k_blocks
        block = tl.where(is_value, block - k_blocks, block)
        token, head, exists = _split_row(block, KEY.heads, num_tokens, PROGRAM.rows)
        after_previous_kernel(PDL)
        page, place = token * 0, token
        if PAGED:
            table = PageTable(
                entries_ptr,
                starts_ptr,
                requests_ptr,
                places_ptr,
                page_size,
                num_requests,
                num_entries,
                num_pages,
            )
            page, place, exists = _find_places(token, exists, table)
        if is_value:
            if VALUE.columns > 0:
                _quantize_values(
                    token,
                    head,
                    page,
                    place,
                    exists,
                    Rows(v_ptr, stride_v_token, stride_v_head),
                    Places(v_out_ptr, stride_v_out_page, stride_v_out_token, stride_v_out_head),
                    kv_scale,
                    VALUE,
                    CODES,
                )
        else:
            _quantize_keys(
                token,
                head,
                page,
                place,
                exists,
                Rows(k_rope_ptr, stride_k_rope_token, stride_k_rope_head),
                Rows(k_nope_ptr, stride_k_nope_token, stride_k_nope_head),
                Places(
                    k_rope_out_ptr,
                    stride_k_rope_out_page,
                    stride_k_rope_out_token,
                    stride_k_rope_out_head,
                ),
                Places(
                    k_nope_out_ptr,
                    stride_k_nope_out_page,
                    stride_k_nope_out_token,
                    stride_k_nope_out_head,
                ),
                angles,
                kv_scale,
                PAIRS,
                KEY,
                CODES,
                PROGRAM,
            )


def _page_token_head(out: torch.Tensor, paged: bool) -> tuple[int, int, int]:
    """Strides of an output of keys or values, [n, h, w] or [pages, page_size, h, w]."""
    return (out.stride(0), out.stride(1), out.stride(2)) if paged else (0, *out.stride()[:2])


def launch_rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    *,
    q_rope_out: torch.Tensor,
    k_rope_out: torch.Tensor,
    q_nope_out: torch.Tensor,
    k_nope_out: torch.Tensor,
    v_out: torch.Tensor | None,
    page_table: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
    pairing: str,
    q_scale: float,
    kv_scale: float,
    config: RopeConfig | None = None,
) -> Launches:
    """Fill the outputs; arguments as in ``mlacast.reference.rope_quantize_fp8``.

    ``config`` is for measurements: None takes the usual one.
    """
    num_tokens, q_heads, _ = q_rope.shape
    kv_heads = k_rope.shape[1]
    paged = page_table is not None
    # An absent tensor is replaced by one that the kernel then does not touch.
    entries, starts, requests, places = page_table or (positions,) * 4
    value = k_rope if v is None else v
    value_out = k_rope_out if v_out is None else v_out
    values = heads_config(kv_heads, 0 if v is None else v.shape[2])
    launches = Launches(q_rope.device)
    inputs = [launches.inside(x, as_bits(x)) for x in (q_rope, q_nope, k_rope, k_nope, value)]
    outputs = [q_rope_out, q_nope_out, k_rope_out, k_nope_out, value_out]
    config = config or rope_quantize_config(num_tokens * q_heads)
    overlaps = overlaps_launches(q_rope.device)
    q_blocks = triton.cdiv(num_tokens * q_heads, config.rows)
    k_blocks = triton.cdiv(num_tokens * kv_heads, config.rows)
    launches.launch(
        _rope_quantize_fp8_kernel,
        (q_blocks + k_blocks * (2 if values.columns else 1),),
        *inputs,
        *(launches.inside(out, out.view(torch.uint8)) for out in outputs),
        launches.inside(cos_sin_cache, as_bits(cos_sin_cache)),
        positions,
        entries,
        starts,
        requests,
        places,
        *(stride for x in inputs for stride in x.stride()[:2]),
        *q_rope_out.stride()[:2],
        *q_nope_out.stride()[:2],
        *(stride for out in outputs[2:] for stride in _page_token_head(out, paged)),
        cos_sin_cache.stride(0),
        positions.stride(0),
        cos_sin_cache.shape[0],
        k_rope_out.shape[1] if paged else 1,
        starts.shape[0] - 1,
        entries.shape[0],
        k_rope_out.shape[0],
        num_tokens,
        q_blocks,
        k_blocks,
        q_scale,
        kv_scale,
        PAIRS=pairs_config(q_rope.shape[2], pairing),
        QUERY=heads_config(q_heads, q_nope.shape[2]),
        KEY=heads_config(kv_heads, k_nope.shape[2]),
        VALUE=values,
        CODES=codes_config(q_rope_out.dtype, native=has_fp8_casts(q_rope.device)),
        PROGRAM=config,
        PAGED=paged,
        PDL=overlaps,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        launch_pdl=overlaps,
    )
    return launches

"""Rows of ``rope_quantize_fp8``: where they are and go, and how they become codes.

Compile-time values are those of ``mlacast.kernels.config.caches``: PAIRS a `PairsConfig`, CODES a
`CodesConfig`, PROGRAM a `RopeConfig`, and QUERY, KEY, VALUE and SIDE a `HeadsConfig` each.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mlacast.kernels.common.dependents import prefetch_line, wait_for_previous_kernel
from mlacast.kernels.common.fp8_casts import cast_to_float32, cast_to_fp8


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


class Moves(NamedTuple):
    """Rows of keys or values that a program moves, int64 [ROWS] each but the last.

    Attributes:
        token: Where each comes from.
        head: Its head, there and where it goes.
        page: Where it goes; 0 without pages.
        place: Where in the page, or in the output.
        exists: Whether it is moved at all.
    """

    token: Any
    head: Any
    page: Any
    place: Any
    exists: Any


@triton.jit
def assume_positive(rows):
    """Tell the compiler that strides of `Rows` have no sign.

    A product with one is a multiplication of 32 bits by 32 then.
    """
    tl.assume(rows.stride_token >= 0)
    tl.assume(rows.stride_head >= 0)


@triton.jit
def _split_row(block, HEADS: tl.constexpr, num_tokens, ROWS: tl.constexpr):
    """Rows ``block * ROWS``.. of [num_tokens, HEADS]: token, head, exists. Divides no int64.

    Products with a stride multiply int64 of these: one multiplication of 32 bits by 32.
    """
    within = (block % HEADS) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    token = (block // HEADS) * ROWS + within // HEADS  # [ROWS]
    exists = token < num_tokens  # [ROWS]
    return token.to(tl.int64), (within % HEADS).to(tl.int64), exists


@triton.jit
def _find_places(token, exists, table):
    """Where each token [ROWS] goes, (page, offset, is_inside); reads nothing outside the tables."""
    request = tl.load(table.requests_ptr + token, mask=exists, other=-1).to(tl.int64)  # [ROWS]
    known = exists & (request >= 0) & (request < table.num_requests)  # [ROWS]
    place = tl.load(table.places_ptr + token, mask=known, other=-1).to(tl.int64)  # [ROWS]
    start = tl.load(table.starts_ptr + request, mask=known, other=0).to(tl.int64)  # [ROWS]
    inside = known & (place >= 0) & (start >= 0)  # [ROWS]
    place = tl.where(inside, place, 0)
    entry = start + place // table.page_size  # [ROWS]
    inside = inside & (entry < table.num_entries)
    page = tl.load(table.entries_ptr + entry, mask=inside, other=-1).to(tl.int64)  # [ROWS]
    return page, place % table.page_size, inside & (page >= 0) & (page < table.num_pages)


@triton.jit
def find_moves(
    block,
    table,
    num_tokens,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The `Moves` of a block of keys or values; ``table`` is a `PageTable`."""
    token, head, exists = _split_row(block, HEADS, num_tokens, ROWS)
    wait_for_previous_kernel(PDL)
    page, place = token * 0, token
    if PAGED:
        page, place, exists = _find_places(token, exists, table)
    return Moves(token, head, page, place, exists)


@triton.jit
def _load_rows(x_ptr, row, exists, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """N columns of each row, [ROWS, BLOCK_N], as float32."""
    column = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    mask = exists[:, None] & (column < N)[None, :]  # [ROWS, BLOCK_N]
    return cast_to_float32(tl.load(x_ptr + row[:, None] + column[None, :], mask=mask))


@triton.jit
def _store_rows(x, out_ptr, row, exists, scale, SIDE: tl.constexpr, CODES: tl.constexpr):
    """Scale, cast and store the columns of each row that are not rotated, ``x`` [ROWS, block]."""
    column = tl.arange(0, SIDE.block)  # [block]
    mask = exists[:, None] & (column < SIDE.columns)[None, :]  # [ROWS, block]
    codes = cast_to_fp8(x * scale, CODES.is_e5m2, CODES.native)
    tl.store(out_ptr + row[:, None] + column[None, :], codes, mask=mask)


@triton.jit
def _load_pairs(x_ptr, row, exists, PAIRS: tl.constexpr):
    """The two of each pair of columns, float32 [ROWS, block] each."""
    ROWS: tl.constexpr = row.shape[0]
    R: tl.constexpr = PAIRS.columns
    pair = tl.arange(0, PAIRS.block)  # [block]
    if PAIRS.half_pairing:
        mask = exists[:, None] & (pair < R // 2)[None, :]  # [ROWS, block]
        source = x_ptr + row[:, None] + pair[None, :]  # [ROWS, block]
        first = cast_to_float32(tl.load(source, mask=mask))
        second = cast_to_float32(tl.load(source + R // 2, mask=mask))
    else:
        x = _load_rows(x_ptr, row, exists, R, 2 * PAIRS.block)
        first, second = tl.split(tl.reshape(x, (ROWS, PAIRS.block, 2)))
    return first, second


@triton.jit
def _load_angles(table_ptr, row, exists, PAIRS: tl.constexpr):
    """Cosines and sines of rows of the table, float32 [ROWS, block] each."""
    R: tl.constexpr = PAIRS.columns
    pair = tl.arange(0, PAIRS.block)  # [block]
    mask = exists[:, None] & (pair < R // 2)[None, :]  # [ROWS, block]
    angle = table_ptr + row[:, None] + pair[None, :]  # [ROWS, block]
    return cast_to_float32(tl.load(angle, mask=mask)), cast_to_float32(
        tl.load(angle + R // 2, mask=mask)
    )


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
    first_code = cast_to_fp8((first * cos - second * sin) * scale, CODES.is_e5m2, CODES.native)
    second_code = cast_to_fp8((second * cos + first * sin) * scale, CODES.is_e5m2, CODES.native)
    if PAIRS.half_pairing:
        pair = tl.arange(0, BLOCK_PAIRS)  # [block]
        mask = exists[:, None] & (pair < R // 2)[None, :]
        target = out_ptr + row[:, None] + pair[None, :]  # [ROWS, block]
        tl.store(target, first_code, mask=mask)
        tl.store(target + R // 2, second_code, mask=mask)
    else:
        column = tl.arange(0, 2 * BLOCK_PAIRS)  # [2 * block]
        codes = tl.reshape(tl.join(first_code, second_code), (ROWS, 2 * BLOCK_PAIRS))
        target = out_ptr + row[:, None] + column[None, :]  # [ROWS, 2 * block]
        tl.store(target, codes, mask=exists[:, None] & (column < R)[None, :])


@triton.jit
def _send_for_queries(
    rope,
    nope,
    rope_row,
    plain_row,
    positions,
    head,
    exists,
    PAIRS: tl.constexpr,
    QUERY: tl.constexpr,
):
    """Have rows [ROWS] of queries and their positions on their way into the L2 cache.

    A warp's lanes send for the lines of a row, 128 bytes each, and one for the token's position.
    """
    STEP: tl.constexpr = 1024 // rope.ptr.dtype.element_ty.primitive_bitwidth
    PLAIN: tl.constexpr = (QUERY.columns + STEP - 1) // STEP
    LINES: tl.constexpr = PLAIN + (PAIRS.columns + STEP - 1) // STEP
    lane = tl.arange(0, 32)[None, :]  # [1, 32]
    # [ROWS, 32]
    plain = (nope.ptr + plain_row[:, None] + lane * STEP).to(tl.int64)
    rotated = (rope.ptr + rope_row[:, None] + (lane - PLAIN) * STEP).to(tl.int64)
    address = tl.where(lane < PLAIN, plain, rotated)
    address = tl.where(lane == LINES, positions.to(tl.int64)[:, None], address)
    # One head asks for the position: as many requests for one line as rows would queue up.
    is_first = (head == 0)[:, None]  # [ROWS, 1]
    is_sent = (lane < LINES) | (is_first & (lane == LINES))  # [ROWS, 32]
    prefetch_line(address, exists[:, None] & is_sent)


@triton.jit
def quantize_queries(
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
    """Quantise the rows of a block of the queries, all of them `Rows`; ``angles`` is `Angles`.

    Rows and positions are [ROWS], what is loaded of them, and angles, [ROWS, block].
    """
    token, head, exists = _split_row(block, QUERY.heads, num_tokens, PROGRAM.rows)
    plain_row = token * nope.stride_token + head * nope.stride_head  # [ROWS]
    row = token * rope.stride_token + head * rope.stride_head
    positions = angles.positions_ptr + token * angles.stride_positions  # [ROWS]
    if PDL and PROGRAM.ahead:
        _send_for_queries(rope, nope, row, plain_row, positions, head, exists, PAIRS, QUERY)
    wait_for_previous_kernel(PDL)
    if PAGED:
        exists = exists & (tl.load(requests_ptr + token, mask=exists, other=-1) >= 0)
    position = tl.load(positions, mask=exists, other=0)
    if QUERY.columns > 0:
        plain = _load_rows(nope.ptr, plain_row, exists, QUERY.columns, QUERY.block)
    first, second = _load_pairs(rope.ptr, row, exists, PAIRS)
    # Where the angles are depends on a load, the position. The columns leave before they come; when
    # pinned the compiler does not ask for columns behind them.
    if PROGRAM.pinned:
        tl.debug_barrier()
    at = tl.minimum(tl.maximum(position.to(tl.int64), 0), angles.table_rows - 1)  # [ROWS]
    cos, sin = _load_angles(angles.table_ptr, at * angles.stride_table, exists, PAIRS)
    if QUERY.columns > 0:
        row = token * nope_out.stride_token + head * nope_out.stride_head
        _store_rows(plain, nope_out.ptr, row, exists, scale, QUERY, CODES)
    row = token * rope_out.stride_token + head * rope_out.stride_head
    _store_rotated(first, second, cos, sin, rope_out.ptr, row, exists, scale, PAIRS, CODES)


@triton.jit
def quantize_keys(
    moves,
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
    """Quantise rows of the keys, `Rows`, to `Places`, as ``moves`` says, a `Moves`.

    Shapes as in ``quantize_queries``.
    """
    token, head, page, place, exists = moves
    # [ROWS]
    position = tl.load(angles.positions_ptr + token * angles.stride_positions, mask=exists, other=0)
    if KEY.columns > 0:
        plain_row = token * nope.stride_token + head * nope.stride_head
        plain = _load_rows(nope.ptr, plain_row, exists, KEY.columns, KEY.block)
    rope_row = token * rope.stride_token + head * rope.stride_head  # [ROWS]
    first, second = _load_pairs(rope.ptr, rope_row, exists, PAIRS)
    # As for queries.
    if PROGRAM.pinned:
        tl.debug_barrier()
    at = tl.minimum(tl.maximum(position.to(tl.int64), 0), angles.table_rows - 1)  # [ROWS]
    cos, sin = _load_angles(angles.table_ptr, at * angles.stride_table, exists, PAIRS)
    if KEY.columns > 0:
        out_row = page * nope_out.stride_page + place * nope_out.stride_token
        out_row += head * nope_out.stride_head
        _store_rows(plain, nope_out.ptr, out_row, exists, scale, KEY, CODES)
    out_row = page * rope_out.stride_page + place * rope_out.stride_token
    out_row += head * rope_out.stride_head
    _store_rotated(first, second, cos, sin, rope_out.ptr, out_row, exists, scale, PAIRS, CODES)


@triton.jit
def quantize_values(moves, v, v_out, scale, VALUE: tl.constexpr, CODES: tl.constexpr):
    """Quantise rows of the values, `Rows`, to `Places`, as ``moves`` says, a `Moves`."""
    token, head, page, place, exists = moves
    row = token * v.stride_token + head * v.stride_head  # [ROWS]
    value = _load_rows(v.ptr, row, exists, VALUE.columns, VALUE.block)  # [ROWS, block]
    out_row = page * v_out.stride_page + place * v_out.stride_token  # [ROWS]
    out_row += head * v_out.stride_head
    _store_rows(value, v_out.ptr, out_row, exists, scale, VALUE, CODES)

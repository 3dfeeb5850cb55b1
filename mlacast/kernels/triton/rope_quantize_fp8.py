"""Portable ``rope_quantize_fp8``: queries, keys and values in one launch, paged or not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlacast.kernels.common.dependents import after_previous_kernel, overlaps_launches
from mlacast.kernels.common.fp8_casts import as_bits, as_float32, has_fp8_casts, to_fp8
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.config.caches import RopeConfig, rope_quantize_config

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


@triton.jit
def _token_and_head(block, HEADS: tl.constexpr, num_tokens, ROWS: tl.constexpr):
    """Rows ``block * ROWS``.. of [num_tokens, HEADS]: token, head, exists. Divides no int64.

    Products with a stride multiply int64 of these: one multiplication of 32 bits by 32.
    """
    within = (block % HEADS) * ROWS + tl.arange(0, ROWS)
    token = (block // HEADS) * ROWS + within // HEADS
    exists = token < num_tokens
    return token.to(tl.int64), (within % HEADS).to(tl.int64), exists


@triton.jit
def _page_and_offset(
    token,
    exists,
    entries_ptr,
    starts_ptr,
    requests_ptr,
    places_ptr,
    page_size,
    num_requests,
    num_entries,
    num_pages,
):
    """Where each token goes, (page, offset, is_inside); nothing outside the tables is read."""
    request = tl.load(requests_ptr + token, mask=exists, other=-1).to(tl.int64)
    known = exists & (request >= 0) & (request < num_requests)
    place = tl.load(places_ptr + token, mask=known, other=-1).to(tl.int64)
    start = tl.load(starts_ptr + request, mask=known, other=0).to(tl.int64)
    inside = known & (place >= 0) & (start >= 0)
    place = tl.where(inside, place, 0)
    entry = start + place // page_size
    inside = inside & (entry < num_entries)
    page = tl.load(entries_ptr + entry, mask=inside, other=-1).to(tl.int64)
    return page, place % page_size, inside & (page >= 0) & (page < num_pages)


@triton.jit
def _load_rows(x_ptr, row, exists, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """N columns of each row, [ROWS, BLOCK_N], as float32."""
    column = tl.arange(0, BLOCK_N)
    mask = exists[:, None] & (column < N)[None, :]
    return as_float32(tl.load(x_ptr + row[:, None] + column[None, :], mask=mask))


@triton.jit
def _store_rows(
    x,
    out_ptr,
    row,
    exists,
    scale,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Scale, cast and store N columns of each row."""
    column = tl.arange(0, BLOCK_N)
    mask = exists[:, None] & (column < N)[None, :]
    codes = to_fp8(x * scale, IS_E5M2, NATIVE)
    tl.store(out_ptr + row[:, None] + column[None, :], codes, mask=mask)


@triton.jit
def _load_pairs(
    x_ptr, row, exists, R: tl.constexpr, BLOCK_PAIRS: tl.constexpr, HALF_PAIRING: tl.constexpr
):
    """The two of each pair of R columns, float32 [ROWS, BLOCK_PAIRS] each."""
    ROWS: tl.constexpr = row.shape[0]
    pair = tl.arange(0, BLOCK_PAIRS)
    if HALF_PAIRING:
        mask = exists[:, None] & (pair < R // 2)[None, :]
        source = x_ptr + row[:, None] + pair[None, :]
        first = as_float32(tl.load(source, mask=mask))
        second = as_float32(tl.load(source + R // 2, mask=mask))
    else:
        x = _load_rows(x_ptr, row, exists, R, 2 * BLOCK_PAIRS)
        first, second = tl.split(tl.reshape(x, (ROWS, BLOCK_PAIRS, 2)))
    return first, second


@triton.jit
def _load_angles(table_ptr, row, exists, R: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """Cosines and sines of rows of the table, float32 [ROWS, BLOCK_PAIRS] each."""
    pair = tl.arange(0, BLOCK_PAIRS)
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
    R: tl.constexpr,
    HALF_PAIRING: tl.constexpr,
    IS_E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Rotate, scale and cast R columns of each row."""
    ROWS: tl.constexpr = first.shape[0]
    BLOCK_PAIRS: tl.constexpr = first.shape[1]
    first_code = to_fp8((first * cos - second * sin) * scale, IS_E5M2, NATIVE)
    second_code = to_fp8((second * cos + first * sin) * scale, IS_E5M2, NATIVE)
    if HALF_PAIRING:
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
    q_rope_ptr,
    q_nope_ptr,
    q_rope_out_ptr,
    q_nope_out_ptr,
    table_ptr,
    positions_ptr,
    requests_ptr,
    stride_q_rope_token,
    stride_q_rope_head,
    stride_q_nope_token,
    stride_q_nope_head,
    stride_q_rope_out_token,
    stride_q_rope_out_head,
    stride_q_nope_out_token,
    stride_q_nope_out_head,
    stride_table,
    stride_positions,
    table_rows,
    num_tokens,
    scale,
    R: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF_PAIRING: tl.constexpr,
    PAGED: tl.constexpr,
    IS_E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PINNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise rows ``block * ROWS``.. of the queries: R rotated columns and N others."""
    token, head, exists = _token_and_head(block, HEADS, num_tokens, ROWS)
    plain_row = token * stride_q_nope_token + head * stride_q_nope_head
    row = token * stride_q_rope_token + head * stride_q_rope_head
    after_previous_kernel(PDL)
    if PAGED:
        exists = exists & (tl.load(requests_ptr + token, mask=exists, other=-1) >= 0)
    position = tl.load(positions_ptr + token * stride_positions, mask=exists, other=0)
    if N > 0:
        plain = _load_rows(q_nope_ptr, plain_row, exists, N, BLOCK_N)
    first, second = _load_pairs(q_rope_ptr, row, exists, R, BLOCK_PAIRS, HALF_PAIRING)
    # Where the angles are depends on a load, the position. The columns leave before they come; with
    # PINNED the compiler does not ask for columns behind them.
    if PINNED:
        tl.debug_barrier()
    angles = tl.minimum(tl.maximum(position.to(tl.int64), 0), table_rows - 1) * stride_table
    cos, sin = _load_angles(table_ptr, angles, exists, R, BLOCK_PAIRS)
    if N > 0:
        row = token * stride_q_nope_out_token + head * stride_q_nope_out_head
        _store_rows(plain, q_nope_out_ptr, row, exists, scale, N, BLOCK_N, IS_E5M2, NATIVE)
    _store_rotated(
        first,
        second,
        cos,
        sin,
        q_rope_out_ptr,
        token * stride_q_rope_out_token + head * stride_q_rope_out_head,
        exists,
        scale,
        R,
        HALF_PAIRING,
        IS_E5M2,
        NATIVE,
    )


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
    R: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    N_Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    N_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    N_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HALF_PAIRING: tl.constexpr,
    PAGED: tl.constexpr,
    IS_E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PINNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise ROWS (token, head) rows. Grid: (query blocks + key blocks + value blocks,).

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
    program = tl.program_id(0)
    if program < q_blocks:
        _quantize_queries(
            program,
            q_rope_ptr,
            q_nope_ptr,
            q_rope_out_ptr,
            q_nope_out_ptr,
            table_ptr,
            positions_ptr,
            requests_ptr,
            stride_q_rope_token,
            stride_q_rope_head,
            stride_q_nope_token,
            stride_q_nope_head,
            stride_q_rope_out_token,
            stride_q_rope_out_head,
            stride_q_nope_out_token,
            stride_q_nope_out_head,
            stride_table,
            stride_positions,
            table_rows,
            num_tokens,
            q_scale,
            R,
            BLOCK_PAIRS,
            N_Q,
            BLOCK_Q,
            HALF_PAIRING,
            PAGED,
            IS_E5M2,
            NATIVE,
            Q_HEADS,
            ROWS,
            PINNED,
            PDL,
        )
    else:
        block = program - q_blocks
        is_value = block >= k_blocks
        block = tl.where(is_value, block - k_blocks, block)
        token, head, exists = _token_and_head(block, KV_HEADS, num_tokens, ROWS)
        after_previous_kernel(PDL)
        page, place = token * 0, token
        if PAGED:
            page, place, exists = _page_and_offset(
                token,
                exists,
                entries_ptr,
                starts_ptr,
                requests_ptr,
                places_ptr,
                page_size,
                num_requests,
                num_entries,
                num_pages,
            )
        if is_value:
            if N_V > 0:
                value_row = token * stride_v_token + head * stride_v_head
                value = _load_rows(v_ptr, value_row, exists, N_V, BLOCK_V)
                out_row = page * stride_v_out_page + place * stride_v_out_token
                out_row += head * stride_v_out_head
                _store_rows(
                    value, v_out_ptr, out_row, exists, kv_scale, N_V, BLOCK_V, IS_E5M2, NATIVE
                )
        else:
            position = tl.load(positions_ptr + token * stride_positions, mask=exists, other=0)
            if N_K > 0:
                plain_row = token * stride_k_nope_token + head * stride_k_nope_head
                plain = _load_rows(k_nope_ptr, plain_row, exists, N_K, BLOCK_K)
            rope_row = token * stride_k_rope_token + head * stride_k_rope_head
            first, second = _load_pairs(k_rope_ptr, rope_row, exists, R, BLOCK_PAIRS, HALF_PAIRING)
            if PINNED:
                tl.debug_barrier()
            angles = tl.minimum(tl.maximum(position.to(tl.int64), 0), table_rows - 1)
            cos, sin = _load_angles(table_ptr, angles * stride_table, exists, R, BLOCK_PAIRS)
            if N_K > 0:
                out_row = page * stride_k_nope_out_page + place * stride_k_nope_out_token
                out_row += head * stride_k_nope_out_head
                _store_rows(
                    plain, k_nope_out_ptr, out_row, exists, kv_scale, N_K, BLOCK_K, IS_E5M2, NATIVE
                )
            out_row = page * stride_k_rope_out_page + place * stride_k_rope_out_token
            _store_rotated(
                first,
                second,
                cos,
                sin,
                k_rope_out_ptr,
                out_row + head * stride_k_rope_out_head,
                exists,
                kv_scale,
                R,
                HALF_PAIRING,
                IS_E5M2,
                NATIVE,
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
    num_tokens, q_heads, width = q_rope.shape
    kv_heads = k_rope.shape[1]
    paged = page_table is not None
    # An absent tensor is replaced by one that the kernel then does not touch.
    entries, starts, requests, places = page_table or (positions,) * 4
    value = k_rope if v is None else v
    value_out = k_rope_out if v_out is None else v_out
    value_width = 0 if v is None else v.shape[2]
    launches = Launches(q_rope.device)
    inputs = [launches.inside(x, as_bits(x)) for x in (q_rope, q_nope, k_rope, k_nope, value)]
    outputs = [q_rope_out, q_nope_out, k_rope_out, k_nope_out, value_out]
    config = config or rope_quantize_config(num_tokens * q_heads)
    overlaps = overlaps_launches(q_rope.device)
    q_blocks = triton.cdiv(num_tokens * q_heads, config.rows)
    k_blocks = triton.cdiv(num_tokens * kv_heads, config.rows)
    widths = {"Q": q_nope.shape[2], "K": k_nope.shape[2], "V": value_width}
    launches.launch(
        _rope_quantize_fp8_kernel,
        (q_blocks + k_blocks * (2 if value_width else 1),),
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
        R=width,
        BLOCK_PAIRS=triton.next_power_of_2(width // 2),
        **{f"N_{name}": size for name, size in widths.items()},
        **{f"BLOCK_{name}": triton.next_power_of_2(max(size, 1)) for name, size in widths.items()},
        HALF_PAIRING=pairing == "half",
        PAGED=paged,
        IS_E5M2=q_rope_out.dtype == torch.float8_e5m2,
        NATIVE=has_fp8_casts(q_rope.device),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        ROWS=config.rows,
        PINNED=config.pinned,
        PDL=overlaps,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        launch_pdl=overlaps,
    )
    return launches

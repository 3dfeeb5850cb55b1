"""Portable ``rope_quantize_fp8``: queries, keys and values in one launch, paged or not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlacast.kernels.common.dependents import overlaps_launches
from mlacast.kernels.common.fp8_casts import as_bits, has_fp8_casts
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.config.caches import (
    RopeConfig,
    codes_config,
    heads_config,
    pairs_config,
    rope_quantize_plan,
)
from mlacast.kernels.triton.rope_quantize_fp8_rows import (
    Angles,
    PageTable,
    Places,
    Rows,
    assume_positive,
    find_moves,
    quantize_keys,
    quantize_queries,
    quantize_values,
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
    q_rope = Rows(q_rope_ptr, stride_q_rope_token, stride_q_rope_head)
    q_nope = Rows(q_nope_ptr, stride_q_nope_token, stride_q_nope_head)
    q_rope_out = Rows(q_rope_out_ptr, stride_q_rope_out_token, stride_q_rope_out_head)
    q_nope_out = Rows(q_nope_out_ptr, stride_q_nope_out_token, stride_q_nope_out_head)
    assume_positive(q_rope)
    assume_positive(q_nope)
    assume_positive(q_rope_out)
    assume_positive(q_nope_out)
    tl.assume(stride_table >= 0)
    tl.assume(stride_positions >= 0)
    angles = Angles(table_ptr, stride_table, table_rows, positions_ptr, stride_positions)
    program = tl.program_id(0)
    if program < q_blocks:
        quantize_queries(
            program,
            q_rope,
            q_nope,
            q_rope_out,
            q_nope_out,
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
        moves = find_moves(block, table, num_tokens, KEY.heads, PROGRAM.rows, PAGED, PDL)
        if is_value:
            if VALUE.columns > 0:
                v = Rows(v_ptr, stride_v_token, stride_v_head)
                v_out = Places(v_out_ptr, stride_v_out_page, stride_v_out_token, stride_v_out_head)
                quantize_values(moves, v, v_out, kv_scale, VALUE, CODES)
        else:
            quantize_keys(
                moves,
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
    plan = rope_quantize_plan(num_tokens, q_heads, kv_heads, values.columns > 0, config)
    overlaps = overlaps_launches(q_rope.device)
    launches.launch(
        _rope_quantize_fp8_kernel,
        (plan.num_programs,),
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
        plan.q_blocks,
        plan.k_blocks,
        q_scale,
        kv_scale,
        PAIRS=pairs_config(q_rope.shape[2], pairing),
        QUERY=heads_config(q_heads, q_nope.shape[2]),
        KEY=heads_config(kv_heads, k_nope.shape[2]),
        VALUE=values,
        CODES=codes_config(q_rope_out.dtype, native=has_fp8_casts(q_rope.device)),
        PROGRAM=plan.config,
        PAGED=paged,
        PDL=overlaps,
        num_warps=plan.config.num_warps,
        enable_fp_fusion=False,
        launch_pdl=overlaps,
    )
    return launches

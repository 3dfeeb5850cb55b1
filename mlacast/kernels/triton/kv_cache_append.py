"""Portable ``kv_cache_append``: norm, rotation, encoding and the paged store in one launch.

Of rows with the same slot the lowest wins: see ``kv_cache_append_twins``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.rope import Rope
from mlacast.kernels.common.dependents import overlaps_launches, wait_for_previous_kernel
from mlacast.kernels.common.fp8_casts import (
    as_bits,
    has_fp8_casts,
)
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.packed_bf16 import widen
from mlacast.kernels.common.record_places import (
    find_record_places,
    flat_records,
    page_division,
)
from mlacast.kernels.config.caches import (
    AppendConfig,
    append_config,
    latent_config,
    record_config,
)
from mlacast.kernels.triton.kv_cache_append_columns import (
    find_turned_pairs,
    load_parts,
    norm_columns,
    rotate_neighbours,
    rotate_pairs,
    round_to_bfloat16,
    sum_squares,
    turn,
)
from mlacast.kernels.triton.kv_cache_append_store import (
    encode,
    store_codes,
    store_part,
    store_scales,
    store_tail,
)
from mlacast.kernels.triton.kv_cache_append_twins import (
    has_lower_twin,
    keep_if_cached,
    load_before,
    load_rest,
    load_slots,
    may_have_twins,
)

# Counts that vary while serving must not pick another variant of the kernel, nor must where a list
# of numbers happens to start. Strides of rows and pages are those of a model and may: 16 bytes a
# thread need to know that they are multiples of 16.
_VARYING = [
    "page_size",
    "page_inverse",
    "page_shift",
    "num_slots",
    "table_rows",
    "stride_positions",
    "num_rows",
]
_UNALIGNED = ["slots_ptr", "positions_ptr"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _kv_cache_append_kernel(
    latent_ptr,
    stride_latent,
    slots_ptr,
    stride_slots,
    cache_ptr,
    stride_page,
    page_size,
    page_inverse,
    page_shift,
    num_slots,
    weight_ptr,
    eps,
    table_ptr,
    stride_table,
    table_rows,
    positions_ptr,
    stride_positions,
    num_rows,
    RECORD: tl.constexpr,
    LATENT: tl.constexpr,
    PROGRAM: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write as many rows as the program has. Grid: (ceil(num_rows / rows),).

    The first 512 dimensions are parts of two tiles each (see ``kv_cache_append_columns``). The last
    64 are treated on their own where there are 576, or where they are stored as bfloat16; else they
    are rotated where they are.
    """
    ROWS: tl.constexpr = PROGRAM.rows
    PARTS: tl.constexpr = PROGRAM.parts
    C: tl.constexpr = 256 // PARTS
    D_QK: tl.constexpr = RECORD.d_qk
    # Whether the last 64 dimensions are treated on their own.
    HAS_TAIL: tl.constexpr = (
        D_QK == 576 or RECORD.keeps_tail or (LATENT.has_rope and RECORD.name == "rows")
    )
    TURNS: tl.constexpr = LATENT.has_rope and not HAS_TAIL
    # Whether bits of the last 64 dimensions are stored, not codes.
    KEEPS_NAN: tl.constexpr = RECORD.keeps_tail or RECORD.name == "rows"
    MAIN: tl.constexpr = D_QK - 64 if HAS_TAIL else 512
    # What is stored as it came needs no groups, and its stores are as wide as its loads.
    RUN: tl.constexpr = C if RECORD.name == "rows" else 8
    # Programs with many rows before them begin first, and share a multiprocessor with those that
    # have few.
    program, half = tl.program_id(0), tl.num_programs(0) // 2
    block = tl.where(program < half, tl.num_programs(0) - 1 - program, program - half)
    first = block * ROWS
    row = first + tl.arange(0, ROWS)  # [ROWS]
    last_row = num_rows - 1
    # Rows after the last one read what it reads, and are not stored.
    there = tl.minimum(row, last_row)  # [ROWS]
    wait_for_previous_kernel(PDL)
    # Latents, then slots before the program, and no branch up to the end of the look at these: the
    # compiler lets loads that are waited for behind one count as one, and slots wait for latents.
    wide = there.to(tl.int64)  # [ROWS]
    if LATENT.has_rope:
        position = tl.load(positions_ptr + wide * stride_positions)  # [ROWS]
    given = load_slots(slots_ptr, stride_slots, there)  # [ROWS]
    if PROGRAM.tile > 0:
        before = load_before(slots_ptr, stride_slots, first, last_row, ROWS)  # [ROWS]
    c = tl.arange(0, C)  # [C]
    column = (c // RUN) * (2 * RUN) + c % RUN  # [C]
    latents = latent_ptr + (wide * stride_latent)[:, None] + column[None, :]  # [ROWS, C]
    a, b = load_parts(latents, PARTS, 2 * C, RUN)  # PARTS of [ROWS, C] each
    if HAS_TAIL:
        # Halves that are rotated with each other are two tiles.
        IN_HALVES: tl.constexpr = LATENT.has_rope and LATENT.half_pairing
        T: tl.constexpr = 32 if IN_HALVES else 64
        t = tl.arange(0, T)  # [T]
        # [ROWS, T]
        last = latent_ptr + (wide * stride_latent)[:, None] + (D_QK - 64 + t)[None, :]
        tail = tl.load(last)  # [ROWS, T]
        if IN_HALVES:
            tail_end = tl.load(last + 32)  # [ROWS, T]
    doubtful = None
    if PROGRAM.tile > 0:
        # Loads stay on their side of a barrier: latents are asked for first.
        tl.debug_barrier()
        near = load_rest(slots_ptr, stride_slots, first, PROGRAM)  # many of [WIDTH]
    slot = tl.where(row <= last_row, keep_if_cached(given, num_slots), -1)  # [ROWS]
    if PROGRAM.tile > 0:
        doubtful = may_have_twins(
            slots_ptr, stride_slots, first, slot, before, near, num_slots, PROGRAM, NATIVE
        )
    if LATENT.has_rope:
        # [ROWS]; ``angles``, cosines and sines are [ROWS, C or C / 2] for columns that are turned
        # where they are, else [ROWS, 32].
        angle = tl.minimum(tl.maximum(position.to(tl.int64), 0), table_rows - 1) * stride_table
        if TURNS:
            angles = table_ptr + angle[:, None] + find_turned_pairs(C, LATENT.half_pairing)[None, :]
            if not LATENT.half_pairing:
                cos_b = tl.load(angles + 4)
                sin_b = tl.load(angles + 36)
        else:
            angles = table_ptr + angle[:, None] + tl.arange(0, 32)[None, :]
        cos = tl.load(angles)
        sin = tl.load(angles + 32)
    twin = has_lower_twin(slots_ptr, stride_slots, first, doubtful, last_row, PROGRAM)  # [ROWS]
    if LATENT.has_weight:
        # Asked for before anything waits for a sum, for as many rows as the threads have at a time:
        # each loads what it needs, and nothing goes through shared memory.
        AT_A_TIME: tl.constexpr = min(ROWS, PARTS * PROGRAM.num_warps)
        # All [AT_A_TIME, C], PARTS of each; those of the last 64 dimensions are [1, T].
        weights = weight_ptr + tl.broadcast_to(column[None, :], (AT_A_TIME, C))
        weight_a, weight_b = load_parts(weights, PARTS, 2 * C, RUN)
        if D_QK == 512 and HAS_TAIL:
            weight_tail = tl.load(weight_ptr + 448 + t)[None, :]
            if IN_HALVES:
                weight_end = tl.load(weight_ptr + 480 + t)[None, :]
    else:
        weight_a, weight_b, weight_tail, weight_end = None, None, None, None
    write = (slot >= 0) & (twin == 0)  # [ROWS]
    data, scale = find_record_places(  # [ROWS] each
        slot, write, page_size, page_inverse, page_shift, stride_page, RECORD
    )
    if LATENT.has_norm:
        EXACT: tl.constexpr = a[0].dtype != tl.float32
        mean = sum_squares(a, b, ROWS, C, RUN, EXACT, NATIVE) * 0.001953125  # [ROWS]
        factor = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))  # [ROWS]
        if D_QK == 512 and HAS_TAIL:
            # What is rotated is rounded once more.
            IS_LAST: tl.constexpr = KEEPS_NAN and not LATENT.has_rope
            tail = norm_columns(widen(tail, NATIVE), factor, weight_tail, IS_LAST, NATIVE)
            if IN_HALVES:
                tail_end = norm_columns(
                    widen(tail_end, NATIVE), factor, weight_end, IS_LAST, NATIVE
                )
    if LATENT.has_rope and HAS_TAIL:
        if IN_HALVES:
            tail, tail_end = rotate_pairs(
                widen(tail, NATIVE), widen(tail_end, NATIVE), cos, sin, KEEPS_NAN, NATIVE
            )
        else:
            tail = round_to_bfloat16(
                rotate_neighbours(widen(tail, NATIVE), cos, sin, ROWS, 64), KEEPS_NAN, NATIVE
            )
    scales = ()
    for part in tl.static_range(PARTS):
        x, y = a[part], b[part]  # [ROWS, C] each
        if LATENT.has_norm:
            one = weight_a[part] if LATENT.has_weight else None
            other = weight_b[part] if LATENT.has_weight else None
            x = norm_columns(widen(x, NATIVE), factor, one, RECORD.name == "rows", NATIVE)
            y = norm_columns(widen(y, NATIVE), factor, other, RECORD.name == "rows", NATIVE)
        if TURNS and part == PARTS - 1:
            x = turn(x, cos, sin, LATENT.half_pairing, NATIVE)
            if LATENT.half_pairing:
                # Twice as many: those of ``b`` are near by now, and few registers are left before.
                cos_b = tl.load(angles + 8)
                sin_b = tl.load(angles + 40)
            y = turn(y, cos_b, sin_b, LATENT.half_pairing, NATIVE)
        if RECORD.name == "rows" or RECORD.name == "fp8":
            store_part(x, y, cache_ptr, data, write, 2 * C * part, MAIN, RECORD, NATIVE)
        else:
            # Bytes [ROWS, n] of both: n as many as 2 * C dimensions have.
            codes, of_groups = encode(x, y, RECORD, NATIVE)
            store_codes(codes, cache_ptr, data, write, part, PARTS, MAIN)
            scales = scales + (of_groups,)
    if RECORD.name != "rows" and RECORD.name != "fp8":
        # Those of V3.2 stand between its codes and the last 64 dimensions.
        place = data + 512 if RECORD.name == "v32" else scale
        store_scales(cache_ptr, place, scales, write, MAIN, RECORD)
    if HAS_TAIL:
        store_tail(tail, cache_ptr, data, write, D_QK - 64, RECORD, NATIVE)
        if IN_HALVES:
            store_tail(tail_end, cache_ptr, data, write, D_QK - 32, RECORD, NATIVE)


def launch_kv_cache_append(
    latent: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    kv_format: KvFormat,
    norm_weight: torch.Tensor | None,
    norm_eps: float | None,
    rope: Rope | None,
    config: AppendConfig | None = None,
) -> Launches:
    """Write the addressed records; arguments as in ``mlacast.kv_cache_append``.

    ``config`` is for measurements: None takes the one for this number of rows.
    """
    num_rows, d_qk = latent.shape
    flat = flat_records(cache, kv_format)
    num_slots = flat.shape[0] * flat.shape[1]
    config = config or append_config(num_rows, flat.shape[1])
    # An absent tensor is replaced by one that the kernel then does not touch.
    weight = latent if norm_weight is None else norm_weight
    table = latent if rope is None else rope.cos_sin_cache
    positions = slots if rope is None else rope.positions
    launches = Launches(cache.device)
    overlaps = overlaps_launches(cache.device)
    launches.launch(
        _kv_cache_append_kernel,
        (triton.cdiv(num_rows, config.rows),),
        launches.inside(latent, as_bits(latent)),
        latent.stride(0),
        slots,
        slots.stride(0),
        launches.inside(cache, flat),
        flat.stride(0),
        flat.shape[1],
        *page_division(flat.shape[1]),
        num_slots,
        launches.inside(weight, as_bits(weight)),
        norm_eps or 0.0,
        launches.inside(table, as_bits(table)),
        table.stride(0),
        table.shape[0],
        positions,
        positions.stride(0),
        num_rows,
        RECORD=record_config(kv_format, d_qk, num_slots),
        LATENT=latent_config(norm_weight, norm_eps, rope),
        PROGRAM=config,
        NATIVE=has_fp8_casts(cache.device),
        PDL=overlaps,
        num_warps=config.num_warps,
        **({"maxnreg": config.max_registers} if config.max_registers else {}),
        enable_fp_fusion=False,
        launch_pdl=overlaps,
    )
    return launches

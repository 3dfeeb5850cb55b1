"""Portable ``kv_cache_append``: norm, rotation, encoding and the paged store in one launch.

Of rows with the same slot the lowest wins: see ``kv_cache_append_twins``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.rope import Rope
from mlacast.kernels.common.dependents import after_previous_kernel, overlaps_launches
from mlacast.kernels.common.fp8_casts import (
    as_bits,
    has_fp8_casts,
)
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.packed_bf16 import widened
from mlacast.kernels.common.record_places import (
    flat_records,
    page_division,
    record_places,
)
from mlacast.kernels.config.caches import (
    AppendConfig,
    append_config,
    latent_config,
    record_config,
)
from mlacast.kernels.triton.kv_cache_append_encode import (
    bf16_bytes,
    bits_of,
    encode_fp4,
    encode_fp8,
    encode_pow2,
    rotate_pairs,
    sum_of_squares,
    to_bfloat16,
    word_bytes,
)
from mlacast.kernels.triton.kv_cache_append_twins import (
    has_lower_twin,
    load_rest,
    load_slots,
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


@triton.jit
def _store(cache_ptr, start, values, mask, last: tl.constexpr):
    """Store the first ``last`` columns of ``values`` [ROWS, n] at ``start`` [ROWS]."""
    columns = tl.arange(0, values.shape[1])
    inside = mask[:, None] & (columns < last)[None, :]
    tl.store(cache_ptr + start[:, None] + columns[None, :], values, mask=inside)


@triton.jit
def _store_scales(cache_ptr, start, scales, mask, used: tl.constexpr, last: tl.constexpr):
    """Store ``last`` bytes of scales [ROWS, n], those from ``used`` on as zeros."""
    columns = tl.arange(0, scales.shape[1])
    padded = tl.where((columns < used)[None, :], scales, 0).to(tl.uint8)
    _store(cache_ptr, start, padded, mask, last)


@triton.jit
def _store_dimensions(
    a,
    b,
    cache_ptr,
    data,
    scale,
    write,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    RECORD: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Encode and store dimensions FIRST to LAST, the first ones of ``a`` and ``b`` [ROWS, C].

    ``b`` is None for a tile of neighbours.
    """
    ROWS: tl.constexpr = a.shape[0]
    C: tl.constexpr = a.shape[1]
    N: tl.constexpr = C if b is None else 2 * C
    COUNT: tl.constexpr = LAST - FIRST
    if RECORD.name == "fp8":
        codes = encode_fp8(a, b, ROWS, C, NATIVE)
        _store(cache_ptr, data + FIRST, codes, write, COUNT)
    elif RECORD.name == "v32":
        codes, scales = encode_pow2(a, b, ROWS, C, 128, True, NATIVE)
        _store(cache_ptr, data + FIRST, codes, write, COUNT)
        words = word_bytes(scales, ROWS, N // 128)
        _store(cache_ptr, data + (512 + FIRST // 32), words, write, COUNT // 32)
    elif RECORD.name == "v4":
        # The byte after the seven scales is padding, a zero.
        codes, scales = encode_pow2(a, b, ROWS, C, 64, False, NATIVE)
        _store(cache_ptr, data + FIRST, codes, write, COUNT)
        _store_scales(cache_ptr, scale + FIRST // 64, scales, write, COUNT // 64, N // 64)
    elif RECORD.name == "v41":
        codes, scales = encode_pow2(a, b, ROWS, C, 32, False, NATIVE)
        _store(cache_ptr, data + FIRST, codes, write, COUNT)
        _store(cache_ptr, scale + FIRST // 32, scales.to(tl.uint8), write, COUNT // 32)
    elif RECORD.name == "v41_fp4":
        codes, scales = encode_fp4(a, b, ROWS, C, False, NATIVE)
        _store(cache_ptr, data + FIRST // 2, codes, write, COUNT // 2)
        _store(cache_ptr, scale + FIRST // 16, scales, write, COUNT // 16)
    else:
        tl.static_assert(RECORD.name == "nvfp4_384", "unknown record format")
        # The four bytes after the 28 scales are padding, zeros.
        codes, scales = encode_fp4(a, b, ROWS, C, True, NATIVE)
        _store(cache_ptr, data + FIRST // 2, codes, write, COUNT // 2)
        _store_scales(cache_ptr, scale + FIRST // 16, scales, write, COUNT // 16, N // 16)


@triton.jit
def _store_tail(
    tail,
    cache_ptr,
    data,
    scale,
    write,
    FIRST: tl.constexpr,
    RECORD: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store dimensions FIRST.. of the last 64, ``tail`` [ROWS, N]."""
    ROWS: tl.constexpr = tail.shape[0]
    N: tl.constexpr = tail.shape[1]
    if RECORD.keeps_tail:
        plain = bf16_bytes(bits_of(tail, NATIVE), ROWS, N)
        _store(cache_ptr, data + (RECORD.data - 2 * (RECORD.d_qk - FIRST)), plain, write, 2 * N)
    elif RECORD.name == "rows":
        _store(cache_ptr, data + FIRST, bits_of(tail, NATIVE), write, N)
    else:
        _store_dimensions(
            tail, None, cache_ptr, data, scale, write, FIRST, FIRST + N, RECORD, NATIVE
        )


@triton.jit
def _normed(
    x,
    factor,
    weight,
    KEEPS_NAN: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Columns of normed rows [ROWS, C], rounded to bfloat16: bits.

    ``weight`` [n, C] is the same for all of n rows, or None for ones. Which bits a NaN has does not
    matter unless KEEPS_NAN.
    """
    x = x * factor[:, None]
    if weight is not None:
        ROWS: tl.constexpr = x.shape[0]
        C: tl.constexpr = x.shape[1]
        N: tl.constexpr = weight.shape[0]
        by_pass = tl.reshape(x, (ROWS // N, N, C)) * widened(weight, NATIVE)[None, :, :]
        x = tl.reshape(by_pass, (ROWS, C))
    return to_bfloat16(x, KEEPS_NAN, NATIVE)


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

    The first 512 dimensions are two tiles (see ``kv_cache_append_encode``), and the last 64 are
    treated on their own where they are kept, or rotated, apart from the others.
    """
    ROWS: tl.constexpr = PROGRAM.rows
    D_QK: tl.constexpr = RECORD.d_qk
    HAS_TAIL: tl.constexpr = D_QK == 576 or LATENT.has_rope or RECORD.keeps_tail
    # Whether bits of the last 64 dimensions are stored, not codes.
    KEEPS_NAN: tl.constexpr = RECORD.keeps_tail or RECORD.name == "rows"
    MAIN: tl.constexpr = D_QK - 64 if HAS_TAIL else 512
    # What is stored as it came needs no groups, and its stores are as wide as its loads.
    RUN: tl.constexpr = 256 if RECORD.name == "rows" else 8
    # Programs with many rows before them begin first, and share a multiprocessor with those that
    # have few.
    program, half = tl.program_id(0), tl.num_programs(0) // 2
    block = tl.where(program < half, tl.num_programs(0) - 1 - program, program - half)
    first = block * ROWS
    row = first + tl.arange(0, ROWS)
    last_row = num_rows - 1
    # Rows after the last one read what it reads, and are not stored.
    there = tl.minimum(row, last_row)
    after_previous_kernel(PDL)
    slot = load_slots(slots_ptr, stride_slots, there, num_slots)
    slot = tl.where(row <= last_row, slot, -1)
    near = None if PROGRAM.tile == 0 else load_rest(slots_ptr, stride_slots, first, PROGRAM.tile)
    row = there.to(tl.int64)
    if LATENT.has_rope:
        position = tl.load(positions_ptr + row * stride_positions)
    c = tl.arange(0, 256)
    column = (c // RUN) * (2 * RUN) + c % RUN
    latent = latent_ptr + (row * stride_latent)[:, None] + column[None, :]
    a = tl.load(latent)
    b = tl.load(latent + RUN)
    if HAS_TAIL:
        # Halves that are rotated with each other are two tiles.
        IN_HALVES: tl.constexpr = LATENT.has_rope and LATENT.half_pairing
        T: tl.constexpr = 32 if IN_HALVES else 64
        t = tl.arange(0, T)
        last = latent_ptr + (row * stride_latent)[:, None] + (D_QK - 64 + t)[None, :]
        tail = tl.load(last)
        if IN_HALVES:
            tail_end = tl.load(last + 32)
    if LATENT.has_rope:
        angle = tl.minimum(tl.maximum(position.to(tl.int64), 0), table_rows - 1) * stride_table
        pair = tl.arange(0, 32)
        angles = table_ptr + angle[:, None] + pair[None, :]
        cos = tl.load(angles)
        sin = tl.load(angles + 32)
    twin = has_lower_twin(
        slots_ptr,
        stride_slots,
        first,
        slot,
        near,
        last_row,
        num_slots,
        PROGRAM,
    )
    if LATENT.has_weight:
        # Asked for before anything waits for a sum, for as many rows as the threads have at a time:
        # each loads what it needs, and nothing goes through shared memory. With codes of four bits
        # threads have other columns than they would load.
        IS_FP4: tl.constexpr = RECORD.name == "v41_fp4" or RECORD.name == "nvfp4_384"
        AT_A_TIME: tl.constexpr = 1 if IS_FP4 else min(ROWS, 2 * PROGRAM.num_warps)
        weights = weight_ptr + tl.broadcast_to(column[None, :], (AT_A_TIME, 256))
        weight_a = tl.load(weights)
        weight_b = tl.load(weights + RUN)
        if D_QK == 512 and HAS_TAIL:
            weight_tail = tl.load(weight_ptr + 448 + t)[None, :]
            if IN_HALVES:
                weight_end = tl.load(weight_ptr + 480 + t)[None, :]
    else:
        weight_a, weight_b, weight_tail, weight_end = None, None, None, None
    write = (slot >= 0) & (twin == 0)
    data, scale = record_places(
        slot, write, page_size, page_inverse, page_shift, stride_page, RECORD
    )
    if LATENT.has_norm:
        EXACT: tl.constexpr = a.dtype != tl.float32
        a, b = widened(a, NATIVE), widened(b, NATIVE)
        mean = sum_of_squares(a, b, ROWS, RUN, EXACT) * 0.001953125
        factor = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))
        a = _normed(a, factor, weight_a, RECORD.name == "rows", NATIVE)
        b = _normed(b, factor, weight_b, RECORD.name == "rows", NATIVE)
        if D_QK == 512 and HAS_TAIL:
            # What is rotated is rounded once more.
            IS_LAST: tl.constexpr = KEEPS_NAN and not LATENT.has_rope
            tail = _normed(widened(tail, NATIVE), factor, weight_tail, IS_LAST, NATIVE)
            if IN_HALVES:
                tail_end = _normed(widened(tail_end, NATIVE), factor, weight_end, IS_LAST, NATIVE)
    if LATENT.has_rope:
        if IN_HALVES:
            tail, tail_end = rotate_pairs(
                widened(tail, NATIVE), widened(tail_end, NATIVE), cos, sin, KEEPS_NAN, NATIVE
            )
        else:
            even, odd = tl.split(tl.reshape(widened(tail, NATIVE), (ROWS, 32, 2)))
            even, odd = rotate_pairs(even, odd, cos, sin, KEEPS_NAN, NATIVE)
            tail = tl.reshape(tl.join(even, odd), (ROWS, 64))
    if RECORD.name == "rows":
        _store(cache_ptr, data, bits_of(a, NATIVE), write, 256)
        _store(cache_ptr, data + 256, bits_of(b, NATIVE), write, MAIN - 256)
    else:
        _store_dimensions(a, b, cache_ptr, data, scale, write, 0, MAIN, RECORD, NATIVE)
    if HAS_TAIL:
        _store_tail(tail, cache_ptr, data, scale, write, D_QK - 64, RECORD, NATIVE)
        if IN_HALVES:
            _store_tail(
                tail_end,
                cache_ptr,
                data,
                scale,
                write,
                D_QK - 32,
                RECORD,
                NATIVE,
            )


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
    is_fp4 = kv_format.record in ("v41_fp4", "nvfp4_384")
    config = config or append_config(num_rows, flat.shape[1], is_fp4=is_fp4)
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

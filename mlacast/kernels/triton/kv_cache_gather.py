"""Portable ``kv_cache_gather``: records of a paged cache as bfloat16 rows, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlacast.descriptors.kv_format import KvFormat
from mlacast.kernels.common.dependents import overlaps_launches, wait_for_previous_kernel
from mlacast.kernels.common.fp8_casts import cast_from_e4m3, cast_to_bf16_bits, has_fp8_casts
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.numbers import decode_ue8m0
from mlacast.kernels.common.record_places import (
    find_record_places,
    flat_records,
    page_division,
)
from mlacast.kernels.config.caches import RowsConfig, gather_config, record_config

# Counts that vary while serving must not pick another variant of the kernel, nor must where a list
# of slots happens to start.
_VARYING = ["page_size", "page_inverse", "page_shift", "num_slots", "num_rows"]
_UNALIGNED = ["slots_ptr"]


@triton.jit
def _load(cache_ptr, start, N: tl.constexpr, valid, used: tl.constexpr):
    """N elements from ``start`` [ROWS] on, zeros from ``used`` on and where not ``valid``."""
    columns = tl.arange(0, N)  # [N]
    inside = valid[:, None] & (columns < used)[None, :]  # [ROWS, N]
    return tl.load(cache_ptr + start[:, None] + columns[None, :], mask=inside, other=0)


@triton.jit
def _join_bytes(raw, ROWS: tl.constexpr, N: tl.constexpr, BYTES: tl.constexpr):
    """Bytes (uint8 [ROWS, N * BYTES]) as int32 [ROWS, N]: a record may start at any address."""
    lane = tl.arange(0, N * BYTES) % BYTES  # [N * BYTES]
    shifted = raw.to(tl.int32) << (lane * 8)[None, :]  # [ROWS, N * BYTES]
    return tl.sum(tl.reshape(shifted, (ROWS, N, BYTES)), 2)


@triton.jit
def _scale_columns(values, scales, ROWS: tl.constexpr, VEC: tl.constexpr):
    """Multiply [ROWS, 512] by one scale [ROWS, 512 / VEC] per VEC columns."""
    grouped = tl.reshape(values, (ROWS, 512 // VEC, VEC)) * tl.expand_dims(scales, 2)
    return tl.reshape(grouped, (ROWS, 512))


@triton.jit
def _decode_fp4(cache_ptr, data, scale, valid, used: tl.constexpr, NATIVE: tl.constexpr):
    """E2M1 codes of ``used`` dimensions times E4M3 scales, [ROWS, 512]."""
    ROWS: tl.constexpr = data.shape[0]
    pairs = _load(cache_ptr, data, 256, valid, used // 2).to(tl.int32)  # [ROWS, 256]
    codes = tl.reshape(tl.join(pairs & 0xF, pairs >> 4), (ROWS, 512))  # [ROWS, 512]
    # Moved up by nine bits, a code is the float16 of 2**-14 times its value.
    bits = ((codes & 0x7) << 9) | ((codes & 0x8) << 12)
    values = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    scales = cast_from_e4m3(_load(cache_ptr, scale, 32, valid, used // 16), NATIVE)  # [ROWS, 32]
    return _scale_columns(values, scales * 16384.0, ROWS, 16)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _kv_cache_gather_kernel(
    cache_ptr,
    stride_page,
    page_size,
    page_inverse,
    page_shift,
    num_slots,
    slots_ptr,
    stride_slots,
    out_ptr,
    num_rows,
    RECORD: tl.constexpr,
    PROGRAM: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read as many slots as the program has rows. Grid: (ceil(num_rows / rows),)."""
    ROWS: tl.constexpr = PROGRAM.rows
    D_QK: tl.constexpr = RECORD.d_qk
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    exists = row < num_rows  # [ROWS]
    row = row.to(tl.int64)
    wait_for_previous_kernel(PDL)
    slot = tl.load(slots_ptr + row * stride_slots, mask=exists, other=-1).to(tl.int64)  # [ROWS]
    valid = exists & (slot >= 0) & (slot < num_slots)  # [ROWS]
    data, scale = find_record_places(
        slot, valid, page_size, page_inverse, page_shift, stride_page, RECORD
    )  # [ROWS] each, int64
    MAIN: tl.constexpr = D_QK - 64 if RECORD.keeps_tail else 512
    # ``values`` and ``bits`` [ROWS, 512], ``scales`` [ROWS, n].
    if RECORD.name == "rows":
        bits = _load(cache_ptr, data, 512, valid, 512)
    elif RECORD.name == "v41_fp4" or RECORD.name == "nvfp4_384":
        bits = cast_to_bf16_bits(_decode_fp4(cache_ptr, data, scale, valid, MAIN, NATIVE), NATIVE)
    else:
        values = cast_from_e4m3(_load(cache_ptr, data, 512, valid, MAIN), NATIVE)  # [ROWS, 512]
        if RECORD.name == "v32":
            words = _join_bytes(
                _load(cache_ptr, data + 512, 16, valid, 16), ROWS, 4, 4
            )  # [ROWS, 4]
            values = _scale_columns(values, words.to(tl.float32, bitcast=True), ROWS, 128)
        elif RECORD.name == "v4":
            scales = decode_ue8m0(_load(cache_ptr, scale, 8, valid, 7).to(tl.int32))
            values = _scale_columns(values, scales, ROWS, 64)
        elif RECORD.name == "v41":
            scales = decode_ue8m0(_load(cache_ptr, scale, 16, valid, 16).to(tl.int32))
            values = _scale_columns(values, scales, ROWS, 32)
        else:
            tl.static_assert(RECORD.name == "fp8", "unknown record format")
        bits = cast_to_bf16_bits(values, NATIVE)
    if RECORD.keeps_tail:
        raw = _load(cache_ptr, data + (RECORD.data - 128), 128, valid, 128)  # [ROWS, 128]
        tail = _join_bytes(raw, ROWS, 64, 2).to(tl.int16)  # [ROWS, 64]
    elif D_QK == 576:
        tail = _load(cache_ptr, data + 512, 64, valid, 64)  # [ROWS, 64]
        if RECORD.name == "fp8":
            tail = cast_to_bf16_bits(cast_from_e4m3(tail, NATIVE), NATIVE)
    d = tl.arange(0, 512)  # [512]
    out = out_ptr + row[:, None] * D_QK  # [ROWS, 1]
    tl.store(out + d[None, :], bits, mask=exists[:, None] & (d < MAIN)[None, :])
    if RECORD.keeps_tail or D_QK == 576:
        t = tl.arange(0, 64)  # [64]
        tl.store(out + (D_QK - 64 + t)[None, :], tail, mask=exists[:, None] & (t >= 0)[None, :])


def launch_kv_cache_gather(
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_format: KvFormat,
    config: RowsConfig | None = None,
) -> Launches:
    """Make the rows [n, d_qk], at least one; arguments as in ``mlacast.kv_cache_gather``.

    ``config`` is for measurements: None takes the usual one.
    """
    num_rows = slots.shape[0]
    flat = flat_records(cache, kv_format)
    num_slots = flat.shape[0] * flat.shape[1]
    record = record_config(kv_format, cache.shape[-1], num_slots)
    out = torch.empty((num_rows, record.d_qk), dtype=torch.bfloat16, device=cache.device)
    launches = Launches(cache.device, result=out)
    config = config or gather_config()
    overlaps = overlaps_launches(cache.device)
    launches.launch(
        _kv_cache_gather_kernel,
        (triton.cdiv(num_rows, config.rows),),
        launches.inside(cache, flat),
        flat.stride(0),
        flat.shape[1],
        *page_division(flat.shape[1]),
        num_slots,
        slots,
        slots.stride(0),
        launches.inside(out, out.view(torch.int16)),
        num_rows,
        RECORD=record,
        PROGRAM=config,
        NATIVE=has_fp8_casts(cache.device),
        PDL=overlaps,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        launch_pdl=overlaps,
    )
    return launches

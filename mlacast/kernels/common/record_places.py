"""Where the record of a slot stands in a paged cache, for kernels that write or read whole records.

Plain bfloat16 rows are records of elements, all others of bytes; ``page_stride`` and the widths
count in those.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mlacast.descriptors.kv_format import KvFormat
from mlacast.kernels.common.fp8_casts import as_bits


def flat_records(cache: torch.Tensor, kv_format: KvFormat) -> torch.Tensor:
    """View a cache as what kernels load and store: int16 for BF16, else uint8."""
    return as_bits(cache) if kv_format.record is None else cache.view(torch.uint8)


def record_constants(kv_format: KvFormat, d_qk: int, num_slots: int) -> dict[str, Any]:
    """Compile-time arguments of a kernel for this format."""
    assert num_slots < 2**31, "a cache of 2**31 records would take 600 GB or more"
    width = d_qk if kv_format.record is None else kv_format.record_data_bytes(d_qk)
    return {
        "RECORD": kv_format.record or "rows",
        "INLINE": kv_format.placement == "inline",
        "DATA": width,
        "SCALE": kv_format.scale_bytes,
        "D_QK": d_qk,
    }


def page_division(page_size: int) -> tuple[int, int]:
    """Multiplier and shift that divide slots by ``page_size`` in a kernel.

    For 0 <= slot < 2**31: slot // page_size == (2 * slot * multiplier >> 32) >> shift. The
    multiplier, of 32 bits, comes as the int32 of the same bits.
    """
    shift = (page_size - 1).bit_length()
    # Rounded up by less than 2**shift / page_size: too little to reach the next quotient.
    multiplier = -(-(1 << (31 + shift)) // page_size)
    return multiplier - (1 << 32), shift


@triton.jit
def record_places(
    slot,
    valid,
    page_size,
    page_inverse,
    page_shift,
    stride_page,
    INLINE: tl.constexpr,
    DATA: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Where data and scales of each slot [ROWS] start; those of slot 0 where not ``valid``.

    ``page_inverse`` and ``page_shift`` are those of ``page_division``: a division costs more than
    all else that a row needs, in every arrangement of the rows over threads.
    """
    slot = tl.where(valid, slot, 0).to(tl.uint32)
    page = tl.umulhi(slot * 2, page_inverse.to(tl.uint32, bitcast=True)) >> page_shift
    # With a sign, like the stride: one multiplication of 32 bits by 32.
    page_start = page.to(tl.int32).to(tl.int64) * stride_page
    offset = (slot - page * page_size).to(tl.int64)
    if INLINE:
        data = page_start + offset * (DATA + SCALE)
        scale = data + DATA
    else:
        data = page_start + offset * DATA
        scale = page_start + page_size.to(tl.int64) * DATA + offset * SCALE
    return data, scale

"""Where the record of a slot stands in a paged cache, for kernels that write or read whole records.

Plain bfloat16 rows are records of elements, all others of bytes; ``page_stride`` and the widths
count in those.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlacast.descriptors.kv_format import KvFormat
from mlacast.kernels.common.fp8_casts import as_bits


def flat_records(cache: torch.Tensor, kv_format: KvFormat) -> torch.Tensor:
    """View a cache as what kernels load and store: int16 for BF16, else uint8."""
    return as_bits(cache) if kv_format.record is None else cache.view(torch.uint8)


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
def find_record_places(
    slot,
    valid,
    page_size,
    page_inverse,
    page_shift,
    stride_page,
    RECORD: tl.constexpr,
):
    """Where data and scales of each slot [ROWS] start; those of slot 0 where not ``valid``.

    RECORD is a `RecordConfig`. ``page_inverse`` and ``page_shift`` are those of ``page_division``:
    a division costs more than all else that a row needs, in every arrangement of the rows over
    threads.
    """
    slot = tl.where(valid, slot, 0).to(tl.uint32)  # [ROWS]
    page = tl.umulhi(slot * 2, page_inverse.to(tl.uint32, bitcast=True)) >> page_shift  # [ROWS]
    # With a sign, like the stride: one multiplication of 32 bits by 32.
    page_start = page.to(tl.int32).to(tl.int64) * stride_page  # [ROWS], int64
    offset = (slot - page * page_size).to(tl.int64)  # [ROWS], int64
    if RECORD.is_inline:
        data = page_start + offset * (RECORD.data + RECORD.scale)
        scale = data + RECORD.data
    else:
        data = page_start + offset * RECORD.data
        scale = page_start + page_size.to(tl.int64) * RECORD.data + offset * RECORD.scale
    return data, scale

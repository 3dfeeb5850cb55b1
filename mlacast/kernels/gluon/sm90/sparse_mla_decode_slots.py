"""Slots of a block of keys, and their addresses."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_rotation import row_offset
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import record_words
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import BLOCK_N


@gluon.jit
def load_slots(lane, block, length, extra_length, token, pool, extra_pool, HAS_EXTRA: gl.constexpr):
    """Slots ``lane`` of one block of the main list followed by the extra list; -1 past their ends.

    Returns:
        The slots, and whether they are the extra pool's.
    """
    _, _, _, _, _, _, indices_ptr, stride_indices, _, _, _ = pool
    row_ptr = indices_ptr + row_offset(token, stride_indices)
    is_extra = False
    if HAS_EXTRA:
        _, _, _, _, _, _, extra_indices_ptr, extra_stride, _, _, _ = extra_pool
        main_blocks = (length + BLOCK_N - 1) // BLOCK_N
        is_extra = block >= main_blocks
        block = gl.where(is_extra, block - main_blocks, block)
        length = gl.where(is_extra, extra_length, length)
        extra_row_ptr = extra_indices_ptr + row_offset(token, extra_stride)
        row_ptr = gl.where(is_extra, extra_row_ptr, row_ptr)
    column = block * BLOCK_N + lane
    return gl.load(row_ptr + column, mask=column < length, other=-1), is_extra


@gluon.jit
def locate(
    ids,
    is_extra,
    pool,
    extra_pool,
    HAS_EXTRA: gl.constexpr,
    FORMAT: gl.constexpr,
    INLINE: gl.constexpr,
    EXTRA_FORMAT: gl.constexpr,
    EXTRA_INLINE: gl.constexpr,
):
    """Addresses [64] of codes and scales of the slots, and which slots exist."""
    cache_ptr, stride_page, page_size, inverse, shift, num_slots, _, _, _, _, _ = pool
    if HAS_EXTRA:
        (
            extra_cache_ptr,
            extra_stride,
            extra_size,
            extra_inverse,
            extra_shift,
            extra_slots,
            _,
            _,
            _,
            _,
            _,
        ) = extra_pool
        cache_ptr = gl.where(is_extra, extra_cache_ptr, cache_ptr)
        stride_page = gl.where(is_extra, extra_stride, stride_page)
        page_size = gl.where(is_extra, extra_size, page_size)
        inverse = gl.where(is_extra, extra_inverse, inverse)
        shift = gl.where(is_extra, extra_shift, shift)
        num_slots = gl.where(is_extra, extra_slots, num_slots)
    valid = (ids >= 0) & (ids < num_slots)
    ids = gl.where(valid, ids, 0)
    # ids // page_size, see ``page_division``.
    page = gl.umulhi((ids * 2).to(gl.uint32), gl.cast(inverse, gl.uint32)) >> gl.cast(
        shift, gl.uint32
    )
    page = page.to(gl.int32)
    offset = ids - page * page_size
    page_start = page.to(gl.int64) * (stride_page * 4)
    data, scales = record_words(page_size, offset, FORMAT, INLINE)
    if HAS_EXTRA and (FORMAT != EXTRA_FORMAT or INLINE != EXTRA_INLINE):
        extra_data, extra_scales = record_words(page_size, offset, EXTRA_FORMAT, EXTRA_INLINE)
        data = gl.where(is_extra, extra_data, data)
        scales = gl.where(is_extra, extra_scales, scales)
    return cache_ptr + (page_start + data), cache_ptr + (page_start + scales), valid

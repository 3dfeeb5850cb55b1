"""Slots of a block of keys, and their addresses."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_rotation import find_row_offset
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import find_record_words
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import BLOCK_N


@gluon.jit
def load_slots(lane, block, length, extra_length, token, pool, extra_pool, EXTRA: gl.constexpr):
    """Slots ``lane`` [64] of a block of the main, then the extra list; -1 past their ends.

    Returns:
        The slots [64], and whether they are the extra pool's.
    """
    row_ptr = pool.indices_ptr + find_row_offset(token, pool.stride_indices)
    is_extra = False
    if EXTRA is not None:
        main_blocks = (length + BLOCK_N - 1) // BLOCK_N
        is_extra = block >= main_blocks
        block = gl.where(is_extra, block - main_blocks, block)
        length = gl.where(is_extra, extra_length, length)
        extra_row_ptr = extra_pool.indices_ptr + find_row_offset(token, extra_pool.stride_indices)
        row_ptr = gl.where(is_extra, extra_row_ptr, row_ptr)
    # What the block adds to address and mask is the same for all threads: uniform registers.
    start = block * BLOCK_N
    return gl.load(row_ptr + start + lane, mask=lane < length - start, other=-1), is_extra


@gluon.jit
def locate(
    ids,
    is_extra,
    pool,
    extra_pool,
    POOL: gl.constexpr,
    EXTRA: gl.constexpr,
    first_word=0,
):
    """Addresses [64] of codes, from ``first_word`` [64] of a record, and of scales of the slots.

    Third, which slots exist.
    """
    cache_ptr = pool.cache_ptr
    stride_page = pool.stride_page
    page_size = pool.page_size
    inverse = pool.page_inverse
    shift = pool.page_shift
    num_slots = pool.num_slots
    if EXTRA is not None:
        cache_ptr = gl.where(is_extra, extra_pool.cache_ptr, cache_ptr)
        stride_page = gl.where(is_extra, extra_pool.stride_page, stride_page)
        page_size = gl.where(is_extra, extra_pool.page_size, page_size)
        inverse = gl.where(is_extra, extra_pool.page_inverse, inverse)
        shift = gl.where(is_extra, extra_pool.page_shift, shift)
        num_slots = gl.where(is_extra, extra_pool.num_slots, num_slots)
    valid = (ids >= 0) & (ids < num_slots)  # [64]
    ids = gl.where(valid, ids, 0)  # [64]
    # ids // page_size, see ``page_division``.
    page = gl.umulhi((ids * 2).to(gl.uint32), gl.cast(inverse, gl.uint32)) >> gl.cast(
        shift, gl.uint32
    )
    # No page is negative, and 64 bits of one without a sign take half of the instructions. 64 bits
    # before the factor 4: pages may be 8 GiB apart and more.
    page_start = page.to(gl.int64) * stride_page * 4  # [64]
    offset = ids - page.to(gl.int32) * page_size  # [64]
    data, scales = find_record_words(page_size, offset, POOL)  # [64] each
    if EXTRA is not None:  # noqa: SIM102 - both decided while compiling, the second not without
        if POOL.record != EXTRA.record or POOL.is_inline != EXTRA.is_inline:
            extra_data, extra_scales = find_record_words(page_size, offset, EXTRA)
            data = gl.where(is_extra, extra_data, data)
            scales = gl.where(is_extra, extra_scales, scales)
    data = (data + first_word).to(gl.uint32)
    return cache_ptr + (page_start + data), cache_ptr + (page_start + scales), valid

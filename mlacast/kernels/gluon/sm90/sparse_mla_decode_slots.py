"""Slots of a block of keys, their addresses, and hints to fetch them early."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import record_bytes, record_words
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import BLOCK_N

# Blocks of an item that are sent for before anything else.
_PREFETCH_BLOCKS = gl.constexpr(8)
_THREADS = gl.constexpr(gl.BlockedLayout([_PREFETCH_BLOCKS.value * 64 // 128], [32], [4], [0]))


@gluon.jit
def load_slots(lane, block, length, extra_length, token, pool, extra_pool, HAS_EXTRA: gl.constexpr):
    """Slots ``lane`` of one block of the main list followed by the extra list; -1 past their ends.

    Returns:
        The slots, and whether they are the extra pool's.
    """
    _, _, _, _, indices_ptr, stride_indices, _, _, _ = pool
    row_ptr = indices_ptr + token.to(gl.int64) * stride_indices
    is_extra = False
    if HAS_EXTRA:
        _, _, _, _, extra_indices_ptr, extra_stride, _, _, _ = extra_pool
        main_blocks = (length + BLOCK_N - 1) // BLOCK_N
        is_extra = block >= main_blocks
        block = gl.where(is_extra, block - main_blocks, block)
        length = gl.where(is_extra, extra_length, length)
        extra_row_ptr = extra_indices_ptr + token.to(gl.int64) * extra_stride
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
    cache_ptr, stride_page, page_size, num_slots, _, _, _, _, _ = pool
    if HAS_EXTRA:
        extra_cache_ptr, extra_stride, extra_size, extra_slots, _, _, _, _, _ = extra_pool
        cache_ptr = gl.where(is_extra, extra_cache_ptr, cache_ptr)
        stride_page = gl.where(is_extra, extra_stride, stride_page)
        page_size = gl.where(is_extra, extra_size, page_size)
        num_slots = gl.where(is_extra, extra_slots, num_slots)
    valid = (ids >= 0) & (ids < num_slots)
    ids = gl.where(valid, ids, 0)
    page = ids // page_size
    offset = ids - page * page_size
    page_start = page.to(gl.int64) * (stride_page * 4)
    data, scales = record_words(page_size, offset, FORMAT, INLINE)
    if HAS_EXTRA and (FORMAT != EXTRA_FORMAT or INLINE != EXTRA_INLINE):
        extra_data, extra_scales = record_words(page_size, offset, EXTRA_FORMAT, EXTRA_INLINE)
        data = gl.where(is_extra, extra_data, data)
        scales = gl.where(is_extra, extra_scales, scales)
    return cache_ptr + (page_start + data), cache_ptr + (page_start + scales), valid


@gluon.jit
def _prefetch(pointers, size, wanted):
    """Send for ``size`` bytes, a multiple of 16, into the L2 cache."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $3, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [pointers, size, wanted],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch_first_blocks(
    first,
    count,
    length,
    extra_length,
    token,
    pool,
    extra_pool,
    HALF: gl.constexpr,
    HAS_EXTRA: gl.constexpr,
    FORMAT: gl.constexpr,
    INLINE: gl.constexpr,
    EXTRA_FORMAT: gl.constexpr,
    EXTRA_INLINE: gl.constexpr,
):
    """Send for the first blocks of an item: its left output role for codes, the right for scales.

    Both have nothing to do yet, and the stage of the dequantising role holds less than a block.
    """
    element = gl.arange(0, _PREFETCH_BLOCKS * 64, _THREADS)
    block = element // 64
    slots, is_extra = load_slots(
        element % 64, first + block, length, extra_length, token, pool, extra_pool, HAS_EXTRA
    )
    rows, scales, valid = locate(
        slots, is_extra, pool, extra_pool, HAS_EXTRA, FORMAT, INLINE, EXTRA_FORMAT, EXTRA_INLINE
    )
    wanted = (valid & (block < count)).to(gl.int32)
    if HALF == 0:
        size = element * 0 + record_bytes(FORMAT, INLINE)
        if HAS_EXTRA and FORMAT != EXTRA_FORMAT:
            size = gl.where(is_extra, record_bytes(EXTRA_FORMAT, EXTRA_INLINE), size)
        _prefetch(rows, size, wanted)
    else:
        # Scales may start at a multiple of 8 bytes; the instruction wants 16.
        aligned = scales.to(gl.int64, bitcast=True) & -16
        _prefetch(aligned, element * 0 + 16, wanted)

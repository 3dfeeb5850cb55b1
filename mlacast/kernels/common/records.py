"""Load cached tokens as a tile of matrix operands: one function per record format.

A cache is one of bytes, except for plain rows. ``page`` and ``offset`` are int64 [BLOCK_N]; invalid
tokens read nothing and give zeros.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mlacast.kernels.common.numbers import decode_e2m1, decode_e4m3, decode_ue8m0


class Cache(NamedTuple):
    """Pages of tokens; strides count elements."""

    ptr: Any
    stride_page: Any
    stride_token: Any
    page_size: Any


@triton.jit
def _load_bytes(cache_ptr, start, columns, mask):
    """Bytes [BLOCK_N, n] from ``start [BLOCK_N]`` on."""
    return tl.load(cache_ptr + start[:, None] + columns[None, :], mask=mask, other=0)


@triton.jit
def _scale_columns(
    values, scales, BLOCK_N: tl.constexpr, NUM_SCALES: tl.constexpr, VEC: tl.constexpr
):
    """Multiply [BLOCK_N, NUM_SCALES * VEC] by one scale per VEC columns."""
    grouped = tl.reshape(values, (BLOCK_N, NUM_SCALES, VEC)) * tl.expand_dims(scales, 2)
    return tl.reshape(grouped, (BLOCK_N, NUM_SCALES * VEC))


@triton.jit
def _load_bf16_columns(cache_ptr, start, first: tl.constexpr, valid, D: tl.constexpr):
    """Columns ``first``.. of [BLOCK_N, D] as float32 from bfloat16 pairs of bytes at ``start``."""
    columns = tl.arange(0, D)  # [D]
    inside = valid[:, None] & (columns >= first)[None, :]  # [BLOCK_N, D]
    low = tl.load(
        cache_ptr + start[:, None] + (2 * (columns - first))[None, :], mask=inside, other=0
    )
    high = tl.load(
        cache_ptr + start[:, None] + (2 * (columns - first) + 1)[None, :], mask=inside, other=0
    )  # [BLOCK_N, D]
    bits = (low.to(tl.int32) | (high.to(tl.int32) << 8)) << 16  # [BLOCK_N, D]
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_records(cache, page, offset, valid, POOL: tl.constexpr):
    """The first 512 dimensions of each token, [BLOCK_N, 512] float32 (rows: their own dtype).

    Records are "rows", "fp8", "v32", "v4", "v41", "v41_fp4" or "nvfp4_384". Inline: scales follow
    each token; else they stand after the last token of the page.
    """
    FORMAT: tl.constexpr = POOL.record
    INLINE: tl.constexpr = POOL.is_inline
    BLOCK_N: tl.constexpr = valid.shape[0]
    cache_ptr = cache.ptr
    stride_token = cache.stride_token
    # 64 bits: a cache of one page may be larger than 2**31 bytes.
    page_size = tl.cast(cache.page_size, tl.int64)
    d = tl.arange(0, 512)  # [512]
    mask = valid[:, None] & (d >= 0)[None, :]  # [BLOCK_N, 512]
    # ``start``, ``scale_start`` and ``footer`` are int64 [BLOCK_N], ``raw`` are the scales' bytes
    # [BLOCK_N, n] at ``lane`` [n], ``codes`` and what comes of them [BLOCK_N, 512].
    page_start = page * cache.stride_page  # [BLOCK_N], int64
    if FORMAT == "rows":
        start = page_start + offset * stride_token
        return tl.load(cache_ptr + start[:, None] + d[None, :], mask=mask, other=0.0)
    elif FORMAT == "fp8":
        return decode_e4m3(_load_bytes(cache_ptr, page_start + offset * stride_token, d, mask))
    elif FORMAT == "v32":
        start = page_start + offset * 656
        values = decode_e4m3(_load_bytes(cache_ptr, start, d, mask))  # [BLOCK_N, 512]
        # The scales are read byte by byte: a page may start at any address.
        lane = tl.arange(0, 16)
        raw = _load_bytes(cache_ptr, start + 512, lane, valid[:, None] & (lane >= 0)[None, :])
        shifted = tl.reshape(raw.to(tl.int32) << ((lane % 4) * 8)[None, :], (BLOCK_N, 4, 4))
        scales = tl.sum(shifted, 2).to(tl.float32, bitcast=True)  # [BLOCK_N, 4]
        return _scale_columns(values, scales, BLOCK_N, 4, 128)
    elif FORMAT == "v4":
        start = page_start + offset * 576
        codes = _load_bytes(
            cache_ptr, start, d, valid[:, None] & (d < 448)[None, :]
        )  # [BLOCK_N, 512]
        lane = tl.arange(0, 8)
        footer = page_start + page_size * 576 + offset * 8
        raw = _load_bytes(
            cache_ptr, footer, lane, valid[:, None] & (lane < 7)[None, :]
        )  # [BLOCK_N, 8]
        nope = _scale_columns(decode_e4m3(codes), decode_ue8m0(raw.to(tl.int32)), BLOCK_N, 8, 64)
        rope = _load_bf16_columns(cache_ptr, start + 448, 448, valid, 512)
        return tl.where((d < 448)[None, :], nope, rope)
    elif FORMAT == "v41":
        start = page_start + offset * (528 if INLINE else 512)
        lane = tl.arange(0, 16)
        scale_start = start + 512 if INLINE else page_start + page_size * 512 + offset * 16
        raw = _load_bytes(cache_ptr, scale_start, lane, valid[:, None] & (lane >= 0)[None, :])
        codes = _load_bytes(cache_ptr, start, d, mask)
        return _scale_columns(decode_e4m3(codes), decode_ue8m0(raw.to(tl.int32)), BLOCK_N, 16, 32)
    elif FORMAT == "v41_fp4":
        start = page_start + offset * (288 if INLINE else 256)
        lane = tl.arange(0, 32)
        scale_start = start + 256 if INLINE else page_start + page_size * 256 + offset * 32
        raw = _load_bytes(cache_ptr, scale_start, lane, valid[:, None] & (lane >= 0)[None, :])
        half = tl.arange(0, 256)  # [256], of which two codes are a byte
        pairs = _load_bytes(cache_ptr, start, half, valid[:, None] & (half >= 0)[None, :]).to(
            tl.int32
        )
        codes = tl.reshape(tl.join(pairs & 0xF, pairs >> 4), (BLOCK_N, 512))
        return _scale_columns(decode_e2m1(codes), decode_e4m3(raw), BLOCK_N, 32, 16)
    else:
        tl.static_assert(FORMAT == "nvfp4_384", "unknown record format")
        start = page_start + offset * 352
        lane = tl.arange(0, 32)
        footer = page_start + page_size * 352 + offset * 32
        raw = _load_bytes(cache_ptr, footer, lane, valid[:, None] & (lane < 28)[None, :])
        half = tl.arange(0, 256)  # [256], of which two codes are a byte
        pairs = _load_bytes(cache_ptr, start, half, valid[:, None] & (half < 224)[None, :]).to(
            tl.int32
        )
        codes = tl.reshape(tl.join(pairs & 0xF, pairs >> 4), (BLOCK_N, 512))
        nope = _scale_columns(decode_e2m1(codes), decode_e4m3(raw), BLOCK_N, 32, 16)
        rope = _load_bf16_columns(cache_ptr, start + 224, 448, valid, 512)
        return tl.where((d < 448)[None, :], nope, rope)


@triton.jit
def load_rope_tail(cache, page, offset, valid, POOL: tl.constexpr):
    """Dimensions 512..575 of each token of a 576-wide format, [BLOCK_N, 64]."""
    FORMAT: tl.constexpr = POOL.record
    cache_ptr = cache.ptr
    d = tl.arange(0, 64)  # [64]
    mask = valid[:, None] & (d >= 0)[None, :]  # [BLOCK_N, 64]
    start = page * cache.stride_page + offset * cache.stride_token  # [BLOCK_N], int64
    if FORMAT == "rows":
        return tl.load(cache_ptr + start[:, None] + (512 + d)[None, :], mask=mask, other=0.0)
    elif FORMAT == "fp8":
        return decode_e4m3(_load_bytes(cache_ptr, start + 512, d, mask))
    else:
        tl.static_assert(FORMAT == "v32", "only 576-wide formats have a tail")
        return _load_bf16_columns(cache_ptr, start + 528, 0, valid, 64)

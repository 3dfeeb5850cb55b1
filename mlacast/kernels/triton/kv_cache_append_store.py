"""Where the bytes of ``kv_cache_append`` go in a record: codes, scales, and what stays bfloat16.

Tiles are stored by the threads that have them, where that takes no exchange.
"""

import triton
import triton.language as tl

from mlacast.kernels.common.fp8_casts import cast_to_bf16_bits, cast_to_float32, cast_to_fp8
from mlacast.kernels.common.packed_bf16 import widen
from mlacast.kernels.triton.kv_cache_append_encode import encode_fp4, encode_fp8, encode_pow2


@triton.jit
def _store(cache_ptr, start, values, mask, last: tl.constexpr, run: tl.constexpr):
    """Store the first ``last`` columns of ``values`` [ROWS, n] at ``start`` [ROWS].

    A thread has ``run`` neighbours, or as many as make 16 bytes.
    """
    n: tl.constexpr = values.shape[1]
    i = tl.arange(0, n)  # [n]
    # The compiler sees no neighbours beyond a run.
    columns = i if run >= n else (i // run) * run + i % run  # [n]
    inside = mask[:, None]  # [ROWS, 1], or [ROWS, n] where not all of them are stored
    if last < n:
        inside = inside & (i < last)[None, :]
    tl.store(cache_ptr + start[:, None] + columns[None, :], values, mask=inside)


@triton.jit
def _join_parts(parts):
    """[ROWS, n * N] of n tiles [ROWS, N], a power of two."""
    if len(parts) == 1:
        return parts[0]
    else:
        HALF: tl.constexpr = len(parts) // 2
        left, right = _join_parts(parts[:HALF]), _join_parts(parts[HALF:])
        both = tl.permute(tl.join(left, right), (0, 2, 1))  # [ROWS, 2, n * N / 2]
        return tl.reshape(both, (left.shape[0], 2 * left.shape[1]))


@triton.jit
def _split_bf16_into_bytes(bits, ROWS: tl.constexpr, C: tl.constexpr):
    """int16 [ROWS, C] -> its bytes, uint8 [ROWS, 2 * C]: a record may start at any address."""
    wide = bits.to(tl.int32)  # [ROWS, C], and pairs [ROWS, C, 2]
    pairs = tl.join((wide & 0xFF).to(tl.uint8), ((wide >> 8) & 0xFF).to(tl.uint8))
    return tl.reshape(pairs, (ROWS, 2 * C))


@triton.jit
def _split_words_into_bytes(words, ROWS: tl.constexpr, C: tl.constexpr):
    """int32 [ROWS, C] -> its bytes, uint8 [ROWS, 4 * C]."""
    # [ROWS, C, 4]
    shifted = tl.expand_dims(words, 2) >> (tl.arange(0, 4) * 8)[None, None, :]
    return tl.reshape((shifted & 0xFF).to(tl.uint8), (ROWS, 4 * C))


@triton.jit
def _view_bits(x, NATIVE: tl.constexpr):
    """bfloat16 bits (int16) of a tile; bits stay as they are."""
    if x.dtype == tl.int16:
        return x
    else:
        return cast_to_bf16_bits(cast_to_float32(x), NATIVE)


@triton.jit
def encode(a, b, RECORD: tl.constexpr, NATIVE: tl.constexpr):
    """Codes (uint8 [ROWS, n]) of ``a`` and ``b`` [ROWS, C], and bytes of their scales."""
    ROWS: tl.constexpr = a.shape[0]
    C: tl.constexpr = a.shape[1]
    if RECORD.name == "v32":
        codes, scales = encode_pow2(a, b, ROWS, C, 128, True, NATIVE)
        return codes, _split_words_into_bytes(scales, ROWS, C // 64)
    elif RECORD.name == "v4":
        codes, scales = encode_pow2(a, b, ROWS, C, 64, False, NATIVE)
        return codes, scales.to(tl.uint8)
    elif RECORD.name == "v41":
        codes, scales = encode_pow2(a, b, ROWS, C, 32, False, NATIVE)
        return codes, scales.to(tl.uint8)
    else:
        tl.static_assert(RECORD.name == "v41_fp4" or RECORD.name == "nvfp4_384", "unknown record")
        return encode_fp4(a, b, ROWS, C, RECORD.name == "nvfp4_384", NATIVE)


@triton.jit
def store_part(
    a,
    b,
    cache_ptr,
    data,
    write,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    RECORD: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store dimensions FIRST.. of ``a`` and ``b`` [ROWS, C], up to LAST, without scales.

    Records start at ``data`` [ROWS]; rows are stored where ``write`` [ROWS].
    """
    C: tl.constexpr = a.shape[1]
    COUNT: tl.constexpr = min(2 * C, LAST - FIRST)
    if RECORD.name == "fp8":
        codes = encode_fp8(a, b, a.shape[0], C, NATIVE)
        _store(cache_ptr, data + FIRST, codes, write, COUNT, 16)
    else:
        _store(cache_ptr, data + FIRST, _view_bits(a, NATIVE), write, C, C)
        if COUNT > C:
            _store(cache_ptr, data + (FIRST + C), _view_bits(b, NATIVE), write, COUNT - C, C)


@triton.jit
def store_codes(
    codes,
    cache_ptr,
    data,
    write,
    part: tl.constexpr,
    PARTS: tl.constexpr,
    MAIN: tl.constexpr,
):
    """Store the codes [ROWS, n] of a part, up to those of dimension MAIN; as in ``store_part``."""
    N: tl.constexpr = codes.shape[1]
    LAST: tl.constexpr = N * PARTS * MAIN // 512
    # A thread has those of 16 dimensions.
    _store(cache_ptr, data + part * N, codes, write, min(N, LAST - part * N), N * PARTS // 32)


@triton.jit
def store_scales(cache_ptr, start, parts, write, MAIN: tl.constexpr, RECORD: tl.constexpr):
    """Store the scales of MAIN dimensions, bytes [ROWS, n] of each of ``parts``; then zeros.

    Those of a record belong at ``start`` [ROWS].
    """
    n: tl.constexpr = parts[0].shape[1]
    N: tl.constexpr = n * len(parts)
    USED: tl.constexpr = N * MAIN // 512
    if RECORD.name == "v41_fp4" or RECORD.name == "nvfp4_384":
        # Every thread has one of each part, and stores it: to put those of a row beside each other
        # would cost more than three stores.
        for part in tl.static_range(len(parts)):
            scales = parts[part]  # [ROWS, n]
            if USED < n * part + n:
                scales = tl.where((tl.arange(0, n) < USED - n * part)[None, :], scales, 0)
            _store(cache_ptr, start + n * part, scales.to(tl.uint8), write, n, 1)
    else:
        scales = _join_parts(parts)  # [ROWS, N]
        if USED < N:
            scales = tl.where((tl.arange(0, N) < USED)[None, :], scales, 0).to(tl.uint8)
        # Each of the eight threads of a row has as many as it has computed.
        _store(cache_ptr, start, scales, write, N, max(N // 8, 1))


@triton.jit
def store_tail(
    tail,
    cache_ptr,
    data,
    write,
    FIRST: tl.constexpr,
    RECORD: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store dimensions FIRST.. of the last 64, ``tail`` [ROWS, N]; as in ``store_part``."""
    ROWS: tl.constexpr = tail.shape[0]
    N: tl.constexpr = tail.shape[1]
    if RECORD.keeps_tail:
        plain = _split_bf16_into_bytes(_view_bits(tail, NATIVE), ROWS, N)
        _store(cache_ptr, data + (RECORD.data - 2 * (RECORD.d_qk - FIRST)), plain, write, 2 * N, 16)
    elif RECORD.name == "rows":
        _store(cache_ptr, data + FIRST, _view_bits(tail, NATIVE), write, N, 8)
    else:
        tl.static_assert(RECORD.name == "fp8", "others have no more than 512 dimensions")
        codes = cast_to_fp8(widen(tail, NATIVE), False, NATIVE)
        _store(cache_ptr, data + FIRST, codes, write, N, 16)

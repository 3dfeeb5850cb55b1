"""Operands of the products that consume a quantised output: codes as numbers, and their scales.

A block is consecutive features of one group in natural head order, whatever the order of the
buffer. Scales either multiply the operand, which is exact for powers of two, or the product of the
block, in float32, where a block lies in one group of scales.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mlacast.kernels.common.fp8_casts import cast_from_e4m3
from mlacast.kernels.common.numbers import decode_e2m1, decode_e4m3, decode_ue8m0
from mlacast.kernels.common.store import (
    BF16,
    FP8_UE8M0,
    NVFP4,
)

# Kinds of weights.
PLAIN = tl.constexpr(0)
BLOCKS_128 = tl.constexpr(1)
GROUPS_32 = tl.constexpr(2)


class Activations(NamedTuple):
    """The rows of a tile of a quantised buffer.

    Attributes:
        data: Pointers [BLOCK_M, 1] to their codes in the first group.
        stride_data_group: Between groups.
        sf_ptr: Scales of the buffer.
        row: Numbers of the rows in the range, int64 [BLOCK_M].
        row_start: The range's first row in the buffer.
        stride_sf_token: Between rows of scales.
        stride_sf_group: Between groups.
        stride_sf_word: Between words of a group.
    """

    data: Any
    stride_data_group: Any
    sf_ptr: Any
    row: Any
    row_start: Any
    stride_sf_token: Any
    stride_sf_group: Any
    stride_sf_word: Any


class Weights(NamedTuple):
    """The columns of a tile of the weights.

    Attributes:
        data: Pointers [BLOCK_N, 1] to their first feature in the first group.
        stride_data_group: Between groups.
        sf: Pointers to their scales, [BLOCK_N], or one of a block of columns.
        stride_sf_group: Between groups.
        stride_sf_word: Between words of a group.
    """

    data: Any
    stride_data_group: Any
    sf: Any
    stride_sf_group: Any
    stride_sf_word: Any


@triton.jit
def _find_block(start, F: tl.constexpr, CHUNK32: tl.constexpr):
    """Which 32 features of the buffer are the natural ones from ``start``, a multiple of 32."""
    if CHUNK32:
        return (start % 512) // 32 * (F // 512) + start // 512
    else:
        return start // 32


@triton.jit
def _spread_bytes(word, start, COLUMNS: tl.constexpr, PER_BYTE: tl.constexpr):
    """Byte of each of COLUMNS features from ``start``: int32 [ROWS, COLUMNS] from words [ROWS]."""
    column = start + tl.arange(0, COLUMNS)  # [COLUMNS]
    shift = column // PER_BYTE % 4 * 8  # [COLUMNS]
    return (word[:, None] >> shift[None, :]) & 0xFF


@triton.jit
def load_codes(
    rows,
    start,
    SOURCE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Codes of a block, two in a byte for NVFP4: [ROWS, BLOCK_K] or half of that.

    ``rows`` [ROWS, 1] points at the group's first code of each token.
    """
    if SOURCE.kind == NVFP4:
        k = start // 2 + tl.arange(0, BLOCK_K // 2)  # [BLOCK_K / 2]
        limit: tl.constexpr = SOURCE.features // 2
    else:
        k = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        limit: tl.constexpr = SOURCE.features
    place = k
    if SOURCE.chunk32:
        inside = tl.arange(0, BLOCK_K)  # [BLOCK_K]
        first = _find_block(start, SOURCE.features, True) * 32
        place = first + inside // 32 * (SOURCE.features // 512 * 32) + inside % 32
    if SOURCE.features % BLOCK_K == 0:
        return tl.load(rows + place[None, :])
    else:
        return tl.load(rows + place[None, :], mask=(k < limit)[None, :], other=0)


@triton.jit
def _load_packed_bytes(
    sf, stride_word, start, F: tl.constexpr, CHUNK32: tl.constexpr, BLOCK_K: tl.constexpr
):
    """UE8M0 bytes of up to 128 features in natural order, as one int32 word [ROWS].

    ``sf`` [ROWS] points at the group's first word of each token.
    """
    if CHUNK32:
        packed = tl.zeros(sf.shape, tl.int32)  # [ROWS]
        for part in tl.static_range(BLOCK_K // 32):
            block = _find_block(start + part * 32, F, True)
            word = tl.load(sf + tl.cast(block // 4, tl.int64) * stride_word)
            byte = (word >> (block % 4 * 8)) & 0xFF
            packed |= byte << ((start // 32 + part) % 4 * 8)
        return packed
    else:
        return tl.load(sf + tl.cast(start // 128, tl.int64) * stride_word)


@triton.jit
def _load_swizzled_word(
    sf_ptr, row, first, columns, SF_COLUMN_TILES: tl.constexpr, F: tl.constexpr
):
    """Four e4m3 scales [ROWS] from column ``first`` on, of ``columns`` that there are."""
    base = (row // 128) * (SF_COLUMN_TILES * 512) + (row % 32) * 16 + (row % 128) // 32 * 4
    if F % 64 == 0:
        words = sf_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        return tl.load(words + (base // 4 + (first // 4).to(tl.int64) * 128))
    else:
        packed = tl.zeros(row.shape, tl.int32)  # [ROWS]
        for part in tl.static_range(4):
            column = first + part
            place = base + (column // 4).to(tl.int64) * 512 + column % 4
            byte = tl.load(sf_ptr + place, mask=(row >= 0) & (column < columns), other=0)  # [ROWS]
            packed |= byte.to(tl.int32) << (8 * part)
        return packed


@triton.jit
def _make_activation_operand(
    codes,
    sf,
    stride_word,
    row,
    group,
    start,
    SOURCE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AS_OPERAND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Float32 values [ROWS, BLOCK_K] of activation codes; bfloat16 and plain ones as they are.

    With AS_OPERAND the power of two of each 32 features is in them. Scales of NVFP4 always are, but
    not its global one.
    """
    if SOURCE.kind == BF16:
        return codes
    elif SOURCE.kind == NVFP4:
        tl.static_assert(BLOCK_K == 64, "four scales of a token are a word")
        wide = codes.to(tl.int32)
        values = tl.interleave(decode_e2m1(wide & 0xF), decode_e2m1(wide >> 4))  # [ROWS, BLOCK_K]
        blocks: tl.constexpr = SOURCE.features // 16
        first = group * blocks + start // 16
        word = _load_swizzled_word(
            sf, row, first, (group + 1) * blocks, SOURCE.sf_column_tiles, SOURCE.features
        )
        # A word starts with the scale of ``start``.
        scale = _spread_bytes(word, 0, BLOCK_K, 16)  # [ROWS, BLOCK_K]
        return values * decode_e4m3(scale.to(tl.uint8))
    else:
        values = cast_from_e4m3(codes, NATIVE)
        if AS_OPERAND:
            word = _load_packed_bytes(
                sf, stride_word, start, SOURCE.features, SOURCE.chunk32, BLOCK_K
            )
            values *= decode_ue8m0(_spread_bytes(word, start, BLOCK_K, 32))
        return values


@triton.jit
def _load_activation_factor(
    sf,
    stride_word,
    start,
    SOURCE: tl.constexpr,
):
    """Float32 scale [ROWS] of the group of features at ``start``."""
    if SOURCE.kind != FP8_UE8M0:
        return tl.load(sf + tl.cast(start // SOURCE.group, tl.int64) * stride_word)
    else:
        block = (
            _find_block(start, SOURCE.features, True) if SOURCE.chunk32 else start // SOURCE.group
        )
        word = tl.load(sf + tl.cast(block // 4, tl.int64) * stride_word)  # [ROWS]
        return decode_ue8m0((word >> (block % 4 * 8)) & 0xFF)


@triton.jit
def load_weights(rows, start, F: tl.constexpr, BLOCK_K: tl.constexpr):
    """Weights [COLUMNS, BLOCK_K]; ``rows`` [COLUMNS, 1] points at a column's first feature."""
    k = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    if F % BLOCK_K == 0:
        return tl.load(rows + k[None, :])
    else:
        return tl.load(rows + k[None, :], mask=(k < F)[None, :], other=0)


@triton.jit
def _make_weight_operand(
    codes,
    sf,
    stride_word,
    start,
    W_KIND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AS_OPERAND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Values [COLUMNS, BLOCK_K] of weights; with AS_OPERAND the power of two of 32 is in them."""
    if W_KIND == PLAIN:
        return codes
    else:
        values = cast_from_e4m3(codes, NATIVE)
        if AS_OPERAND:
            word = tl.load(sf + tl.cast(start // 128, tl.int64) * stride_word)  # [COLUMNS]
            values *= decode_ue8m0(_spread_bytes(word, start, BLOCK_K, 32))
        return values


@triton.jit
def _load_weight_factor(sf, stride_word, start):
    """Float32 scale of the 128 features around ``start``, of ``sf``'s shape: its first scales."""
    return tl.load(sf + tl.cast(start // 128, tl.int64) * stride_word)


@triton.jit
def _find_scales(activations, wide_group):
    """Pointers [BLOCK_M] to a group's first scale; ``activations`` is an `Activations`."""
    row = activations.row * activations.stride_sf_token
    return activations.sf_ptr + (row + wide_group * activations.stride_sf_group)


@triton.jit
def load_factors(
    activations, weights, wide_group, start, SOURCE: tl.constexpr, PRODUCT: tl.constexpr
):
    """Scales that multiply the product at ``start``: [BLOCK_M], and [BLOCK_N] or one number.

    Pointers in their place where nothing does.
    """
    x_factor = activations.sf_ptr
    w_factor = weights.sf
    if PRODUCT.x_factor:
        sf = _find_scales(activations, wide_group)
        x_factor = _load_activation_factor(sf, activations.stride_sf_word, start, SOURCE)
    if PRODUCT.w_factor:
        group_sf = weights.sf + wide_group * weights.stride_sf_group
        w_factor = _load_weight_factor(group_sf, weights.stride_sf_word, start)
    return x_factor, w_factor


@triton.jit
def make_operands(
    x,
    w,
    activations,
    weights,
    group,
    start,
    SOURCE: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """What the matrix unit multiplies, [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K], of codes."""
    if PRODUCT.multiplies_codes:
        x = x.to(tl.float8e4nv, bitcast=True)
        w = w.to(tl.float8e4nv, bitcast=True)
    else:
        wide_group = group.to(tl.int64)
        sf = activations.sf_ptr
        if SOURCE.kind != NVFP4:
            sf = _find_scales(activations, wide_group)
        x = _make_activation_operand(
            x,
            sf,
            activations.stride_sf_word,
            activations.row_start + activations.row,
            group,
            start,
            SOURCE,
            BLOCK_K,
            PRODUCT.x_operand,
            NATIVE,
        ).to(COMPUTE)
        w = _make_weight_operand(
            w,
            weights.sf + wide_group * weights.stride_sf_group,
            weights.stride_sf_word,
            start,
            PRODUCT.weight_kind,
            BLOCK_K,
            PRODUCT.w_operand,
            NATIVE,
        ).to(COMPUTE)
    return x, w


@triton.jit
def add_product(acc, x, w, x_factor, w_factor, PRODUCT: tl.constexpr):
    """``acc`` [BLOCK_M, BLOCK_N] and the product of a step, times its factors if there are any."""
    if PRODUCT.x_factor or PRODUCT.w_factor:
        # [BLOCK_M, BLOCK_N]
        part = tl.dot(x, tl.trans(w), input_precision="ieee", out_dtype=tl.float32)
        if PRODUCT.x_factor and PRODUCT.w_factor:
            factor = (x_factor * w_factor)[:, None]
        elif PRODUCT.x_factor:
            factor = x_factor[:, None]
        else:
            factor = w_factor
        return tl.fma(part, tl.broadcast_to(factor, acc.shape), acc)
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision="ieee")

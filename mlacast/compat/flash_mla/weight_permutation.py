"""The one-time weight reordering that goes with the fused functions' element orders.

``permute_q_b_proj`` makes the query projection emit the order that the fused functions read
("chunk16"); ``permute_wv_proj`` makes the grouped output projection accept the order that they
write ("chunk32"). Both move bytes only: no code is re-quantised.
"""

from __future__ import annotations

from typing import Any

import torch

from mlacast.errors import check_tensor, check_type, fail
from mlacast.layouts.sf_mn_major import allocate_mn_major

_Q_CHUNK = 16
_O_CHUNK = 32
_SCALES_PER_WORD = 4
_WV_GRANULARITIES = (32, 64, 128, 256, 512)


def _unpack_pair(op: str, weight_and_sf: object) -> tuple[Any, Any]:
    if not isinstance(weight_and_sf, (tuple, list)):
        raise TypeError(
            f"{op}: weight_and_sf must be a pair (weight, sf), got {type(weight_and_sf).__name__}"
        )
    if len(weight_and_sf) != 2:
        fail(op, "weight_and_sf", "be a pair (weight, sf)", f"{len(weight_and_sf)} values")
    return weight_and_sf[0], weight_and_sf[1]


def _check_words(
    op: str, sf: object, dims: str, sizes: dict[str, Any], device: torch.device
) -> None:
    """Check rank, shape, dtype and device of packed scales, which must not be those of blocks."""
    remedy = "each row of the weight has words of four packed ue8m0 scales"
    check_tensor(op, "sf", sf, dims, sizes, dtype=torch.int32, device=device, remedy=remedy)


def _check_multiple(op: str, argument: str, value: object, divisor: int) -> None:
    check_type(op, argument, value, int, "an int")
    if not isinstance(value, int) or value < 1 or value % divisor:
        requirement = "be positive" if divisor == 1 else f"be a positive multiple of {divisor}"
        fail(op, argument, requirement, value)


def permute_q_b_proj(
    weight_and_sf: tuple[torch.Tensor, torch.Tensor], h_q: int, d_q: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reorder the rows of the query projection to the order in which the fused functions read.

    Row ``h * d_q + d`` moves to ``(d // 16) * (h_q * 16) + h * 16 + d % 16``; the scales of a row
    move with it.

    Args:
        weight_and_sf: ``(w, sf)`` with w [h_q*d_q, r] float8_e4m3fn and sf [h_q*d_q, words] int32,
            four ue8m0 bytes a word, stride 1 along the rows. The granularity of the scales along r
            is not looked at.
        h_q: Query heads, at least 1.
        d_q: Query head dimension, a multiple of 16.

    Returns:
        The pair in the new order: w contiguous, sf with strides (1, h_q*d_q rounded up to 4).

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype, stride or device breaks the contract above.
    """
    op = "permute_q_b_proj"
    weight, sf = _unpack_pair(op, weight_and_sf)
    _check_multiple(op, "h_q", h_q, 1)
    _check_multiple(op, "d_q", d_q, _Q_CHUNK)
    sizes: dict[str, Any] = {"h_q*d_q": h_q * d_q}
    check_tensor(op, "weight", weight, "h_q*d_q r", sizes, dtype=torch.float8_e4m3fn)
    _check_words(op, sf, "h_q*d_q words", sizes, weight.device)
    if sf.stride(0) != 1 and sf.numel() > 0:
        fail(op, "sf", "have stride(0) == 1 (MN-major)", f"strides {list(sf.stride())}")

    def reorder(rows: torch.Tensor) -> torch.Tensor:
        chunks = rows.reshape(h_q, d_q // _Q_CHUNK, _Q_CHUNK, rows.shape[1])
        moved = chunks.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        return moved.view(h_q * d_q, rows.shape[1])

    permuted_sf = allocate_mn_major(h_q * d_q, 1, sf.shape[1], torch.int32, sf.device)[:, 0]
    permuted_sf.copy_(reorder(sf))
    # Bytes move as uint8: copies of float8 are not implemented on every device.
    return reorder(weight.view(torch.uint8)).view(weight.dtype), permuted_sf


def permute_wv_proj(
    weight_and_sf: tuple[torch.Tensor, torch.Tensor], wv_group_size: int, d_o: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reorder the columns of the output projection to the order that the fused functions write.

    Inside a group the 32 columns of chunk c of head h move from ``h * d_o + 32 * c`` to
    ``32 * (c * wv_group_size + h)``, and so do their scales. Scales come back one per 32 columns;
    those of a coarser input are repeated, because a block wider than 32 is torn apart by the
    reordering.

    Args:
        weight_and_sf: ``(w, sf)`` with w [g, d_out, wv_group_size*d_o] float8_e4m3fn and sf [g,
            d_out, words] int32, four ue8m0 bytes a word, stride 1 along d_out. The number of words
            says how many columns share a scale: 32, 64, 128, 256 or 512, all words full.
        wv_group_size: Heads per group, at least 1.
        d_o: Output head dimension, a multiple of 32, with wv_group_size*d_o a multiple of 128.

    Returns:
        The pair in the new order: w contiguous, sf [g, d_out, n] with n = wv_group_size*d_o/128 and
        strides (n*a, 1, a), a = d_out rounded up to 4.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype, stride or device breaks the contract above.
    """
    op = "permute_wv_proj"
    weight, sf = _unpack_pair(op, weight_and_sf)
    _check_multiple(op, "wv_group_size", wv_group_size, 1)
    _check_multiple(op, "d_o", d_o, _O_CHUNK)
    width = wv_group_size * d_o
    if width % (_O_CHUNK * _SCALES_PER_WORD):
        fail(op, "wv_group_size*d_o", "be a multiple of 128", width)
    sizes: dict[str, Any] = {"wv_group_size*d_o": width}
    check_tensor(
        op, "weight", weight, "g d_out wv_group_size*d_o", sizes, dtype=torch.float8_e4m3fn
    )
    _check_words(op, sf, "g d_out words", sizes, weight.device)
    if sf.stride(1) != 1 and sf.shape[1] > 1 and sf.numel() > 0:
        fail(op, "sf", "have stride(1) == 1 (MN-major)", f"strides {list(sf.stride())}")
    groups, d_out, words = sf.shape
    scales = words * _SCALES_PER_WORD
    granularity = width // scales if scales and width % scales == 0 else 0
    if granularity not in _WV_GRANULARITIES:
        wanted = " or ".join(
            str(width // (_SCALES_PER_WORD * columns))
            for columns in _WV_GRANULARITIES
            if width % (_SCALES_PER_WORD * columns) == 0
        )
        fail(op, "sf", f"have {wanted} words for {width} columns (32 to 512 per scale)", words)

    chunks_per_head = d_o // _O_CHUNK
    columns = weight.view(torch.uint8).reshape(
        groups, d_out, wv_group_size, chunks_per_head, _O_CHUNK
    )
    moved = columns.transpose(2, 3).clone(memory_format=torch.contiguous_format)
    permuted = moved.view(groups, d_out, width).view(weight.dtype)

    # A little-endian word holds its four scales in ascending order: its bytes are the scales.
    # A fresh copy, because a view of bytes wants stride 1 even on a last dimension of size 1.
    per_scale = sf.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    per_chunk = per_scale.repeat_interleave(granularity // _O_CHUNK, dim=2)
    by_head = per_chunk.reshape(groups, d_out, wv_group_size, chunks_per_head)
    by_chunk = by_head.transpose(2, 3).reshape(groups, d_out, width // _O_CHUNK)
    packed = by_chunk.view(torch.int32)
    permuted_sf = allocate_mn_major(
        d_out, groups, packed.shape[2], torch.int32, sf.device
    ).transpose(0, 1)
    permuted_sf.copy_(packed)
    return permuted, permuted_sf

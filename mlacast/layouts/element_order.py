"""Element orders: chunk32 of grouped outputs and chunk16 of queries.

Both interleave the heads of a row in small chunks, so that the values which one consumer tile reads
together are neighbours. They are permutations inside a token; the inverse restores the natural
order, head after head.
"""

from __future__ import annotations

from torch import Tensor

from mlacast.errors import fail

HEAD_DIM = 512
CHUNKS32 = HEAD_DIM // 32


def _heads_of_group(op: str, argument: str, width: int, head_width: int) -> int:
    if width % head_width:
        fail(op, argument, f"have a last dimension that is a multiple of {head_width}", width)
    return width // head_width


def _swap(x: Tensor, outer: int, inner: int, chunk: int) -> Tensor:
    """View the last dimension as [outer, inner, chunk] and exchange outer and inner."""
    lead = x.shape[:-1]
    split = x.reshape(*lead, outer, inner, chunk)
    return split.transpose(-3, -2).reshape(*lead, outer * inner * chunk)


def chunk32_position(head: int, dim: int, heads: int) -> int:
    """Return where dimension ``dim`` (0..511) of ``head`` stands in a group of ``heads`` heads."""
    return (dim // 32 * heads + head) * 32 + dim % 32


def to_chunk32(x: Tensor) -> Tensor:
    """Reorder [T, g, w*512] from natural to chunk32: chunk c of head h moves to c*w + h."""
    heads = _heads_of_group("to_chunk32", "x", x.shape[-1], HEAD_DIM)
    return _swap(x, heads, CHUNKS32, 32)


def from_chunk32(x: Tensor) -> Tensor:
    """Reorder [T, g, w*512] from chunk32 to natural order."""
    heads = _heads_of_group("from_chunk32", "x", x.shape[-1], HEAD_DIM)
    return _swap(x, CHUNKS32, heads, 32)


def to_chunk32_sf(sf: Tensor) -> Tensor:
    """Reorder one value per 32 features, [T, g, w*16], from natural to chunk32."""
    heads = _heads_of_group("to_chunk32_sf", "sf", sf.shape[-1], CHUNKS32)
    return _swap(sf, heads, CHUNKS32, 1)


def from_chunk32_sf(sf: Tensor) -> Tensor:
    """Reorder one value per 32 features, [T, g, w*16], from chunk32 to natural order."""
    heads = _heads_of_group("from_chunk32_sf", "sf", sf.shape[-1], CHUNKS32)
    return _swap(sf, CHUNKS32, heads, 1)


def chunk16_position(head: int, dim: int, heads: int) -> int:
    """Return where dimension ``dim`` of ``head`` stands in a token of ``heads`` heads."""
    return dim // 16 * (heads * 16) + head * 16 + dim % 16


def to_chunk16(q: Tensor) -> Tensor:
    """Reorder [s, h, d] from natural to chunk16, same shape; d is a multiple of 16."""
    return _chunk16("to_chunk16", q, natural=True)


def from_chunk16(q: Tensor) -> Tensor:
    """Reorder [s, h, d] from chunk16 to natural order; d is a multiple of 16."""
    return _chunk16("from_chunk16", q, natural=False)


def _chunk16(op: str, q: Tensor, *, natural: bool) -> Tensor:
    tokens, heads, dim = q.shape
    chunks = _heads_of_group(op, "q", dim, 16)
    outer, inner = (heads, chunks) if natural else (chunks, heads)
    flat = q.reshape(tokens, heads * dim)
    return _swap(flat, outer, inner, 16).reshape(tokens, heads, dim)

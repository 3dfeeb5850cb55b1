"""Where the bytes of a token stand inside a page of a KV cache, and how to read and write them.

A record is a data part and a scale part. Inline, each token's scales follow its data; with a
footer, a page holds the data of all its tokens first and their scales after. Pages may be any
distance apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PageLayout:
    """Byte placement inside one page.

    Args:
        data_bytes: Data bytes of a token.
        scale_bytes: Scale bytes of a token, may be 0.
        placement: ``"inline"`` or ``"footer"``.
        page_size: Tokens of a page.
    """

    data_bytes: int
    scale_bytes: int
    placement: str
    page_size: int

    @property
    def data_stride(self) -> int:
        """Bytes from one token's data to the next token's."""
        return self.data_bytes + (self.scale_bytes if self.placement == "inline" else 0)

    @property
    def scale_stride(self) -> int:
        """Bytes from one token's scales to the next token's."""
        return self.scale_bytes + (self.data_bytes if self.placement == "inline" else 0)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a page without padding."""
        return self.page_size * (self.data_bytes + self.scale_bytes)

    def data_offset(self, token: int) -> int:
        """Return the first data byte of ``token``, counted from the start of the page."""
        return token * self.data_stride

    def scale_offset(self, token: int) -> int:
        """Return the first scale byte of ``token``, counted from the start of the page."""
        first = self.data_bytes if self.placement == "inline" else self.page_size * self.data_bytes
        return first + token * self.scale_stride


def record_planes(
    cache: Tensor, data_bytes: int, scale_bytes: int, placement: str
) -> tuple[Tensor, Tensor]:
    """View a cache as its data and scale planes, without copying.

    Args:
        cache: [num_pages, page_size, ...] of bytes, tokens of a page packed; the page stride is
            free.
        data_bytes: Data bytes of a token.
        scale_bytes: Scale bytes of a token.
        placement: ``"inline"`` or ``"footer"``.

    Returns:
        Views [num_pages, page_size, data_bytes] and [num_pages, page_size, scale_bytes] uint8.
        Strides are element counts of 64 bits, so planes reach past 2**31 bytes.
    """
    raw = cache.view(torch.uint8)
    num_pages, page_size = raw.shape[0], raw.shape[1]
    layout = PageLayout(data_bytes, scale_bytes, placement, page_size)
    # One page has no page stride; what the tensor carries there may be anything.
    page_stride = raw.stride(0) if num_pages > 1 else layout.payload_bytes
    start = raw.storage_offset()
    data = raw.as_strided(
        (num_pages, page_size, data_bytes), (page_stride, layout.data_stride, 1), start
    )
    scale = raw.as_strided(
        (num_pages, page_size, scale_bytes),
        (page_stride, layout.scale_stride, 1),
        start + layout.scale_offset(0),
    )
    return data, scale


def read_records(
    cache: Tensor, slots: Tensor, data_bytes: int, scale_bytes: int, placement: str
) -> tuple[Tensor, Tensor]:
    """Copy the records of ``slots`` out of a cache.

    Args:
        cache: As in `record_planes`.
        slots: [n] int32 or int64, all valid: ``page * page_size + offset``.
        data_bytes: Data bytes of a token.
        scale_bytes: Scale bytes of a token.
        placement: ``"inline"`` or ``"footer"``.

    Returns:
        Data [n, data_bytes] and scales [n, scale_bytes], uint8.
    """
    data, scale = record_planes(cache, data_bytes, scale_bytes, placement)
    page, token = _page_and_token(slots, cache.shape[1])
    return data[page, token], scale[page, token]


def write_records(
    cache: Tensor, slots: Tensor, data: Tensor, scale: Tensor, placement: str
) -> None:
    """Write records into ``slots`` of a cache, in place; no other byte is written.

    Args:
        cache: As in `record_planes`.
        slots: [n] int32 or int64, all valid and different.
        data: [n, data_bytes] uint8.
        scale: [n, scale_bytes] uint8.
        placement: ``"inline"`` or ``"footer"``.
    """
    data_plane, scale_plane = record_planes(cache, data.shape[1], scale.shape[1], placement)
    page, token = _page_and_token(slots, cache.shape[1])
    data_plane[page, token] = data
    if scale.shape[1]:
        scale_plane[page, token] = scale


def _page_and_token(slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    slots = slots.to(torch.int64)
    return torch.div(slots, page_size, rounding_mode="floor"), slots % page_size

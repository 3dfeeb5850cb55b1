"""Which bytes of memory tensors occupy, as regions that views share.

Two views of one storage that overlap belong to one region, so that after a replay they overlap
again. A region is cut out of its storage: of a cache of many layers only the layer in use is saved.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mlacast.call_log.errors import DumpError

# What a restored region keeps of its surroundings: enough for the alignment of every vector load,
# and for views that do not fill their storage to be seen as such.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Region:
    """Bytes of one storage.

    Attributes:
        content: [size] uint8 alias of the bytes.
        before: Bytes of the storage in front of the region.
        after: Bytes of the storage behind it.
    """

    content: Tensor
    before: int
    after: int

    @property
    def size(self) -> int:
        """Bytes of the region."""
        return self.content.shape[0]


@dataclass(frozen=True)
class Place:
    """Where a tensor stands: a region by its number and a first byte; None for no bytes at all."""

    region: int | None
    offset: int


def extent(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes from the first to the last element of a strided tensor, 0 for an empty one."""
    if any(size == 0 for size in shape):
        return 0
    steps = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (steps + 1) * itemsize


def alias_bytes(storage: torch.UntypedStorage, start: int, size: int) -> Tensor:
    """Return [size] uint8 that shares the bytes of ``storage`` from ``start`` on."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, start, (size,), (1,))


def place_tensors(
    tensors: Sequence[Tensor], known: Sequence[Region] = ()
) -> tuple[list[Region], list[Place]]:
    """Cut the storages of plain strided tensors into regions.

    Args:
        tensors: Tensors that are alive until the regions are no longer used.
        known: Regions found before; a tensor inside one of them is placed there.

    Returns:
        ``known`` followed by the new regions, and the place of each tensor.
    """
    regions = list(known)
    places = [Place(None, 0)] * len(tensors)
    homeless: list[tuple[_Span, int]] = []
    for index, tensor in enumerate(tensors):
        if tensor.numel() == 0 or tensor.device.type == "meta":
            continue
        span = _span_of(tensor)
        found = _find(span, regions)
        if found is None:
            homeless.append((span, index))
        else:
            places[index] = found
    groups: list[list[tuple[_Span, int]]] = []
    reach = -1
    for member in sorted(homeless):
        span = member[0]
        # Views that only touch stay apart: neither can be reached through the other.
        if groups and groups[-1][0][0].storage == span.storage and span.start < reach:
            groups[-1].append(member)
            reach = max(reach, span.stop)
        else:
            groups.append([member])
            reach = span.stop
    for group in groups:
        start, stop = group[0][0].start, max(span.stop for span, _ in group)
        storage = tensors[group[0][1]].untyped_storage()
        content = alias_bytes(storage, start, stop - start)
        regions.append(Region(content, start, storage.nbytes() - stop))
        for span, index in group:
            places[index] = Place(len(regions) - 1, span.start - start)
    return regions, places


class _Span(NamedTuple):
    """Device, address and bytes of a storage, and the range of bytes in it."""

    storage: tuple[str, int, int]
    start: int
    stop: int


def _span_of(tensor: Tensor) -> _Span:
    storage = tensor.untyped_storage()
    start = int(tensor.storage_offset()) * tensor.element_size()
    size = extent(tensor.shape, tensor.stride(), tensor.element_size())
    identity = (str(tensor.device), storage.data_ptr(), storage.nbytes())
    return _Span(identity, start, start + size)


def _find(span: _Span, regions: Sequence[Region]) -> Place | None:
    for number, region in enumerate(regions):
        whole = _span_of(region.content)
        if whole.storage == span.storage and whole.start <= span.start and span.stop <= whole.stop:
            return Place(number, span.start - whole.start)
    return None


def restore_region(content: Tensor, before: int, after: int, device: torch.device | str) -> Region:
    """Return a region with the bytes of ``content`` in a storage of its own on ``device``.

    Args:
        content: [size] uint8 on the CPU.
        before: Bytes that the original storage had in front; a few of them are allocated.
        after: Bytes that it had behind; likewise.
        device: Where to.
    """
    lead = before if before < _ALIGNMENT else _ALIGNMENT + before % _ALIGNMENT
    tail = min(after, _ALIGNMENT)
    base = torch.zeros(lead + content.shape[0] + tail, dtype=torch.uint8, device=device)
    base[lead : lead + content.shape[0]] = content.to(device)
    part = alias_bytes(base.untyped_storage(), lead, content.shape[0])
    return Region(part, lead, tail)


def view_of(
    region: Region, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Return the tensor that starts ``offset`` bytes into a region.

    Raises:
        DumpError: It would reach outside the region, or its elements are not aligned.
    """
    view = torch.empty(0, dtype=dtype, device=region.content.device)
    itemsize = view.element_size()
    if offset < 0 or offset + extent(shape, stride, itemsize) > region.size:
        raise DumpError(
            f"a view of shape {list(shape)} and strides {list(stride)} at byte {offset} reaches "
            f"outside its {region.size} saved bytes"
        )
    start = region.content.storage_offset() + offset
    if start % itemsize:
        raise DumpError(f"a view of {dtype} starts at byte {offset}, between two elements")
    storage = region.content.untyped_storage()
    return view.set_(storage, start // itemsize, tuple(shape), tuple(stride))


def host_memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a buffer, valid while the tensor lives."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "bytes in a row on the host"
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")

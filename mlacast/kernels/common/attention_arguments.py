"""Host side of what the attention kernels share: FP8 queries, sinks, tables, scales, lists."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.rope import Rope
from mlacast.kernels.config.attention import ScaleConfig


class Scales(NamedTuple):
    """The scales of scores and values: numbers and tensors, of which a kernel reads one each."""

    sm_scale: float
    v_scale: float
    sm_scale_tensor: torch.Tensor
    v_scale_tensor: torch.Tensor

    @property
    def in_pairs(self) -> tuple[float, torch.Tensor, float, torch.Tensor]:
        """Number and tensor of the scores, then of the values."""
        return (self.sm_scale, self.sm_scale_tensor, self.v_scale, self.v_scale_tensor)


class CachePool(NamedTuple):
    """One cache of a sparse decode with its index rows, and how many entries of each count."""

    cache: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor | None
    kv_format: KvFormat


def extra_pool(
    cache: torch.Tensor | None,
    indices: torch.Tensor | None,
    lengths: torch.Tensor | None,
    kv_format: KvFormat | None,
) -> CachePool | None:
    """The second pool of a call, None where there is none; never a part of one."""
    if cache is None or indices is None or kv_format is None:
        return None
    return CachePool(cache, indices, lengths, kv_format)


def query_operand(q: torch.Tensor) -> torch.Tensor:
    """The query as a kernel argument: e4m3 codes as bytes, which kernels decode themselves."""
    return q.view(torch.uint8) if q.dtype == torch.float8_e4m3fn else q


def cache_operand(cache: torch.Tensor, kv_format: KvFormat) -> torch.Tensor:
    """A cache as a portable kernel's argument: plain rows in elements, records in bytes."""
    return cache if kv_format.name == "BF16" else cache.view(torch.uint8)


def list_arguments(indices: torch.Tensor, lengths: torch.Tensor | None) -> list[Any]:
    """Index rows and their lengths as kernel arguments: each with its stride, width between."""
    length_stride = 0 if lengths is None else lengths.stride(0)
    return [
        indices,
        indices.stride(0),
        indices.shape[1],
        indices if lengths is None else lengths,
        length_stride,
    ]


def rope_arguments(
    attn_sink: torch.Tensor | None, rope: Rope | None, absent: torch.Tensor, words: torch.Tensor
) -> list[Any]:
    """Sink, table, its stride and rows, positions and their stride as kernel arguments.

    Args:
        attn_sink: [h_q] float32, or None.
        rope: The rotation, or None.
        absent: Stands for a sink or table that is not there.
        words: int32, stands for absent positions.
    """
    sink = absent if attn_sink is None else attn_sink
    if rope is None:
        return [sink, absent, 0, 0, words, 0]
    table, positions = rope.cos_sin_cache, rope.positions
    return [sink, table, table.stride(0), table.shape[0], positions, positions.stride(0)]


def prefill_arguments(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    rope: Rope | None,
    max_logits: torch.Tensor,
    lse: torch.Tensor,
) -> list[Any]:
    """What a sparse prefill reads, and its sums, as kernel arguments.

    Returns:
        q and two strides, kv with its stride and rows, `list_arguments`, `rope_arguments`,
        max_logits and lse.
    """
    return [
        q,
        q.stride(0),
        q.stride(1),
        kv,
        kv.stride(0),
        kv.shape[0],
        *list_arguments(indices, lengths),
        *rope_arguments(attn_sink, rope, lse, indices),
        max_logits,
        lse,
    ]


def split_scales(
    sm_scale: float | torch.Tensor, v_scale: float | torch.Tensor, absent: torch.Tensor
) -> tuple[Scales, ScaleConfig]:
    """Split the scales into numbers and tensors, and say which of them kernels read.

    Args:
        sm_scale: A number, or one float32 element on the device.
        v_scale: Likewise.
        absent: Stands for a tensor where there is none.
    """
    sm_on_device, v_on_device = (isinstance(x, torch.Tensor) for x in (sm_scale, v_scale))
    numbers = [1.0 if isinstance(x, torch.Tensor) else x for x in (sm_scale, v_scale)]
    tensors = [x if isinstance(x, torch.Tensor) else absent for x in (sm_scale, v_scale)]
    return Scales(*numbers, *tensors), ScaleConfig(sm_on_device, v_on_device)

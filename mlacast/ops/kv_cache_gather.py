"""``kv_cache_gather``: dequantise records of a paged cache."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.ops import value_checks
from mlacast.ops.known_calls import PUBLIC, call_functional
from mlacast.ops.kv_cache_append import check_cache_arguments
from mlacast.ops.query import check_backend

OP = "kv_cache_gather"


def kv_cache_gather(
    cache: torch.Tensor, slots: torch.Tensor, kv_format: KvFormat, *, backend: str | None = None
) -> torch.Tensor:
    """Read slots of a paged cache as bfloat16 rows.

    Args:
        cache: [num_pages, page_size, bytes] or [num_pages, page_size, 1, bytes] in ``kv_format``.
        slots: [n] int32 or int64, ``page * page_size + offset``; repeats allowed. A slot outside
            the cache gives a row of zeros and no memory access.
        kv_format: Format of ``cache``.
        backend: "reference", "triton", "hopper", or None for the best that covers the call.

    Returns:
        [n, d_qk] bfloat16: ``code * scale``, rounded once. No slots give an empty tensor.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call gives the same bits, on every device.

    Source: byte maps in docs/formats.md.
    """
    values = (cache, slots, kv_format, backend)
    repeated: torch.Tensor | None = PUBLIC.repeat(OP, values)
    if repeated is not None:
        return repeated
    known = PUBLIC.find(OP, values)
    if known is None:
        check_cache_arguments(OP, cache, slots, kv_format)
        check_backend(OP, backend)
    d_qk = cache.shape[-1] if kv_format.d_qk is None else kv_format.d_qk
    arguments = (cache, slots, kv_format.name, d_qk, backend or "")
    return call_functional(torch.ops.mlacast.kv_cache_gather, OP, known, values, arguments)


def required_features(kv_format: str) -> frozenset[str]:
    """Features that a backend needs for this call."""
    return frozenset({f"kv:{kv_format}"})


def run(cache: torch.Tensor, slots: torch.Tensor, kv_format: str, d_qk: int, backend: str) -> Any:
    """Eager body of ``torch.ops.mlacast.kv_cache_gather``."""
    impl = select(
        OP, required_features(kv_format), arch_of(cache.device), requested_backend(OP, backend)
    )
    if slots.shape[0] == 0:
        return torch.empty((0, d_qk), dtype=torch.bfloat16, device=cache.device)
    if value_checks.validation_requested(OP, cache.device):
        value_checks.check_slots(OP, slots, cache.shape[0] * cache.shape[1])
    return load(impl.target)(cache, slots, kv_format=KvFormat.from_name(kv_format))

"""``kv_cache_append``: quantise latents into a paged cache."""

from __future__ import annotations

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.errors import check_tensor, check_type, fail
from mlacast.ops import value_checks
from mlacast.ops.overlap import check_no_overlap
from mlacast.ops.query import check_backend

OP = "kv_cache_append"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def kv_cache_append(
    latent: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    kv_format: KvFormat,
    *,
    backend: str | None = None,
) -> None:
    """Write latent rows, already rotated, to their slots of a paged cache, in place.

    Args:
        latent: [n, d_qk] bfloat16, float16 or float32, last dimension contiguous.
        slots: [n] int32 or int64, ``page * page_size + offset``. Negative slots and slots past the
            end are skipped; of rows with the same slot the first one wins.
        cache: [num_pages, page_size, bytes] or [num_pages, page_size, 1, bytes] in ``kv_format``.
            Only the bytes of the addressed records are written.
        kv_format: Format of ``cache``.
        backend: "reference", "triton", "hopper", or None for the best that covers the call.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract; nothing has been
            written.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call writes the same bytes, on every device. No rows: nothing is written.

    Source: formulas and byte maps in docs/formats.md.
    """
    d_qk = check_cache_arguments(OP, cache, slots, kv_format)
    sizes = {"n": slots.shape[0], "d_qk": d_qk}
    remedy = "there is one row per slot"
    check_tensor(OP, "latent", latent, "n d_qk", sizes, dtype=_DTYPES, remedy=remedy)
    check_tensor(OP, "latent", latent, "n d_qk", {}, device=cache.device, last_dim_contiguous=True)
    check_backend(OP, backend)
    torch.ops.mlacast.kv_cache_append(latent, slots, cache, kv_format.name, backend or "")


def check_cache_arguments(
    op: str, cache: torch.Tensor, slots: torch.Tensor, kv_format: KvFormat
) -> int:
    """Check a cache and its slots; return d_qk."""
    check_type(op, "kv_format", kv_format, KvFormat, "a mlacast.KvFormat such as KvFormat.V4")
    if not isinstance(cache, torch.Tensor):
        raise TypeError(f"{op}: cache must be a torch.Tensor, got {type(cache).__name__}")
    _, _, d_qk = kv_format.check_cache(op, "cache", cache)
    check_tensor(op, "slots", slots, "n", {}, dtype=(torch.int32, torch.int64))
    if slots.device != cache.device:
        fail(op, "slots", f"be on {cache.device} like the other arguments", slots.device)
    return d_qk


def required_features(kv_format: str) -> frozenset[str]:
    """Features that a backend needs for this call."""
    return frozenset({f"kv:{kv_format}"})


def run(
    latent: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, kv_format: str, backend: str
) -> None:
    """Eager body of ``torch.ops.mlacast.kv_cache_append``."""
    impl = select(
        OP, required_features(kv_format), arch_of(cache.device), requested_backend(OP, backend)
    )
    if slots.shape[0] == 0:
        return
    if value_checks.validation_requested(OP, cache.device):
        value_checks.check_slots(OP, slots, cache.shape[0] * cache.shape[1])
    check_no_overlap(OP, [("cache", cache)], [("latent", latent), ("slots", slots)])
    load(impl.target)(latent, slots, cache, kv_format=KvFormat.from_name(kv_format))

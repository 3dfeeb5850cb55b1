"""``kv_cache_append``: quantise latents into a paged cache."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.rope import Rope
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.errors import check_finite, check_tensor, check_type, fail
from mlacast.ops import value_checks
from mlacast.ops.known_calls import PUBLIC, call_operator
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
    norm_weight: torch.Tensor | None = None,
    norm_eps: float | None = None,
    rope: Rope | None = None,
    backend: str | None = None,
) -> None:
    """Write latent rows to their slots of a paged cache, in place.

    Norm and rotation come first where they are asked for, in float32 and each rounded to bfloat16,
    so that the bytes are those of separate bfloat16 steps before this one::

        x[:512] = bf16(x[:512] / sqrt(mean(x[:512] ** 2) + norm_eps) * norm_weight)
        x[-64:] = bf16(rotate(x[-64:]))

    Args:
        latent: [n, d_qk] bfloat16, float16 or float32, last dimension contiguous.
        slots: [n] int32 or int64, ``page * page_size + offset``. Negative slots and slots past the
            end are skipped; of rows with the same slot the first one wins.
        cache: [num_pages, page_size, bytes] or [num_pages, page_size, 1, bytes] in ``kv_format``.
            Only the bytes of the addressed records are written.
        kv_format: Format of ``cache``.
        norm_weight: [512] bfloat16, float16 or float32, contiguous, or None for ones. Needs
            ``norm_eps``.
        norm_eps: Added to the mean square of an RMSNorm over the first 512 dimensions (all of them
            for d_qk = 512), or None for rows that are normed already.
        rope: Rotation of the last 64 dimensions, one position per row, or None for rows that are
            rotated already.
        backend: "reference", "triton", "hopper", or None for the best that covers the call.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract; nothing has been
            written.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call writes the same bytes, on every device. No rows: nothing is written.

    Source: formulas and byte maps in docs/formats.md.
    """
    values = (latent, slots, cache, kv_format, norm_weight, norm_eps, rope, backend)
    if PUBLIC.repeat(OP, values) is not None:
        return
    known = PUBLIC.find(OP, values)
    if known is None:
        _check(*values)
    arguments = (
        latent,
        slots,
        cache,
        kv_format.name,
        norm_weight,
        norm_eps,
        None if rope is None else rope.cos_sin_cache,
        None if rope is None else rope.positions,
        "" if rope is None else rope.pairing,
        backend or "",
    )
    call_operator(torch.ops.mlacast.kv_cache_append, OP, known, values, arguments, (), None)


def _check(
    latent: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    kv_format: KvFormat,
    norm_weight: torch.Tensor | None,
    norm_eps: float | None,
    rope: Rope | None,
    backend: str | None,
) -> None:
    """Check the arguments of ``kv_cache_append``."""
    d_qk = check_cache_arguments(OP, cache, slots, kv_format)
    sizes = {"n": slots.shape[0], "d_qk": d_qk}
    remedy = "there is one row per slot"
    check_tensor(OP, "latent", latent, "n d_qk", sizes, dtype=_DTYPES, remedy=remedy)
    check_tensor(OP, "latent", latent, "n d_qk", {}, device=cache.device, last_dim_contiguous=True)
    _check_norm(norm_weight, norm_eps, cache.device)
    if rope is not None:
        check_type(OP, "rope", rope, Rope, "a mlacast.Rope or None")
        rope.check(OP, {"s_q": slots.shape[0]}, cache.device)
        if not rope.rotate_query:
            fail(OP, "rope", "have rotate_query=True", "False", "only latents are rotated here")
    check_backend(OP, backend)


def _check_norm(
    norm_weight: torch.Tensor | None, norm_eps: float | None, device: torch.device
) -> None:
    if norm_eps is not None:
        check_type(OP, "norm_eps", norm_eps, (int, float), "a number or None")
        check_finite(OP, "norm_eps", norm_eps, signed=False)
    if norm_weight is None:
        return
    check_tensor(
        OP, "norm_weight", norm_weight, "512", {}, dtype=_DTYPES, device=device, contiguous=True
    )
    if norm_eps is None:
        fail(OP, "norm_eps", "be given together with norm_weight", None)


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


def required_features(
    kv_format: str, norm_eps: float | None, rope_pairing: str | None
) -> frozenset[str]:
    """Features that a backend needs for this call."""
    features = {f"kv:{kv_format}"}
    if norm_eps is not None:
        features.add("kv_norm")
    if rope_pairing is not None:
        features.add(f"rope:{rope_pairing}")
    return frozenset(features)


def run(
    latent: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    kv_format: str,
    norm_weight: torch.Tensor | None,
    norm_eps: float | None,
    cos_sin_cache: torch.Tensor | None,
    positions: torch.Tensor | None,
    pairing: str,
    backend: str,
) -> Any:
    """Eager body of ``torch.ops.mlacast.kv_cache_append``."""
    rope = None
    if cos_sin_cache is not None and positions is not None:
        rope = Rope(cos_sin_cache, positions, pairing)
    features = required_features(kv_format, norm_eps, pairing or None)
    impl = select(OP, features, arch_of(cache.device), requested_backend(OP, backend))
    if slots.shape[0] == 0:
        return None
    if value_checks.validation_requested(OP, cache.device):
        value_checks.check_slots(OP, slots, cache.shape[0] * cache.shape[1])
        value_checks.check_positions(OP, positions, cos_sin_cache, slots >= 0)
    inputs = {"latent": latent, "slots": slots, "norm_weight": norm_weight}
    inputs |= {"rope.cos_sin_cache": cos_sin_cache, "rope.positions": positions}
    check_no_overlap(OP, [("cache", cache)], list(inputs.items()))
    return load(impl.target)(
        latent,
        slots,
        cache,
        kv_format=KvFormat.from_name(kv_format),
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        rope=rope,
    )

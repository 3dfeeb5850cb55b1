"""``decode_metadata``: which part of a split-KV decode takes which blocks, on the device."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.errors import check_count, check_tensor, check_type
from mlacast.ops import value_checks
from mlacast.ops.known_calls import PUBLIC, call_operator
from mlacast.ops.overlap import check_no_overlap
from mlacast.ops.query import check_backend

OP = "decode_metadata"
ROW = 8
# More requests than one program of a kernel holds.
MANY_REQUESTS = 8192


def decode_metadata(
    lengths: torch.Tensor,
    *,
    num_parts: int,
    topk: int | None = None,
    overhead: int = 5,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the 64-token blocks of all requests into ``num_parts`` runs of about equal cost.

    With ``n_b = ceil(max(length_b, 1) / 64)``, a request costs ``n_b + overhead`` and a part may
    spend ``payload = ceil(sum_b (n_b + overhead) / num_parts) + overhead``. Each part goes on where
    the one before stopped: while it can pay for the rest of a request, ``overhead`` included, it
    takes all of it; else it takes what is left beyond ``overhead`` as blocks of that request, whose
    next split then opens the next part.

    Nothing is read on the host: the call can be captured in a CUDA graph, and the result serves
    every layer until the lengths change.

    Args:
        lengths: [B] int32, tokens of each request; negative ones count as 0.
        num_parts: Parts, 1 or more: how many programs run at a time.
        topk: Lengths above it count as ``topk``; None for no bound.
        overhead: What starting on a request costs, in blocks.
        backend: "reference", "triton", or None for the best that covers the call.

    Returns:
        parts: [num_parts, 8] int32; a row is (first request, first block of it, last request, block
            after the last one of it, split index of the first request, 0, 0, 0). A part without
            work has first request B, last request B - 1 and zeros.
        num_splits: [B + 1] int32: splits of all requests before each one; the splits of request b
            are rows ``num_splits[b]`` and on of a buffer of partial results.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, device or number breaks the contract.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: Integers only; every backend gives the same values.

    Source: FlashMLA 9241ae3 and MATE (scheduler of sparse decode), rows in MATE's order.
    """
    values = (lengths, num_parts, topk, overhead, backend)
    repeated: tuple[torch.Tensor, torch.Tensor] | None = PUBLIC.repeat(OP, values)
    if repeated is not None:
        return repeated
    known = PUBLIC.find(OP, values)
    if known is None:
        _check(*values)
    batch, device = lengths.shape[0], lengths.device
    parts = torch.empty((num_parts, ROW), dtype=torch.int32, device=device)
    num_splits = torch.empty((batch + 1,), dtype=torch.int32, device=device)
    result = (parts, num_splits)
    arguments = (lengths, *result, topk, overhead, backend or "")
    operator = torch.ops.mlacast.decode_metadata
    call_operator(operator, OP, known, values, arguments, result, result)
    return result


def _check(
    lengths: torch.Tensor, num_parts: int, topk: int | None, overhead: int, backend: str | None
) -> None:
    """Check the arguments of ``decode_metadata``."""
    check_tensor(OP, "lengths", lengths, "B", {}, dtype=torch.int32)
    for name, value, least in (("num_parts", num_parts, 1), ("overhead", overhead, 0)):
        check_type(OP, name, value, int, "an int")
        check_count(OP, name, value, least=least)
    if topk is not None:
        check_type(OP, "topk", topk, int, "an int or None")
        check_count(OP, "topk", topk)
    check_backend(OP, backend)


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device, how many parts to cut for; 1 where there are none to ask."""
    module = getattr(torch, device.type, None)
    ask = getattr(module, "get_device_properties", None)
    if ask is None:
        return 1
    return int(getattr(ask(device), "multi_processor_count", 1))


def required_features(lengths: torch.Tensor) -> frozenset[str]:
    """Features that a backend needs for this call."""
    return frozenset({"batch:many"} if lengths.shape[0] > MANY_REQUESTS else ())


def run(
    lengths: torch.Tensor,
    parts: torch.Tensor,
    num_splits: torch.Tensor,
    topk: int | None,
    overhead: int,
    backend: str,
) -> Any:
    """Eager body of ``torch.ops.mlacast.decode_metadata``."""
    features = required_features(lengths)
    impl = select(OP, features, arch_of(lengths.device), requested_backend(OP, backend))
    check_no_overlap(OP, [("parts", parts), ("num_splits", num_splits)], [("lengths", lengths)])
    if topk is not None and value_checks.validation_requested(OP, lengths.device):
        value_checks.check_lengths(OP, "lengths", lengths, topk)
    return load(impl.target)(
        lengths, topk=topk, overhead=overhead, parts=parts, num_splits=num_splits
    )

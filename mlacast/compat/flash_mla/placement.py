"""Which cache format a tensor holds, from its bytes per token.

The core ops are told the format. FlashMLA's signatures carry none, so these shims infer it, and
only they do. The bytes per token do not say where V4.1 keeps its scales (both placements have 528
and 288 bytes), hence the switch.
"""

from __future__ import annotations

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.errors import check_choice, check_tensor, fail

_PLACEMENTS = ("footer", "inline")
_v41_placement = "footer"


def set_v41_placement(placement: str) -> None:
    """Say where the V4.1 caches given to this module keep their scales.

    The setting holds for the process and for every later call. Like any switch of behaviour it
    belongs at start-up, before caches are written, and not between two calls that share a cache.

    Args:
        placement: "footer" (the default: a page holds all its codes, then all its scales) or
            "inline" (the scales of a token follow its codes).

    Raises:
        ValueError: ``placement`` is neither.
    """
    global _v41_placement
    check_choice("set_v41_placement", "placement", placement, _PLACEMENTS)
    _v41_placement = placement


def v41_placement() -> str:
    """The placement that ``set_v41_placement`` chose: "footer" or "inline"."""
    return _v41_placement


def _formats_by_bytes(d_qk: int, placement: str) -> dict[int, KvFormat]:
    if d_qk == 576:
        return {656: KvFormat.V32}
    if placement == "inline":
        return {584: KvFormat.V4, 528: KvFormat.V41_INLINE, 288: KvFormat.V41_FP4_INLINE}
    return {584: KvFormat.V4, 528: KvFormat.V41, 288: KvFormat.V41_FP4}


def _bytes_per_token(op: str, argument: str, cache: torch.Tensor, device: torch.device) -> int:
    check_tensor(
        op,
        argument,
        cache,
        "num_pages page_size 1 bytes",
        {},
        dtype=(torch.uint8, torch.int8, torch.float8_e4m3fn),
        device=device,
    )
    # A format is looked up by it, so a traced size is specialised here.
    return int(cache.shape[3])


def infer_kv_format(
    op: str,
    argument: str,
    cache: torch.Tensor,
    d_qk: int,
    placement: str,
    device: torch.device,
) -> KvFormat:
    """The format of a primary cache.

    Args:
        op: Name that opens an error message.
        argument: Name of the cache argument.
        cache: [num_pages, page_size, 1, bytes] uint8, int8 or float8_e4m3fn.
        d_qk: Head dimension of the query: 576 (656 bytes) or 512 (584 or 528 bytes).
        placement: Where V4.1 keeps its scales, "footer" or "inline".
        device: Where the cache has to be.

    Raises:
        ValueError: The bytes per token belong to no format that can be a primary cache of this head
            dimension.
    """
    size = _bytes_per_token(op, argument, cache, device)
    kv_format = _formats_by_bytes(d_qk, placement).get(size)
    if kv_format is None or size == 288:
        known = "656 (V3.2)" if d_qk == 576 else "584 (V4) or 528 (V4.1)"
        remedy = (
            "the 288-byte FP4 format is an extra cache beside a 528-byte one only"
            if size == 288
            else "name other formats with kv_format= of mlacast.sparse_mla_decode"
        )
        fail(op, argument, f"have {known} bytes per token with d_qk={d_qk}", size, remedy)
    kv_format.check_cache(op, argument, cache)
    return kv_format


def infer_extra_kv_format(
    op: str,
    argument: str,
    cache: torch.Tensor,
    primary: KvFormat,
    placement: str,
    device: torch.device,
) -> KvFormat:
    """The format of an extra cache: the primary one, or V4.1 FP4 (288 bytes) beside V4.1 (528).

    Args:
        op: Name that opens an error message.
        argument: Name of the cache argument.
        cache: [num_pages, page_size, 1, bytes] uint8, int8 or float8_e4m3fn.
        primary: Format of the primary cache.
        placement: Where V4.1 keeps its scales, "footer" or "inline".
        device: Where the cache has to be.

    Raises:
        ValueError: The bytes per token do not go with the primary cache.
    """
    size = _bytes_per_token(op, argument, cache, device)
    primary_size = primary.bytes_per_token()
    allowed = {primary_size: primary}
    if primary_size == 528:
        allowed[288] = _formats_by_bytes(512, placement)[288]
    if size not in allowed:
        known = " or ".join(str(choice) for choice in allowed)
        fail(
            op,
            argument,
            f"have {known} bytes per token beside a {primary_size}-byte primary cache",
            size,
            "name other pairs with extra_kv_format= of mlacast.sparse_mla_decode",
        )
    kv_format = allowed[size]
    kv_format.check_cache(op, argument, cache)
    return kv_format

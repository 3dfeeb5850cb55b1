"""Latents that are hard to encode, and the kernels of the cache beside the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mlacast
from mlacast.reference import launch as reference
from tests.format_cases import storage_bytes
from tests.scenarios import CacheCase

E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0)


def hostile_latents(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of every size; zeros, non-finite elements, and values at and beside code boundaries."""
    x = torch.randn(rows, width) * torch.exp(torch.randn(rows, 1) * 6)
    x[0], x[1], x[6] = 0.0, -0.0, 1e-30
    # A zero keeps its sign beside others, too.
    x[7, 5::32] = -0.0
    x[2, 3] = x[4, -3] = float("nan")
    x[3, 7], x[3, 9], x[5, -2] = float("inf"), -1.0, -float("inf")
    boundaries = torch.tensor([*E2M1_BOUNDARIES, *(-value for value in E2M1_BOUNDARIES)])
    x[8, :16] = boundaries
    x[9, :16] = torch.nextafter(boundaries, torch.zeros(16))
    x[10, :16] = torch.nextafter(boundaries, boundaries * 2)
    # The largest of the group decides its scale, 1 for 6.
    x[9:11, 15] = -6.0
    x[8:11, 448:464] = x[8:11, :16] * 3.0
    return x.to(dtype)


def fused_options(kind: str, rows: int) -> dict[str, Any]:
    """Options of one kind: "plain", "norm", "weight", "interleaved", "half", or both at once."""
    options: dict[str, Any] = {"norm_weight": None, "norm_eps": None, "rope": None}
    if kind in ("norm", "weight", "all"):
        options["norm_eps"] = 1e-6
    if kind in ("weight", "all"):
        options["norm_weight"] = torch.randn(512).bfloat16()
    if kind in ("interleaved", "half", "all"):
        pairing = "half" if kind == "all" else kind
        positions = torch.randint(-2, 12, (rows,))
        options["rope"] = mlacast.Rope(torch.randn(9, 64), positions, pairing)
    return options


def assert_append_equals_reference(
    cache: CacheCase,
    latent: Tensor,
    slots: Tensor,
    options: dict[str, Any],
    *,
    pages: int = 6,
    page_size: int = 5,
) -> None:
    """Run the kernel and the reference on caches of 0x5A bytes on the CPU."""
    from mlacast.kernels.triton.kv_cache_append import launch_kv_cache_append

    kv_format = mlacast.KvFormat.from_name(cache.name)
    width = None if kv_format.d_qk is not None else cache.d_qk
    results = []
    for run in (launch_kv_cache_append, reference.kv_cache_append):
        target = kv_format.allocate(pages, page_size, d_qk=width)
        storage_bytes(target).fill_(0x5A)
        run(latent, slots, target, kv_format=kv_format, **options)
        results.append(storage_bytes(target))
    differ = (results[0] != results[1]).nonzero().flatten()
    assert differ.numel() == 0, f"{differ.numel()} bytes differ, first at {differ[:8].tolist()}"

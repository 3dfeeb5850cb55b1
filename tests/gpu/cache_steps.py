"""Calls on the device beside the same calls on the CPU, and what the launcher did for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests.format_cases import storage_bytes
from tests.gpu.steps import CUDA, copy_storage
from tests.scenarios import CacheCase, poisoned_cache


def to_device(value: Any) -> Any:
    """Tensors and ropes on the device, the rest as it is."""
    if isinstance(value, Tensor):
        return value.to(CUDA)
    if isinstance(value, mlacast.Rope):
        table, positions = value.cos_sin_cache.to(CUDA), value.positions.to(CUDA)
        return mlacast.Rope(table, positions, value.pairing)
    return value


def assert_append_equals_cpu(
    cache: CacheCase, latent: Tensor, slots: Tensor, options: dict[str, Any], pages: int, size: int
) -> None:
    """Append on both; every byte of the storage has to be equal."""
    kv_format = mlacast.KvFormat.from_name(cache.name)
    expected = poisoned_cache(cache, pages, size)
    actual = copy_storage(expected)
    mlacast.kv_cache_append(latent, slots, expected, kv_format, backend="reference", **options)
    on_device = {name: to_device(value) for name, value in options.items()}
    mlacast.kv_cache_append(
        latent.to(CUDA), slots.to(CUDA), actual, kv_format, backend="triton", **on_device
    )
    differ = (storage_bytes(actual).cpu() != storage_bytes(expected)).nonzero().flatten()
    assert differ.numel() == 0, f"{differ.numel()} bytes differ, first at {differ[:8].tolist()}"


def kernels_of(call: Callable[[], object]) -> list[str]:
    """Names of the kernels that a warm call launches."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    return [event.name for event in events]


@contextmanager
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, a new variant of a kernel raises."""
    from triton.runtime.jit import JITFunction

    def refuse(self: Any, key: Any, *rest: Any, **more: Any) -> Any:
        raise AssertionError(f"{self.__name__} would be compiled again for {key}")

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", refuse)
        yield


def replayed(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a call that is warm; nothing in it may wait for the device."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph

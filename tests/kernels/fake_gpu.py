"""A GPU that is none: Triton binds and specialises arguments as ever, launches are only recorded.

Tensors stay on the CPU. What a compiled kernel would be run with is kept in ``FakeGpu.runs``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ARCH = "sm90"


@dataclass
class FakeGpu:
    """Driver and compiler of a device 0.

    Attributes:
        runs: (compiled kernel, what it was run with) of every launch, whether through Triton's
            launcher or through the C function below it.
        compiled: Signature of every variant that was compiled, by the compiled kernel's number.
        device: The current one.
        streams: The current stream of each device.
    """

    runs: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    compiled: list[Any] = field(default_factory=list)
    device: int = 0
    streams: list[int] = field(default_factory=lambda: [7, 8])

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.streams[device]

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def compile(self, variant: Any) -> Any:
        """Return a kernel that records what it is run with."""
        kernel = SimpleNamespace(
            function=len(self.compiled),
            packed_metadata=(4, 1, 0),
            launch_metadata=lambda grid, stream, *arguments: ("metadata", grid),
        )
        kernel.run = _launcher(lambda arguments: self.runs.append((kernel, arguments)))
        self.compiled.append(variant)
        return kernel


def _launcher(record: Callable[[tuple[Any, ...]], None]) -> Any:
    """Triton's launcher over a C function that only records."""
    from triton.backends.nvidia.driver import CudaLauncher

    def launch(*arguments: Any) -> None:
        assert arguments[5:9] == (True, False, None, None), "switches and scratch of the kernel"
        record(arguments[:5] + arguments[9:])

    launcher = CudaLauncher.__new__(CudaLauncher)
    launcher.launch = launch
    # Told apart, as two switches that stand beside each other have to be.
    launcher.launch_cooperative_grid, launcher.launch_pdl = True, False
    launcher.num_ctas = 1
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    return launcher


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Let calls on CPU tensors take the GPU's way, up to the launch."""
    pytest.importorskip("triton", reason="the GPU backends need triton")
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from mlacast.kernels.config.sparse_attention import PortableDecodePlan, portable_decode_plan
    from mlacast.kernels.triton import sparse_mla_decode

    gpu = FakeGpu()

    def do_compile(
        self: Any,
        key: Any,
        signature: Any,
        device: int,
        constexprs: Any,
        options: Any,
        attrs: Any,
        warmup: bool,
    ) -> Any:
        kernel = gpu.compile((self, signature, constexprs, attrs))
        self.device_caches[device][0][key] = kernel
        return kernel

    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr(JITFunction, "_do_compile", do_compile)
    for op in _OPERATIONS:
        module = importlib.import_module(f"mlacast.ops.{op}")
        monkeypatch.setattr(module, "arch_of", lambda device: ARCH)

    def plan_three_splits(
        s_q: int,
        h_q: int,
        width: int,
        multiprocessors: int,
        shared_memory: int,
        num_splits: int | None,
        batch_invariant: bool,
    ) -> PortableDecodePlan:
        return portable_decode_plan(
            s_q, h_q, width, multiprocessors, shared_memory, num_splits or 3, batch_invariant
        )

    monkeypatch.setattr(sparse_mla_decode, "portable_decode_plan", plan_three_splits)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    _forget()
    yield gpu
    _forget()


# Operations that may be called on a fake GPU, and modules with the kernels that they may run.
_OPERATIONS = (
    "sparse_mla_prefill",
    "sparse_mla_decode",
    "dense_mla_prefill",
    "merge_attention_states",
    "v_up_project",
    "grouped_out_project",
    "quantized_linear",
    "schedule",
    "dense_mla_decode",
    "decode_metadata",
    "kv_cache_append",
    "kv_cache_gather",
    "rope_quantize_fp8",
)
_MODULES = (
    "common.combine_splits",
    "triton.decode_metadata",
    "triton.dense_mla_decode",
    "triton.dense_mla_prefill",
    "triton.grouped_out_project",
    "triton.kv_cache_append",
    "triton.kv_cache_gather",
    "triton.merge_attention_states",
    "triton.rope_quantize_fp8",
    "triton.v_up_project",
    "triton.sparse_mla_decode",
    "triton.sparse_mla_prefill",
    "gluon.sm90.grouped_out_project",
    "gluon.sm90.sparse_mla_decode",
    "gluon.sm90.sparse_mla_decode_merge",
    "gluon.sm90.sparse_mla_prefill",
    "gluon.sm90.sparse_mla_prefill_576",
)


def _forget() -> None:
    """Empty the caches of kernels and calls: those of a real GPU must not meet those of a fake."""
    from triton.runtime.jit import JITFunction

    from mlacast.ops import known_calls

    for name in _MODULES:
        module = importlib.import_module(f"mlacast.kernels.{name}")
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()
    known_calls.PUBLIC.clear()
    known_calls.OPERATORS.clear()

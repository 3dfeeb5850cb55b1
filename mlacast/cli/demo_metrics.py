"""What the demo reports about a stage, and how it is computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from mlacast.descriptors.out_format import OutFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor

Result = TypeVar("Result")

# Without fusion a layer launches one kernel for Q norm and RoPE, one for attention and one for the
# inverse RoPE and the cast; with fusion, one in all.
SEPARATE_LAUNCHES = 3
FUSED_LAUNCHES = 1


@dataclass(frozen=True)
class Stage:
    """One stage of the demo.

    Attributes:
        name: "prefill", "decode" or "mixed step".
        tokens: Query tokens.
        launches: Attention launches that mlacast makes: layers times forwards.
        logit_cosine: Cosine of fused and eager logits, None where no logits are formed.
        logit_error: Norm of the difference over the norm of eager's logits.
        out_cosine: Cosine of the attention layers' outputs (the lowest of any layer).
        out_error: Relative error of the attention layers' outputs (mean over layers).
        out_error_bf16: The same with a bf16 attention output, None where not measured.
        bytes_bf16: Bytes of the attention output in bf16.
        bytes_fp8: Bytes of codes and scale factors.
        seconds_eager: Time of transformers' own attention path.
        seconds_mlacast: Time of the fused path.
    """

    name: str
    tokens: int
    launches: int
    logit_cosine: float | None
    logit_error: float | None
    out_cosine: float
    out_error: float
    out_error_bf16: float | None
    bytes_bf16: int
    bytes_fp8: int
    seconds_eager: float
    seconds_mlacast: float

    @property
    def agrees(self) -> bool:
        """Whether every cosine is above 0.99."""
        return min(self.out_cosine, 1.0 if self.logit_cosine is None else self.logit_cosine) > 0.99

    @property
    def bytes_saved(self) -> float:
        """Share of the bf16 bytes that need not be written."""
        return 1.0 - self.bytes_fp8 / self.bytes_bf16


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of two tensors as vectors, in float64."""
    return float(torch.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``b``, in float64."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def stored_bytes(num_tokens: int, num_groups: int, features: int, out_format: OutFormat) -> int:
    """Bytes of codes and scale factors of ``num_tokens`` rows, without padding."""
    rows = QuantizedTensor.empty(num_tokens, num_groups, features, out_format)
    scales = 0 if rows.sf is None else rows.sf.numel() * rows.sf.element_size()
    return rows.data.numel() * rows.data.element_size() + scales


def timed(work: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """Run ``work`` once and return its result and the seconds until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start

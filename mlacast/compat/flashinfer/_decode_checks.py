"""Argument checks that FlashInfer's two MLA decodes share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlacast.errors import (
    UnsupportedError,
    check_finite,
    check_tensor,
    check_type,
    dtype_name,
    fail,
)

Scale = float | torch.Tensor


def check_backend_name(op: str, backend: str, known: Sequence[str]) -> None:
    """Raise ValueError unless the backend is one of FlashInfer's names."""
    if backend not in known:
        names = ", ".join(repr(name) for name in known)
        fail(op, "backend", f"be one of {names}", f"{backend!r}, which is not supported")


def check_scales(op: str, host_only: str, **scales: Scale) -> None:
    """Check scales: finite numbers, or float32 tensors of one element.

    Args:
        op: Name that opens the message.
        host_only: Why tensors are not taken, or "".
        **scales: The scales by argument.
    """
    for argument, scale in scales.items():
        if not isinstance(scale, torch.Tensor):
            check_type(op, argument, scale, (int, float), "a number or a float32 torch.Tensor")
            check_finite(op, argument, scale)
            continue
        if scale.dtype != torch.float32:
            raise TypeError(
                f"{op}: {argument} must have dtype float32, got {dtype_name(scale.dtype)}"
            )
        if host_only:
            fail(op, argument, "be a number", "a torch.Tensor", host_only)
        if scale.dim() > 1 or scale.numel() != 1:
            fail(op, argument, "have one element", f"shape {list(scale.shape)}")


def check_sinks(op: str, sinks: object, heads: int, device: torch.device) -> torch.Tensor | None:
    """Check sinks, a tensor [H] float32 or a list of one, and return the tensor."""
    if isinstance(sinks, (list, tuple)):
        if len(sinks) != 1:
            fail(op, "sinks", "be a tensor or a list of one", f"a list of {len(sinks)}")
        sinks = sinks[0]
    if sinks is None:
        return None
    sizes = {"H": heads}
    check_tensor(
        op, "sinks", sinks, "H", sizes, dtype=torch.float32, device=device, contiguous=True
    )
    assert isinstance(sinks, torch.Tensor), "check_tensor has refused others"
    return sinks


def refuse(op: str, argument: str, requirement: str) -> None:
    """Raise UnsupportedError for an argument that would change the result and is not built."""
    raise UnsupportedError(
        f"{op}: {argument} must {requirement}, got another value", op=op, missing=(argument,)
    )


def check_dcp(
    op: str,
    *,
    enable_dcp: bool,
    cp_world: int,
    cp_rank: int,
    causal_seqlens_kv_global: object,
    return_lse: bool,
    has_sinks: bool,
    is_ragged: bool,
) -> None:
    """Check the arguments of decode context parallelism, which is not built."""
    check_type(op, "enable_dcp", enable_dcp, bool, "a bool")
    check_type(op, "cp_world", cp_world, int, "an int")
    check_type(op, "cp_rank", cp_rank, int, "an int")
    if cp_world < 1:
        fail(op, "cp_world", "be at least 1", cp_world)
    if not 0 <= cp_rank < cp_world:
        fail(op, "cp_rank", f"be in [0, {cp_world})", cp_rank)
    if not enable_dcp:
        if cp_world != 1:
            fail(op, "cp_world", "be 1 without enable_dcp", cp_world)
        if causal_seqlens_kv_global is not None:
            fail(op, "causal_seqlens_kv_global", "be None without enable_dcp", "a value")
        return
    if not return_lse:
        fail(op, "return_lse", "be True with enable_dcp", return_lse, "ranks are merged by lse")
    if has_sinks:
        fail(op, "sinks", "be None with enable_dcp", "a value")
    if is_ragged:
        fail(op, "cum_seq_lens_q", "be None with enable_dcp", "a value")
    refuse(op, "enable_dcp", "be False: merge ranks with mlacast.merge_attention_states")


def check_buffer(
    op: str,
    argument: str,
    tensor: torch.Tensor,
    shape: list[int],
    dtype: torch.dtype,
    device: torch.device,
    other_shape: list[int] | None = None,
) -> None:
    """Check a buffer to write: shape, dtype, device, contiguity."""
    check_type(op, argument, tensor, torch.Tensor, "a torch.Tensor or None")
    if list(tensor.shape) not in (shape, other_shape):
        wanted = f"{shape}" if other_shape in (None, shape) else f"{shape} or {other_shape}"
        fail(op, argument, f"have shape {wanted}", list(tensor.shape))
    if tensor.dtype != dtype:
        fail(op, argument, f"have dtype {dtype_name(dtype)}", dtype_name(tensor.dtype))
    if tensor.device != device:
        fail(op, argument, f"be on {device} like query", tensor.device)
    if not tensor.is_contiguous():
        fail(op, argument, "be contiguous", f"strides {list(tensor.stride())}")

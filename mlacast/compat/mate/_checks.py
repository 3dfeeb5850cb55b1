"""Argument checks of MATE's sparse decode, with MATE's types of errors.

A wrong shape or device is a ValueError here as everywhere; a wrong dtype or memory layout is a
TypeError, which is MATE's choice.
"""

from __future__ import annotations

from typing import Any

import torch

from mlacast.errors import check_tensor, check_type, dtype_name, fail

D_QK = 576
HEADS_PER_REPEAT = 64


def check_top_k(op: str, top_k: int) -> None:
    """Raise unless the width of the index lists is a positive int."""
    check_type(op, "sparse_mla_top_k", top_k, int, "an int")
    if top_k <= 0:
        fail(op, "sparse_mla_top_k", "be positive", top_k)


def check_top_k_blocks(op: str, top_k: int) -> None:
    """Raise ValueError unless the width is a multiple of 64."""
    if top_k % 64:
        fail(op, "sparse_mla_top_k", "be a multiple of 64", top_k)


def check_query_shape(op: str, query: torch.Tensor, sizes: dict[str, Any]) -> None:
    """Check [B, Q, H, 576] with Q and H positive, and a number of heads that MATE has."""
    check_tensor(op, "query", query, f"B Q H {D_QK}", sizes)
    for name in ("Q", "H"):
        if sizes[name] < 1:
            fail(op, "query", f"have {name} of at least 1", f"shape {list(query.shape)}")
    heads = sizes["H"]
    if heads > HEADS_PER_REPEAT and heads % HEADS_PER_REPEAT:
        requirement = f"have at most {HEADS_PER_REPEAT} heads or a multiple of {HEADS_PER_REPEAT}"
        fail(op, "query", requirement, heads, "mlacast.sparse_mla_decode takes any number to 128")


def check_dtype(op: str, argument: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError unless the tensor has this dtype and is contiguous."""
    if tensor.dtype != dtype:
        raise TypeError(
            f"{op}: {argument} must have dtype {dtype_name(dtype)}, got {dtype_name(tensor.dtype)}"
        )
    if not tensor.is_contiguous():
        raise TypeError(
            f"{op}: {argument} must be contiguous, got strides {list(tensor.stride())} for shape "
            f"{list(tensor.shape)}"
        )


def check_device(op: str, argument: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise ValueError unless the tensor is where the query is."""
    if tensor.device != device:
        fail(op, argument, f"be on {device} like query", tensor.device)


def check_seq_lens(
    op: str, seq_lens: torch.Tensor | None, sizes: dict[str, Any], device: torch.device
) -> None:
    """Check lengths [B] or [B, 1] int32."""
    check_type(op, "seq_lens", seq_lens, torch.Tensor, "a torch.Tensor")
    assert seq_lens is not None, "check_type has refused None"
    check_tensor(op, "seq_lens", seq_lens, ("B", "B 1"), sizes)
    if seq_lens.dtype != torch.int32:
        raise TypeError(f"{op}: seq_lens must have dtype int32, got {dtype_name(seq_lens.dtype)}")
    check_device(op, "seq_lens", seq_lens, device)
    if not seq_lens.is_contiguous():
        fail(op, "seq_lens", "be contiguous", f"strides {list(seq_lens.stride())}")

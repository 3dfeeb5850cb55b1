"""Argument checks that the functions of this package share.

First that an argument is a tensor, a number or a flag at all; then shapes, dtypes, strides and
devices of what several functions take. The core ops check again under their own argument names:
these checks are here so that a message names the function and the argument that the caller wrote.
"""

from __future__ import annotations

from typing import Any

import torch

from mlacast.errors import check_finite, check_tensor, check_type, fail

D_V = 512
MAX_HEADS = 128


def check_tensors(op: str, **tensors: object) -> None:
    """Raise TypeError unless every value is a tensor."""
    for argument, value in tensors.items():
        check_type(op, argument, value, torch.Tensor, "a torch.Tensor")


def check_optional_tensors(op: str, **tensors: object) -> None:
    """Raise TypeError unless every value is a tensor or None."""
    for argument, value in tensors.items():
        if value is not None:
            check_type(op, argument, value, torch.Tensor, "a torch.Tensor or None")


def check_flags(op: str, **flags: object) -> None:
    """Raise TypeError unless every value is a bool."""
    for argument, value in flags.items():
        check_type(op, argument, value, bool, "a bool")


def check_numbers(op: str, **numbers: object) -> None:
    """Raise TypeError unless every value is a Python number."""
    for argument, value in numbers.items():
        check_type(op, argument, value, (int, float), "a number")


def check_integers(op: str, **integers: object) -> None:
    """Raise TypeError unless every value is an int."""
    for argument, value in integers.items():
        check_type(op, argument, value, int, "an int")


def check_d_v(op: str, argument: str, value: Any, remedy: str = "") -> None:
    """Raise ValueError unless ``value`` is 512, the only value dimension of MLA's latent."""
    if value != D_V:
        fail(op, argument, f"be {D_V}", value, remedy)


def check_extra_arguments(
    op: str, extra_k_cache: object, extra_indices: object, extra_topk_length: object
) -> None:
    """Raise ValueError unless extra cache, indices and lengths come together as they have to."""
    name = "extra_indices_in_kvcache"
    if extra_k_cache is not None and extra_indices is None:
        fail(op, name, "be given together with extra_k_cache", None)
    if extra_k_cache is None and extra_indices is not None:
        fail(op, "extra_k_cache", f"be given together with {name}", None)
    if extra_k_cache is None and extra_topk_length is not None:
        fail(op, "extra_topk_length", "be None without extra_k_cache", "a tensor")


def check_query(op: str, q: torch.Tensor, dims: str, sizes: dict[str, Any]) -> None:
    """Check a query in natural order: bfloat16, 1 to 128 heads, d_qk 512 or 576; binds its sizes.

    Args:
        op: Name that opens an error message.
        q: The query.
        dims: Its dimensions, with ``h_q`` and ``d_qk`` among them.
        sizes: Sizes of the call, extended here.
    """
    check_tensor(op, "q", q, dims, sizes, dtype=torch.bfloat16, last_dim_contiguous=True)
    if not 1 <= sizes["h_q"] <= MAX_HEADS:
        fail(op, "q", f"have 1 to {MAX_HEADS} heads", sizes["h_q"])
    if sizes["d_qk"] not in (512, 576):
        fail(op, "q", "have 512 or 576 as its last dimension", sizes["d_qk"])


def check_indices(
    op: str,
    argument: str,
    indices: torch.Tensor,
    dims: str,
    sizes: dict[str, Any],
    device: torch.device,
) -> None:
    """Check a list of rows or slots: int32, last dimension contiguous."""
    check_tensor(
        op,
        argument,
        indices,
        dims,
        sizes,
        dtype=torch.int32,
        device=device,
        last_dim_contiguous=True,
    )


def check_lengths(
    op: str,
    argument: str,
    lengths: torch.Tensor | None,
    dims: str,
    sizes: dict[str, Any],
    device: torch.device,
) -> None:
    """Check optional lengths: int32, one per token or request as ``dims`` says."""
    if lengths is None:
        return
    remedy = f"a length for each {'row' if dims == 's_q' else 'request'}"
    check_tensor(
        op, argument, lengths, dims, sizes, dtype=torch.int32, device=device, remedy=remedy
    )


def check_sink(
    op: str, attn_sink: torch.Tensor | None, sizes: dict[str, Any], device: torch.device
) -> None:
    """Check an optional sink: [h_q] float32, contiguous."""
    if attn_sink is not None:
        check_tensor(
            op,
            "attn_sink",
            attn_sink,
            "h_q",
            sizes,
            dtype=torch.float32,
            device=device,
            contiguous=True,
        )


def check_bf16_out(
    op: str, out: torch.Tensor | None, dims: str, sizes: dict[str, Any], device: torch.device
) -> None:
    """Check an optional bfloat16 output: last dimension contiguous, other strides free."""
    if out is not None:
        check_tensor(
            op,
            "out",
            out,
            dims,
            sizes,
            dtype=torch.bfloat16,
            device=device,
            last_dim_contiguous=True,
        )


def check_scale(op: str, argument: str, scale: float) -> None:
    """Raise ValueError unless a score scale is finite."""
    check_finite(op, argument, scale)

"""Checks of the query-side arguments that the attention operations share."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.rope import Rope
from mlacast.errors import UnsupportedError, check_choice, check_tensor, check_type, fail

MAX_HEADS = 128
D_QK_CHOICES = (512, 576)
Q_ORDERS = ("head", "chunk16")


def check_query(op: str, q: torch.Tensor, dims: str, sizes: dict[str, Any]) -> None:
    """Check ``q`` [.., h_q, d_qk]: bfloat16, 1..128 heads, d_qk 512 or 576."""
    check_tensor(op, "q", q, dims, sizes, dtype=torch.bfloat16, last_dim_contiguous=True)
    if not 1 <= sizes["h_q"] <= MAX_HEADS:
        fail(op, "q", f"have 1 to {MAX_HEADS} heads", sizes["h_q"])
    if sizes["d_qk"] not in D_QK_CHOICES:
        fail(op, "q", "have d_qk 512 or 576 as its last dimension", sizes["d_qk"])


def check_sm_scale(op: str, sm_scale: float) -> None:
    """Check that the score scale is a finite host number."""
    check_type(op, "sm_scale", sm_scale, (int, float), "a number")
    if not -float("inf") < sm_scale < float("inf"):
        fail(op, "sm_scale", "be finite", sm_scale)


def check_prologue(
    op: str,
    q: torch.Tensor,
    sizes: dict[str, Any],
    q_norm_eps: float | None,
    rope: Rope | None,
    q_order: str,
) -> None:
    """Check the fused prologue: norm, rotation and element order of the query."""
    check_choice(op, "q_order", q_order, Q_ORDERS)
    if q_norm_eps is not None:
        check_type(op, "q_norm_eps", q_norm_eps, (int, float), "a number or None")
        if not 0.0 <= q_norm_eps < float("inf"):
            fail(op, "q_norm_eps", "be finite and not negative", q_norm_eps)
        if sizes["d_qk"] == 576:
            raise UnsupportedError(
                f"{op}: q_norm_eps must be None for d_qk=576, got {q_norm_eps}; an absorbed query "
                "is normed before absorption",
                op=op,
                missing=("q_norm:576",),
            )
    if q_order == "chunk16":
        if sizes["d_qk"] != 512:
            fail(op, "q_order", "be 'head' for d_qk=576", repr(q_order))
        if sizes["h_q"] > 1 and q.numel() > 0 and q.stride(-2) != sizes["d_qk"]:
            fail(
                op,
                "q",
                "be contiguous within a token for q_order='chunk16'",
                f"strides {list(q.stride())}",
            )
    if rope is not None:
        check_type(op, "rope", rope, Rope, "a mlacast.Rope or None")
        rope.check(op, sizes, q.device)


def check_sink(
    op: str, attn_sink: torch.Tensor | None, sizes: dict[str, Any], device: torch.device
) -> None:
    """Check ``attn_sink`` [h_q] float32."""
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


def check_lengths(
    op: str,
    argument: str,
    lengths: torch.Tensor | None,
    sizes: dict[str, Any],
    device: torch.device,
) -> None:
    """Check a length per row, [s_q] int32."""
    if lengths is not None:
        check_tensor(op, argument, lengths, "s_q", sizes, dtype=torch.int32, device=device)


def check_backend(op: str, backend: str | None) -> None:
    """Check the name of a backend."""
    from mlacast.dispatch.impls import BACKENDS

    check_choice(op, "backend", backend, (None, *BACKENDS))


def query_features(
    d_qk: int, q_norm_eps: float | None, rope_pairing: str | None, q_order: str, has_sink: bool
) -> frozenset[str]:
    """Features that a backend needs for the query side of a call."""
    features = {f"d_qk:{d_qk}", f"q_order:{q_order}"}
    if q_norm_eps is not None:
        features.add("q_norm")
    if rope_pairing is not None:
        features.add(f"rope:{rope_pairing}")
    if has_sink:
        features.add("attn_sink")
    return frozenset(features)

"""Checks of the query-side arguments that the attention operations share."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.rope import Rope
from mlacast.errors import (
    UnsupportedError,
    check_choice,
    check_finite,
    check_tensor,
    check_type,
    dtype_name,
    fail,
)

MAX_HEADS = 128
DECODE_QUERY_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
D_QK_CHOICES = (512, 576)
Q_ORDERS = ("head", "chunk16")


def check_query(
    op: str,
    q: torch.Tensor,
    dims: str,
    sizes: dict[str, Any],
    dtype: torch.dtype | tuple[torch.dtype, ...] = torch.bfloat16,
) -> None:
    """Check ``q`` [.., h_q, d_qk]: dtype, 1..128 heads, d_qk 512 or 576."""
    check_tensor(op, "q", q, dims, sizes, dtype=dtype, last_dim_contiguous=True)
    if not 1 <= sizes["h_q"] <= MAX_HEADS:
        fail(op, "q", f"have 1 to {MAX_HEADS} heads", sizes["h_q"])
    if sizes["d_qk"] not in D_QK_CHOICES:
        fail(op, "q", "have d_qk 512 or 576 as its last dimension", sizes["d_qk"])


def check_sm_scale(op: str, sm_scale: float) -> None:
    """Check that the score scale is a finite host number."""
    check_type(op, "sm_scale", sm_scale, (int, float), "a number")
    check_finite(op, "sm_scale", sm_scale)


def check_decode_scale(
    op: str, argument: str, scale: float | torch.Tensor, device: torch.device
) -> None:
    """Check a scale that may live on the device: a finite number, or one float32 element."""
    if not isinstance(scale, torch.Tensor):
        check_type(op, argument, scale, (int, float), "a number or a torch.Tensor")
        check_finite(op, argument, scale)
        return
    if scale.dim() > 1 or scale.numel() != 1:
        fail(op, argument, "have one element", f"shape {list(scale.shape)}")
    if scale.dtype != torch.float32:
        fail(op, argument, "have dtype float32", dtype_name(scale.dtype))
    if scale.device != device:
        fail(op, argument, f"be on {device} like the other arguments", scale.device)


def number_or_tensor(scale: float | torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """A checked scale as two arguments of an operator, of which the scale is the product."""
    return (1.0, scale) if isinstance(scale, torch.Tensor) else (float(scale), None)


def check_fp8_query(op: str, q: torch.Tensor, **formats: KvFormat | None) -> None:
    """Check that an e4m3 query meets per-tensor FP8 caches only."""
    if q.dtype == torch.float8_e4m3fn:
        for argument, kv_format in formats.items():
            if kv_format not in (None, KvFormat.FP8):
                fail(op, argument, "be KvFormat.FP8 for a float8_e4m3fn q", repr(kv_format))


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
        check_finite(op, "q_norm_eps", q_norm_eps, signed=False)
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
        if not rope.rotate_query and (op != "sparse_mla_decode" or sizes["d_qk"] != 512):
            fail(
                op,
                "rope",
                "have rotate_query=True",
                "False",
                "sparse_mla_decode with d_qk=512 rotates the output alone",
            )
    if q.dtype == torch.float8_e4m3fn:
        rotates = rope is not None and rope.rotate_query
        for argument, is_plain, wanted in (
            ("q_norm_eps", q_norm_eps is None, "be None"),
            ("q_order", q_order == "head", "be 'head'"),
            ("rope", not rotates, "be None or have rotate_query=False"),
        ):
            if not is_plain:
                fail(op, argument, f"{wanted} for a float8_e4m3fn q", "another value")


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


def decode_features(
    q: torch.Tensor,
    sm_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    rotates_query: bool = True,
) -> frozenset[str]:
    """Features that a backend needs for what only a decode takes."""
    features = set()
    if q.dtype == torch.float8_e4m3fn:
        features.add("q:fp8")
    if isinstance(sm_scale, torch.Tensor) or isinstance(v_scale, torch.Tensor):
        features.add("scale:device")
    if isinstance(v_scale, torch.Tensor) or v_scale != 1.0:
        features.add("scale:value")
    if not rotates_query:
        features.add("rope:output_only")
    return frozenset(features)


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

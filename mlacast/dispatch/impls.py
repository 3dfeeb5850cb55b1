"""The table of implementations, in order of preference per operation."""

from __future__ import annotations

from dataclasses import dataclass

from mlacast.dispatch.features import (
    DECODE_FEATURES,
    FP8_FEATURES,
    KV_FEATURES,
    LAYOUT_FEATURES,
    OUT_FEATURES,
    QUERY_FEATURES,
    ROPE_FEATURES,
)

BACKENDS = ("reference", "triton", "hopper")

# Architectures the portable kernels are written for.
PORTABLE_ARCHS = frozenset(
    {"sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121", "hip"}
)


@dataclass(frozen=True)
class Impl:
    """One implementation of one operation.

    Attributes:
        op: Name of the operation.
        backend: Name a caller may ask for.
        target: ``module:function``, imported on first use.
        archs: Architectures it runs on; None means every device torch has.
        features: Features it has; None means every feature, which only the reference may claim.
        requires: Top-level modules it needs, beside torch.
        planner: ``module:function`` that picks the splits of a decode from s_q, h_q, the width of
            both lists, the device and batch_invariant; None for one split.
    """

    op: str
    backend: str
    target: str
    archs: frozenset[str] | None = None
    features: frozenset[str] | None = None
    requires: tuple[str, ...] = ()
    planner: str | None = None

    def __post_init__(self) -> None:
        """Refuse rows that could never be selected."""
        if self.backend not in BACKENDS:
            raise ValueError(f"Impl: backend must be one of {BACKENDS}, got {self.backend!r}")
        if self.features is None and self.backend != "reference":
            raise ValueError(f"Impl: {self.backend} must declare its features for {self.op}")


OPS = (
    "sparse_mla_prefill",
    "sparse_mla_decode",
    "dense_mla_decode",
    "decode_metadata",
    "merge_attention_states",
    "quantize_output",
    "rope_quantize_fp8",
    "kv_cache_append",
    "kv_cache_gather",
    "grouped_out_project",
)

_REFERENCE = tuple(Impl(op, "reference", f"mlacast.reference.launch:{op}") for op in OPS)

# What has been compared with the reference on an H200.
_HOPPER_PREFILL = frozenset(
    {
        "d_qk:512",
        "q_order:head",
        "q_order:chunk16",
        "q_norm",
        "rope:interleaved",
        "rope:half",
        "attn_sink",
        "out:bf16",
        "out:mxfp8:head",
        "out:mxfp8:chunk32",
        "out:fp8_group:128:float32:mn_major",
    }
)

_HOPPER = (
    Impl(
        "sparse_mla_prefill",
        "hopper",
        "mlacast.kernels.gluon.sm90.sparse_mla_prefill:launch_sparse_mla_prefill",
        frozenset({"sm90"}),
        _HOPPER_PREFILL,
        ("triton",),
    ),
)

_PORTABLE = (
    Impl(
        "sparse_mla_prefill",
        "triton",
        "mlacast.kernels.triton.sparse_mla_prefill:launch_sparse_mla_prefill",
        PORTABLE_ARCHS,
        QUERY_FEATURES | LAYOUT_FEATURES | OUT_FEATURES,
        ("triton",),
    ),
    Impl(
        "sparse_mla_decode",
        "triton",
        "mlacast.kernels.triton.sparse_mla_decode:launch_sparse_mla_decode",
        PORTABLE_ARCHS,
        QUERY_FEATURES | DECODE_FEATURES | OUT_FEATURES | KV_FEATURES,
        ("triton",),
        "mlacast.kernels.config.sparse_attention:plan_portable_decode",
    ),
    Impl(
        "dense_mla_decode",
        "triton",
        "mlacast.kernels.triton.dense_mla_decode:launch_dense_mla_decode",
        PORTABLE_ARCHS,
        QUERY_FEATURES | DECODE_FEATURES | OUT_FEATURES | KV_FEATURES,
        ("triton",),
    ),
    Impl(
        "decode_metadata",
        "triton",
        "mlacast.kernels.triton.decode_metadata:launch_decode_metadata",
        PORTABLE_ARCHS,
        frozenset(),
        ("triton",),
    ),
)

# Rotations and casts to bytes, and the caches that such bytes are kept in.
_PORTABLE_BYTES = (
    Impl(
        "rope_quantize_fp8",
        "triton",
        "mlacast.kernels.triton.rope_quantize_fp8:launch_rope_quantize_fp8",
        PORTABLE_ARCHS,
        ROPE_FEATURES | FP8_FEATURES,
        ("triton",),
    ),
    Impl(
        "kv_cache_append",
        "triton",
        "mlacast.kernels.triton.kv_cache_append:launch_kv_cache_append",
        PORTABLE_ARCHS,
        KV_FEATURES | ROPE_FEATURES | {"kv_norm"},
        ("triton",),
    ),
    Impl(
        "kv_cache_gather",
        "triton",
        "mlacast.kernels.triton.kv_cache_gather:launch_kv_cache_gather",
        PORTABLE_ARCHS,
        KV_FEATURES,
        ("triton",),
    ),
)

IMPLS: tuple[Impl, ...] = _HOPPER + _PORTABLE + _PORTABLE_BYTES + _REFERENCE

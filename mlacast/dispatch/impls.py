"""The table of implementations, in order of preference per operation."""

from __future__ import annotations

from dataclasses import dataclass

from mlacast.dispatch.features import (
    DECODE_FEATURES,
    FP8_FEATURES,
    KV_FEATURES,
    LAYOUT_FEATURES,
    MIXED_POOL_FEATURES,
    OUT_FEATURES,
    PROJECT_FEATURES,
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
        cuda: Lowest version of CUDA that torch has to be built for, None for any.
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
    cuda: tuple[int, int] | None = None

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
    "dense_mla_prefill",
    "decode_metadata",
    "merge_attention_states",
    "v_up_project",
    "quantize_output",
    "rope_quantize_fp8",
    "kv_cache_append",
    "kv_cache_gather",
    "grouped_out_project",
    "quantized_linear",
)

_REFERENCE = tuple(Impl(op, "reference", f"mlacast.reference.launch:{op}") for op in OPS)

# What has been compared with the reference on an H200.
_HOPPER_QUERY = frozenset(
    {
        "d_qk:512",
        "q_order:head",
        "q_order:chunk16",
        "q_norm",
        "rope:interleaved",
        "rope:half",
        "attn_sink",
    }
)
_HOPPER_POOLS = frozenset(
    {
        "kv:V32",
        "kv:FP8",
        *(f"{pool}:{name}" for pool in ("kv", "extra_kv") for name in ("V4", "V41", "V41_INLINE")),
        "extra_kv:V41_FP4",
        "extra_kv:V41_FP4_INLINE",
        *(
            f"pools:{main}+{extra}"
            for main in ("V41", "V41_INLINE")
            for extra in ("V41", "V41_INLINE", "V41_FP4", "V41_FP4_INLINE")
            if main != extra
        ),
    }
)

# A latent of 576 dimensions is not normed, comes in head order and is not rotated back.
_HOPPER = (
    Impl(
        "sparse_mla_prefill",
        "hopper",
        "mlacast.kernels.gluon.sm90.sparse_mla_prefill:launch_sparse_mla_prefill",
        frozenset({"sm90"}),
        _HOPPER_QUERY | OUT_FEATURES,
        ("triton",),
    ),
    Impl(
        "sparse_mla_prefill",
        "hopper",
        "mlacast.kernels.gluon.sm90.sparse_mla_prefill_576:launch_sparse_mla_prefill_576",
        frozenset({"sm90"}),
        (_HOPPER_QUERY | OUT_FEATURES | {"d_qk:576"}) - {"d_qk:512", "q_order:chunk16", "q_norm"},
        ("triton",),
    ),
    Impl(
        "sparse_mla_decode",
        "hopper",
        "mlacast.kernels.gluon.sm90.sparse_mla_decode:launch_sparse_mla_decode",
        frozenset({"sm90"}),
        _HOPPER_QUERY | OUT_FEATURES | _HOPPER_POOLS | DECODE_FEATURES | {"d_qk:576"},
        ("triton",),
        "mlacast.kernels.config.sparse_attention:plan_hopper_decode",
    ),
    Impl(
        "dense_mla_prefill",
        "hopper",
        "mlacast.kernels.gluon.sm90.dense_mla_prefill:launch_dense_mla_prefill",
        frozenset({"sm90"}),
        OUT_FEATURES,
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
        QUERY_FEATURES
        | DECODE_FEATURES
        | LAYOUT_FEATURES
        | OUT_FEATURES
        | KV_FEATURES
        | MIXED_POOL_FEATURES,
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

# What a dense layer adds: attention before absorption, its merge with that to cached context, and
# the product after a decode.
_PORTABLE_LAYER = (
    Impl(
        "dense_mla_prefill",
        "triton",
        "mlacast.kernels.triton.dense_mla_prefill:launch_dense_mla_prefill",
        PORTABLE_ARCHS,
        LAYOUT_FEATURES | OUT_FEATURES,
        ("triton",),
    ),
    Impl(
        "merge_attention_states",
        "triton",
        "mlacast.kernels.triton.merge_attention_states:launch_merge_attention_states",
        PORTABLE_ARCHS,
        OUT_FEATURES,
        ("triton",),
    ),
    Impl(
        "v_up_project",
        "triton",
        "mlacast.kernels.triton.v_up_project:launch_v_up_project",
        PORTABLE_ARCHS,
        OUT_FEATURES,
        ("triton",),
    ),
)

# Consumers of the quantised output. The Hopper ones multiply codes by codes.
_FLOAT32_128 = frozenset(
    f"out:fp8_group:128:{sf}:{layout}"
    for sf in ("float32", "float32_pow2")
    for layout in ("row_major", "mn_major")
)
_FLOAT32_128_MN = frozenset(name for name in _FLOAT32_128 if name.endswith("mn_major"))
_UE8M0_32 = frozenset(
    {
        "out:mxfp8:head",
        "out:fp8_group:32:ue8m0_packed:row_major",
        "out:fp8_group:32:ue8m0_packed:mn_major",
    }
)
_HOPPER_PRODUCTS = (_FLOAT32_128 | _UE8M0_32 | PROJECT_FEATURES) - {
    "weights:plain",
    "operands:far_apart",
    "features:partial_blocks",
    "rows:unaligned",
    "groups:apart",
}
_SCALED_MM = "mlacast.kernels.vendor.scaled_mm_grouped_out_project:launch_grouped_out_project"
_SCALED_MM_FEATURES = _FLOAT32_128_MN | {"weights:blocks_128"}
_SCALED_MM_CUDA = (12, 9)
_CONSUMERS = (
    Impl(
        "grouped_out_project",
        "hopper",
        "mlacast.kernels.vendor.deep_gemm_grouped_out_project:launch_grouped_out_project",
        frozenset({"sm90"}),
        _FLOAT32_128_MN
        | {
            "weights:blocks_128",
            "tokens:not_of_4",
            "features:not_of_512",
            "columns:not_of_16",
            "product:small",
        },
        ("deep_gemm",),
    ),
    # Where it has been measured to be the faster one: products that are not small.
    Impl(
        "grouped_out_project",
        "hopper",
        _SCALED_MM,
        frozenset({"sm90"}),
        _SCALED_MM_FEATURES,
        cuda=_SCALED_MM_CUDA,
    ),
    Impl(
        "grouped_out_project",
        "hopper",
        "mlacast.kernels.gluon.sm90.grouped_out_project:launch_grouped_out_project",
        frozenset({"sm90"}),
        _HOPPER_PRODUCTS,
        ("triton",),
    ),
    # Where there is no triton.
    Impl(
        "grouped_out_project",
        "hopper",
        _SCALED_MM,
        frozenset({"sm90"}),
        _SCALED_MM_FEATURES | {"product:small"},
        cuda=_SCALED_MM_CUDA,
    ),
    Impl(
        "grouped_out_project",
        "triton",
        "mlacast.kernels.triton.grouped_out_project:launch_grouped_out_project",
        PORTABLE_ARCHS,
        OUT_FEATURES | PROJECT_FEATURES,
        ("triton",),
    ),
    Impl(
        "quantized_linear",
        "hopper",
        "mlacast.kernels.gluon.sm90.grouped_out_project:launch_quantized_linear",
        frozenset({"sm90"}),
        _HOPPER_PRODUCTS,
        ("triton",),
    ),
    Impl(
        "quantized_linear",
        "triton",
        "mlacast.kernels.triton.grouped_out_project:launch_quantized_linear",
        PORTABLE_ARCHS,
        OUT_FEATURES | PROJECT_FEATURES,
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

IMPLS: tuple[Impl, ...] = (
    _HOPPER + _PORTABLE + _PORTABLE_LAYER + _CONSUMERS + _PORTABLE_BYTES + _REFERENCE
)

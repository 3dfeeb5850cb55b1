"""Names of the features that calls need and implementations declare."""

from __future__ import annotations

from mlacast.descriptors.kv_format import ALL_KV_FORMATS
from mlacast.descriptors.out_format import FP8_GROUP_LAYOUTS, FP8_GROUP_SF, FP8_GROUP_SIZES

QUERY_FEATURES = frozenset(
    {
        "d_qk:512",
        "d_qk:576",
        "q_order:head",
        "q_order:chunk16",
        "q_norm",
        "rope:interleaved",
        "rope:half",
        "attn_sink",
    }
)

# What only a decode has: a query and values in per-tensor FP8, scales on the device, a query that
# comes rotated.
DECODE_FEATURES = frozenset({"q:fp8", "scale:value", "scale:device", "rope:output_only"})

# What a call's strides and numbers ask for beyond the ordinary.
LAYOUT_FEATURES = frozenset(
    {
        "rows:unaligned",
        "heads:far_apart",
        "pages:large",
        "scales:far_apart",
        "groups:partial_heads",
        "sm_scale:not_positive",
    }
)

OUT_FEATURES = frozenset(
    {"out:bf16", "out:fp8_tensor", "out:nvfp4", "out:mxfp8:head", "out:mxfp8:chunk32"}
    | {
        f"out:fp8_group:{size}:{sf}:{layout}"
        for size in FP8_GROUP_SIZES
        for sf in FP8_GROUP_SF
        for layout in FP8_GROUP_LAYOUTS
    }
)

KV_FEATURES = frozenset(
    f"{pool}:{kv_format.name}" for pool in ("kv", "extra_kv") for kv_format in ALL_KV_FORMATS
)

# Two pools of different formats in one call.
MIXED_POOL_FEATURES = frozenset(
    f"pools:{main.name}+{extra.name}"
    for main in ALL_KV_FORMATS
    for extra in ALL_KV_FORMATS
    if main != extra
)

# What the products that consume a quantised output may be asked for, formats apart.
PROJECT_FEATURES = frozenset(
    {
        "weights:plain",
        "weights:blocks_128",
        "weights:groups_32",
        "weights:strided_scales",
        "operands:far_apart",
        "features:partial_blocks",
        "rows:unaligned",
        "scales:of_a_range",
        "columns:not_of_8",
        "columns:not_of_16",
        "features:not_of_512",
        "tokens:not_of_4",
        "groups:apart",
        "product:small",
    }
)

ROPE_FEATURES = frozenset({"rope:interleaved", "rope:half"})
FP8_FEATURES = frozenset({"out:float8_e4m3fn", "out:float8_e5m2"})

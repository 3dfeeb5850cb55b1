"""Drop-in functions by name: the operation that each one runs, and what of it is not built."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DropIn:
    """One function of ``mlacast.compat``.

    Attributes:
        op: Operation that runs its calls.
        not_built: What the library of the same name offers, or arguments it has, that raise here.
    """

    op: str
    not_built: tuple[str, ...]


DROP_INS = {
    "fused_norm_rope_attn_rope_cast.prefill": DropIn(
        "sparse_mla_prefill",
        ("other outputs than MXFP8 in chunk32 order, and head counts that 8 does not divide",),
    ),
    "fused_norm_rope_attn_rope_cast.decode": DropIn(
        "sparse_mla_decode",
        (
            "other outputs than MXFP8 in chunk32 order, and head counts that 8 does not divide",
            "other caches than those of 584, 528 and, as extra one, 288 bytes per token",
        ),
    ),
    "flash_mla_sparse_fwd": DropIn("sparse_mla_prefill", ("other outputs than bfloat16",)),
    "flash_mla_with_kvcache": DropIn(
        "sparse_mla_decode",
        ("other outputs than bfloat16", "dense mode over other caches than bfloat16 ones"),
    ),
    "sparse_mla_fp8_decode": DropIn(
        "sparse_mla_decode",
        ("sinks", "skip-softmax", "a ragged query (cum_seq_lens_q)"),
    ),
    "trtllm_batch_decode_with_kv_cache_mla": DropIn(
        "sparse_mla_decode",
        (
            "decode context parallelism (enable_dcp)",
            "skip-softmax",
            "kv_lora_rank 256",
            "NVFP4 and other packed caches than the 656-byte one",
        ),
    ),
    "trtllm_batch_decode_sparse_mla_dsv4": DropIn(
        "sparse_mla_decode",
        (
            "output layout B, RopeQuant (dsv4_output_scale, dsv4_inv_rope_cos_sin_cache): pass "
            "out_scales and cos_sin_cache, which write the same bytes in layout A",
            "HCA (hca_* arguments, backend 'cute-dsl')",
        ),
    ),
}

"""Small calls of the public functions, core and compat, by the name that logs them."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mlacast
from mlacast import KvFormat
from tests.logging.observed import Log

Call = Callable[[Callable[..., Any]], object]


def rope_for(tokens: int) -> mlacast.Rope:
    angles = torch.arange(64)[:, None] * 10000 ** (-torch.arange(32) / 32)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return mlacast.Rope(table, torch.arange(tokens))


def prefill_arguments() -> dict[str, Any]:
    return {
        "q": torch.randn(3, 4, 512, dtype=torch.bfloat16),
        "kv": torch.randn(20, 512, dtype=torch.bfloat16),
        "indices": torch.randint(0, 20, (3, 8), dtype=torch.int32),
        "sm_scale": 0.05,
    }


def filled_cache(kv_format: KvFormat, pages: int = 2, page_size: int = 16) -> torch.Tensor:
    cache = kv_format.allocate(pages, page_size)
    tokens = pages * page_size
    latent = torch.randn(tokens, kv_format.d_qk or 512, dtype=torch.bfloat16)
    kv_format.append(latent, torch.arange(tokens), cache)
    return cache


def prefill_into_a_range(function: Callable[..., Any]) -> object:
    buffer = mlacast.QuantizedTensor.empty(7, 1, 4 * 512, mlacast.Mxfp8("chunk32"))
    arguments = prefill_arguments()
    return function(**arguments, rope=rope_for(3), q_norm_eps=1e-6, out=buffer[4:])


def prefill_nvfp4(function: Callable[..., Any]) -> object:
    buffer = mlacast.QuantizedTensor.empty(7, 1, 4 * 512, mlacast.Nvfp4(torch.tensor([100.0])))
    return function(**prefill_arguments(), out=buffer[1:4])


def prefill_into_a_tensor(function: Callable[..., Any]) -> object:
    wide = torch.zeros(3, 4, 600, dtype=torch.bfloat16)
    return function(**prefill_arguments(), out=wide[..., :512])


def decode(function: Callable[..., Any]) -> object:
    schedule = mlacast.plan_sparse_decode(2, 4, 8, kv_format=KvFormat.V4, num_splits=2)
    return function(
        torch.randn(2, 4, 512, dtype=torch.bfloat16),
        filled_cache(KvFormat.V4),
        torch.randint(0, 32, (2, 8), dtype=torch.int32),
        kv_format=KvFormat.V4,
        sm_scale=0.05,
        schedule=schedule,
        workspace=torch.zeros(mlacast.workspace_size(schedule), dtype=torch.uint8),
        out_format=mlacast.Fp8Group(128, "float32", "mn_major"),
    )


def append(function: Callable[..., Any]) -> object:
    pool = torch.zeros(3, KvFormat.V4.page_bytes(16), dtype=torch.uint8)
    cache = pool.as_strided((2, 16, 1, 584), (pool.stride(0), 584, 584, 1), pool.stride(0))
    slots = torch.tensor([3, 17, -1])
    return function(torch.randn(3, 512), slots, cache, KvFormat.V4)


def merge(function: Callable[..., Any]) -> object:
    outs = [torch.randn(3, 4, 512, dtype=torch.bfloat16) for _ in range(2)]
    return function(outs, [torch.randn(4, 3), torch.full((4, 3), -torch.inf)])


def dense_prefill(function: Callable[..., Any]) -> object:
    kv = torch.randn(9, 2, 256, dtype=torch.bfloat16)
    buffer = mlacast.QuantizedTensor.empty(9, 1, 512, mlacast.Nvfp4(100.0))
    return function(
        torch.randn(5, 4, 192, dtype=torch.bfloat16),
        torch.randn(9, 2, 192, dtype=torch.bfloat16),
        kv[..., 128:],
        cu_seqlens_q=torch.tensor([0, 2, 5], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 5, 9], dtype=torch.int32),
        max_seqlen_q=3,
        max_seqlen_k=5,
        out=buffer[2:7],
    )


def v_up(function: Callable[..., Any]) -> object:
    weight = torch.randn(4, 256, 512, dtype=torch.bfloat16)[:, 128:].transpose(1, 2)
    return function(
        torch.randn(3, 4, 512, dtype=torch.bfloat16), weight, out_format=mlacast.Fp8Group(64)
    )


def project(function: Callable[..., Any]) -> object:
    out = mlacast.quantize_output(torch.randn(5, 1024), mlacast.Mxfp8(), num_groups=2)
    return function(out[1:4], torch.randn(2, 24, 512, dtype=torch.bfloat16))


def linear(function: Callable[..., Any]) -> object:
    out = mlacast.quantize_output(torch.randn(5, 1024), mlacast.Mxfp8(), num_groups=2)
    codes = torch.randn(24, 1024).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 130, (24, 32), dtype=torch.uint8)
    return function(out[1:4], codes, weight_sf=scales, weight_order="buffer")


def plan(function: Callable[..., Any]) -> object:
    return function(3, 8, 64, kv_format=KvFormat.V32)


def flash_mla_decode(function: Callable[..., Any]) -> object:
    from mlacast.compat import flash_mla

    metadata, _ = flash_mla.get_mla_metadata()
    return function(
        torch.randn(2, 1, 4, 512, dtype=torch.bfloat16),
        filled_cache(KvFormat.V41),
        None,
        None,
        512,
        metadata,
        is_fp8_kvcache=True,
        indices=torch.randint(0, 32, (2, 1, 8), dtype=torch.int32),
    )


def fused_prefill(function: Callable[..., Any]) -> object:
    rope = rope_for(3)
    out_fp8 = torch.zeros(5, 2, 4 * 512, dtype=torch.float8_e4m3fn)
    out_sf = torch.zeros(2 * 16 * 8, dtype=torch.int32).as_strided((5, 2, 16), (1, 128, 8))
    return function(
        True,
        1e-6,
        rope.positions,
        False,
        64,
        rope.cos_sin_cache,
        2,
        32,
        True,
        True,
        True,
        torch.randn(3, 8, 512, dtype=torch.bfloat16),
        torch.randn(20, 1, 512, dtype=torch.bfloat16),
        torch.randint(0, 20, (3, 1, 8), dtype=torch.int32),
        0.05,
        out=(out_fp8[1:4], out_sf[1:4]),
    )


def e4m3(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def mate_decode(function: Callable[..., Any]) -> object:
    from mlacast.compat import mate

    query, seq_lens = e4m3(2, 1, 4, 576), torch.tensor([60, 7], dtype=torch.int32)
    return function(
        query,
        e4m3(4, 16, 576),
        torch.zeros(64, dtype=torch.uint8),
        128,
        512,
        64,
        torch.randint(0, 64, (2, 1, 64), dtype=torch.int32),
        seq_lens,
        64,
        sparse_mla_top_k=64,
        out=torch.zeros(2, 1, 4, 512, dtype=torch.bfloat16),
        metadata=mate.get_batch_decode_metadata_mla(query, seq_lens, 64),
    )


def flashinfer_append(function: Callable[..., Any]) -> object:
    caches = e4m3(3, 4, 512), e4m3(3, 4, 64)
    return function(
        torch.randn(5, 4, 64, dtype=torch.bfloat16),
        torch.randn(5, 64, dtype=torch.bfloat16),
        torch.randn(5, 4, 512, dtype=torch.bfloat16),
        torch.randn(5, 512, dtype=torch.bfloat16),
        None,
        rope_for(1).cos_sin_cache,
        torch.arange(5, dtype=torch.int32),
        caches,
        torch.tensor([2, 0], dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.zeros(5, dtype=torch.int32),
        torch.arange(5, dtype=torch.int32),
        page_size=4,
    )


CALLS: dict[str, tuple[str, Call]] = {
    "prefill": ("sparse_mla_prefill", lambda f: f(**prefill_arguments())),
    "prefill into a range": ("sparse_mla_prefill", prefill_into_a_range),
    "prefill into nvfp4": ("sparse_mla_prefill", prefill_nvfp4),
    "prefill into columns": ("sparse_mla_prefill", prefill_into_a_tensor),
    "decode": ("sparse_mla_decode", decode),
    "append": ("kv_cache_append", append),
    "merge": ("merge_attention_states", merge),
    "dense prefill": ("dense_mla_prefill", dense_prefill),
    "v up": ("v_up_project", v_up),
    "project": ("grouped_out_project", project),
    "linear": ("quantized_linear", linear),
    "plan": ("plan_sparse_decode", plan),
    "flash_mla decode": ("compat.flash_mla.flash_mla_with_kvcache", flash_mla_decode),
    "fused prefill": (
        "compat.flash_mla.fused_norm_rope_attn_rope_cast.prefill",
        fused_prefill,
    ),
    "mate decode": ("compat.mate.sparse_mla_fp8_decode", mate_decode),
    "flashinfer append": (
        "compat.flashinfer.rope_quantize_fp8_append_paged_kv_cache",
        flashinfer_append,
    ),
}


def record(log: Log, name: str, call: Call) -> Path:
    """Make a call of a public function and return its dump."""
    function = pkgutil.resolve_name(f"mlacast.{name}")
    call(log.observe(function, f"mlacast.{name}"))
    return log.dumps[-1]

"""Drawn calls through the drop-in modules: the same problems, in other libraries' conventions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

import mlacast
from mlacast.compat import flash_attn, flash_mla, flashinfer, mate
from mlacast.compat.flash_mla import fused_norm_rope_attn_rope_cast as fused
from tests.fuzz import dense, output_checks, sparse
from tests.fuzz.attention import assert_logarithms
from tests.fuzz.calls import Call
from tests.fuzz.draw import Draw
from tests.fuzz.records import LAYOUTS, Layout
from tests.fuzz.tensors import POISON, assert_unchanged, raw, snapshot
from tests.fuzz.under import Under, all_tensors

BY_NAME = {(layout.name, layout.d_qk): layout for layout in LAYOUTS}
V32, V4 = BY_NAME["V32", 576], BY_NAME["V4", 512]
V41, V41_FP4 = BY_NAME["V41", 512], BY_NAME["V41_FP4", 512]
INLINE, INLINE_FP4 = BY_NAME["V41_INLINE", 512], BY_NAME["V41_FP4_INLINE", 512]
FP8, BF16 = BY_NAME["FP8", 576], BY_NAME["BF16", 576]
MXFP8 = mlacast.Mxfp8("chunk32")


def _with_heads(under: Under, heads: tuple[int, ...]) -> Under:
    return dataclasses.replace(under, sizes=dataclasses.replace(under.sizes, heads=heads))


def _with_infinity(call: Call) -> Tensor:
    """lse as flash_mla and mate have it: +inf for a row without keys."""
    lse = call.expected.lse
    return torch.where(lse.isneginf(), torch.inf, lse)


def _assert_lse(call: Call, actual: Tensor, expected: Tensor) -> None:
    assert_logarithms("lse", actual, expected, call.expected.logit_error)


def _assert_out(call: Call, out: Tensor) -> None:
    assert tuple(out.shape) == call.shape and out.dtype == torch.bfloat16
    flat = out.reshape(call.expected.out.shape)
    output_checks.check_bf16(flat, call.expected.out, call.expected.out_error)


def _fused_arguments(draw: Draw, call: Call, groups: int) -> dict[str, Any]:
    """What both fused functions take, from a core call in their style."""
    given, rope = call.arguments, call.arguments["rope"]
    norm = given.get("q_norm_eps")
    return {
        "enable_q_norm": norm is not None,
        "rms_norm_eps": 1e-6 if norm is None else norm,
        "token_positions": rope.positions,
        "is_rope_neox_style": rope.pairing == "half",
        "rope_dim": 64,
        "cos_sin_cache": rope.cos_sin_cache,
        "n_wv_group": groups,
        "num_per_channels": 32,
        "use_tma_aligned_col_major_sf": True,
        "round_sf": True,
        "use_packed_ue8m0": True,
        "q": given["q"],
        "sm_scale": given["sm_scale"],
        "attn_sink": given.get("attn_sink"),
        "topk_length": given.get("topk_length"),
    }


def _fused_out(
    draw: Draw, tokens: int, groups: int, features: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Rows of a longer buffer of poison, or None; scale columns at any distance."""
    if draw.fixed.chance(40):
        return None
    before, after = draw.integer(0, 5), draw.integer(0, 5)
    size = (before + tokens + after) * groups * features
    codes = torch.full((size,), POISON, dtype=torch.uint8, device=device)
    out_fp8 = codes.view(torch.float8_e4m3fn).view(-1, groups, features)[before : before + tokens]
    words, rows = features // 128, before + tokens + after
    column = rows + draw.fixed.choice((0, 1, 4))
    group = words * column + draw.fixed.choice((0, 5))
    flat = torch.full((groups * group * 4 + 16,), POISON, dtype=torch.uint8, device=device)
    shape, strides = (tokens, groups, words), (1, group, column)
    return out_fp8, flat.view(torch.int32).as_strided(shape, strides, before)


def _check_fused(call: Call, groups: int, out: Any, results: tuple[Tensor, ...]) -> None:
    codes, scales = results[:2]
    if out is not None:
        assert codes is out[0] and scales is out[1], "the given tensors are not what came back"
    heads = call.shape[1]
    shape = (call.shape[0], groups, heads * 512 // groups)
    assert tuple(codes.shape) == shape
    buffer = mlacast.QuantizedTensor(codes, scales, MXFP8, total_tokens=shape[0] + 1)
    expected = call.expected
    output_checks.compare(buffer, expected.out.reshape(shape), expected.out_error.reshape(shape))
    if out is not None:
        codes.view(torch.uint8).fill_(POISON)
        scales.fill_(POISON * 0x01010101)
        for part in out:
            stray = int((raw(part) != POISON).sum())
            assert stray == 0, f"{stray} bytes around the result changed"
    elif shape[0]:
        rows = -(-shape[0] // 4) * 4
        words = shape[2] // 128
        assert scales.stride() == (1, words * rows, rows)
        whole = scales.as_strided((rows, groups, words), scales.stride())
        assert not bool(whole[shape[0] :].any()), "padding of scales is not zero"


def check_fused_prefill(draw: Draw, under: Under) -> None:
    """``fused_norm_rope_attn_rope_cast.prefill``."""
    call = sparse.draw_prefill(draw, _with_heads(under, (8, 16)), style="fused")
    groups = draw.fixed.choice((1, 2, 4, 8))
    arguments = _fused_arguments(draw, call, groups)
    kv, indices = call.arguments["kv"], call.arguments["indices"]
    arguments["kv"] = kv if kv.dim() == 3 else kv.unsqueeze(1)
    arguments["indices"] = indices if indices.dim() == 3 else indices.unsqueeze(1)
    out = _fused_out(draw, call.shape[0], groups, call.shape[1] * 512 // groups, under.device)
    before = snapshot(all_tensors(arguments))
    *results, max_logits, lse = fused.prefill(**arguments, out=out)
    assert_unchanged(all_tensors(arguments), before)
    _assert_lse(call, lse, _with_infinity(call))
    _assert_lse(call, max_logits, call.expected.max_logits)
    _check_fused(call, groups, out, tuple(results))


def _fused_partners(layout: Layout, fp8: bool) -> list[Layout]:
    more = {"V41": [V41_FP4], "V41_INLINE": [INLINE_FP4]}
    return [layout, *more.get(layout.name, [])]


def check_fused_decode(draw: Draw, under: Under) -> None:
    """``fused_norm_rope_attn_rope_cast.decode``, with the scales of V4.1 in either place."""
    call = sparse.draw_decode(
        draw,
        _with_heads(under, (8, 16)),
        style="fused",
        layouts=(V4, V41, INLINE),
        partners=_fused_partners,
        fp8_query=False,
    )
    groups = draw.fixed.choice((1, 2, 4, 8))
    given = call.arguments
    arguments = _fused_arguments(draw, call, groups)
    arguments["k_cache"] = _four_dims(given["k_cache"])
    arguments["indices_in_kvcache"] = given["indices"]
    if "extra_k_cache" in given:
        arguments["extra_k_cache"] = _four_dims(given["extra_k_cache"])
        arguments["extra_indices_in_kvcache"] = given["extra_indices"]
        arguments["extra_topk_length"] = given.get("extra_topk_length")
    out = _fused_out(draw, call.shape[0], groups, call.shape[1] * 512 // groups, under.device)
    name = given["kv_format"].name
    flash_mla.set_v41_placement("inline" if "INLINE" in name else "footer")
    try:
        *results, lse = fused.decode(**arguments, out=out)
    finally:
        flash_mla.set_v41_placement("footer")
    _assert_lse(call, lse, _with_infinity(call))
    _check_fused(call, groups, out, tuple(results))


def _four_dims(cache: Tensor) -> Tensor:
    return cache if cache.dim() == 4 else cache.unsqueeze(2)


def check_sparse_fwd(draw: Draw, under: Under) -> None:
    """``flash_mla_sparse_fwd``."""
    call = sparse.draw_prefill(draw, under, style="plain")
    given = dict(call.arguments)
    for name in ("kv", "indices"):
        given[name] = given[name] if given[name].dim() == 3 else given[name].unsqueeze(1)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(**given)
    _assert_lse(call, max_logits, call.expected.max_logits)
    _assert_lse(call, lse, _with_infinity(call))
    _assert_out(call, out)


def _kvcache_partners(layout: Layout, fp8: bool) -> list[Layout]:
    return [] if layout.d_qk == 576 else _fused_partners(layout, fp8)


def check_with_kvcache(draw: Draw, under: Under) -> None:
    """``flash_mla_with_kvcache`` in sparse mode: a request for each token."""
    call = sparse.draw_decode(
        draw,
        under,
        style="plain",
        layouts=(V32, V4, V41),
        partners=_kvcache_partners,
        fp8_query=False,
    )
    given = call.arguments
    arguments: dict[str, Any] = {
        "q": given["q"].unsqueeze(1),
        "k_cache": _four_dims(given["k_cache"]),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "softmax_scale": given["sm_scale"],
        "is_fp8_kvcache": True,
        "indices": given["indices"].unsqueeze(1),
        "attn_sink": given.get("attn_sink"),
        "topk_length": given.get("topk_length"),
        "extra_topk_length": given.get("extra_topk_length"),
    }
    if "extra_k_cache" in given:
        arguments["extra_k_cache"] = _four_dims(given["extra_k_cache"])
        arguments["extra_indices_in_kvcache"] = given["extra_indices"].unsqueeze(1)
    out, lse = flash_mla.flash_mla_with_kvcache(**arguments)
    _assert_out(call, out.squeeze(1))
    _assert_lse(call, lse.squeeze(2), _with_infinity(call))


def check_dense_kvcache(draw: Draw, under: Under) -> None:
    """``flash_mla_with_kvcache`` in dense mode."""
    call = dense.draw_decode(draw, under, layouts=(BF16,), plain=True)
    given = call.arguments
    out, lse = flash_mla.flash_mla_with_kvcache(
        given["q"],
        _four_dims(given["k_cache"]),
        given["page_table"],
        given["seq_lens"],
        512,
        flash_mla.get_mla_metadata()[0],
        softmax_scale=given["sm_scale"],
        causal=given["causal"],
    )
    _assert_out(call, out)
    _assert_lse(call, lse.transpose(1, 2).flatten(0, 1), _with_infinity(call))


def _id_arguments(draw: Draw, call: Call, requests: bool) -> dict[str, Any]:
    """What the functions that take lists of token ids have in common; a request for each token."""
    given = call.arguments
    cache = given["k_cache"]
    indices = given["indices"].contiguous()
    return {
        "query": given["q"].unsqueeze(1),
        "kv_cache": cache.squeeze(2) if cache.dim() == 4 else cache,
        "workspace_buffer": None,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": indices.unsqueeze(1),
        "seq_lens": given["topk_length"].contiguous() if requests else None,
        "max_seq_len": 4096,
        "sparse_mla_top_k": indices.shape[1],
        "bmm1_scale": given["sm_scale"],
    }


def check_mate_decode(draw: Draw, under: Under) -> None:
    """``mate.sparse_mla_fp8_decode``."""
    call = sparse.draw_decode(
        draw, under, style="plain", layouts=(FP8,), partners=lambda *_: (), fp8_query=True
    )
    given = call.arguments
    if given["indices"].shape[1] == 0 or "attn_sink" in given or "topk_length" not in given:
        return
    arguments = _id_arguments(draw, call, True)
    # Lists are multiples of 64 ids there; what is added counts for nothing.
    ids = arguments["block_tables"]
    ids = torch.nn.functional.pad(ids, (0, -ids.shape[2] % 64), value=-1)
    cache = arguments["kv_cache"].view(torch.uint8).contiguous()
    arguments |= {
        "query": arguments["query"].contiguous(),
        "kv_cache": cache.view(torch.float8_e4m3fn),
        "block_tables": ids,
        "sparse_mla_top_k": ids.shape[2],
        "seq_lens": arguments["seq_lens"].clamp_max(given["indices"].shape[1]),
    }
    out, lse = mate.sparse_mla_fp8_decode(**arguments, return_lse=True)
    _assert_out(call, out.reshape(call.shape))
    _assert_lse(call, lse.reshape(call.shape[:2]), _with_infinity(call))


def check_flashinfer_packed(draw: Draw, under: Under) -> None:
    """``trtllm_batch_decode_with_kv_cache_mla`` over a packed cache: lengths are columns."""
    call = sparse.draw_decode(
        draw, under, style="plain", layouts=(V32,), partners=lambda *_: (), fp8_query=False
    )
    given = call.arguments
    if given["indices"].shape[1] == 0 or "topk_length" not in given:
        return
    arguments = _id_arguments(draw, call, True)
    arguments["kv_cache"] = arguments["kv_cache"].view(torch.uint8)
    sink = given.get("attn_sink")
    out, lse = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        **arguments, sinks=sink, return_lse=True
    )
    _assert_out(call, out.reshape(call.shape))
    expected = call.expected.lse
    if sink is not None:
        expected = torch.logaddexp(expected, sink.double()[None].expand_as(expected))
    bound = call.expected.logit_error + 2.0**-20 * expected.abs().nan_to_num(0, 0, 0) + 2.0**-22
    assert_logarithms("lse", lse.reshape(call.shape[:2]), expected / math.log(2), 2 * bound)


def check_flash_attn(draw: Draw, under: Under) -> None:
    """``flash_attn_varlen_func``."""
    call = dense.draw_prefill(draw, under)
    out, lse = flash_attn.flash_attn_varlen_func(**call.arguments, return_softmax_lse=True)
    assert isinstance(out, Tensor)
    _assert_out(call, out)
    _assert_lse(call, lse.t(), call.expected.lse)

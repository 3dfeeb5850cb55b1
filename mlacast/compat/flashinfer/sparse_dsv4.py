"""``trtllm_batch_decode_sparse_mla_dsv4``: DeepSeek-V4's decode over a window and a second pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mlacast.compat.flashinfer._decode_checks import (
    Scale,
    check_backend_name,
    check_buffer,
    check_scales,
    check_sinks,
)
from mlacast.compat.flashinfer._dsv4_pools import (
    OP,
    D,
    check_pool,
    choose_kernel,
    joint_list,
    separate_lists,
)
from mlacast.compat.flashinfer._ragged import check_cum_seq_lens, ragged_tokens
from mlacast.descriptors.out_format import Fp8Group
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.errors import UnsupportedError, check_tensor, check_type, fail
from mlacast.ops import value_checks
from mlacast.ops.repeatable import repeatable
from mlacast.ops.sparse_mla_decode import sparse_mla_decode

BACKENDS = ("auto", "trtllm-gen", "sparse", "cute-dsl")
HEADS = (8, 16, 32, 64, 128)
HEADS_PER_GROUP = 8


@repeatable("flashinfer.trtllm_batch_decode_sparse_mla_dsv4")
def trtllm_batch_decode_sparse_mla_dsv4(
    query: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor | None,
    sparse_indices: torch.Tensor | None = None,
    compressed_kv_cache: torch.Tensor | None = None,
    sparse_topk_lens: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    kv_layout: str = "HND",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    enable_pdl: bool | None = None,
    swa_topk_lens: torch.Tensor | None = None,
    extra_sparse_indices: torch.Tensor | None = None,
    extra_sparse_topk_lens: torch.Tensor | None = None,
    backend: str = "auto",
    hca_swa_indices: torch.Tensor | None = None,
    hca_compressed_block_tables: torch.Tensor | None = None,
    hca_seq_lens: torch.Tensor | None = None,
    hca_is_causal: bool = True,
    hca_use_persistent: bool = False,
    hca_sparse_indices_format: str | None = None,
    out_scales: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each query token to token ids in two pools, under one softmax.

    The pools' dtype says how they are named. Pools of the query's dtype: ``sparse_indices`` names
    the window pool in its first 128 columns and the compressed pool in the rest, of which
    ``sparse_topk_lens - 128`` count; every window column counts. 584-byte pools:
    ``sparse_indices`` names the window pool, ``extra_sparse_indices`` the compressed one, each with
    its lengths. Ids outside of a pool do not count, wherever they stand.

    With ``out_scales`` the last 64 output dimensions are rotated back (pairs 2i, 2i + 1) at the
    position of the token, and every 128 dimensions of a head are quantised to e4m3 with a power of
    two as scale: layout A of the contract, which equals the "RopeQuant" layout byte for byte.

    Args:
        query: [B, Q, H, 512] bfloat16 or float8_e4m3fn, rotated already; or, with
            ``cum_seq_lens_q``, [T, H, 512]. H is 8, 16, 32, 64 or 128.
        swa_kv_cache: Window pool: [pages, 1, page_size, 512] (or three dimensions) with "HND",
            [pages, page_size, 1, 512] with "NHD", in the query's dtype; or uint8 with 584 bytes per
            token and a bfloat16 query. Any page size and page stride.
        workspace_buffer: Not used.
        sparse_indices: [T, W] int32 ids of tokens, T = B * Q. For pools of the query's dtype W is
            at least 128 and a multiple of 4.
        compressed_kv_cache: Second pool, like the first.
        sparse_topk_lens: [T] int32, columns that count, the 128 of the window included; for pools
            of the query's dtype.
        seq_lens: [B] int32, cached tokens of each request, for pools of the query's dtype and for
            positions with ``out_scales``.
        out: bfloat16 in the query's shape, or with ``out_scales`` float8_e4m3fn [H / 8, T, 8, 512];
            contiguous; or None.
        bmm1_scale: Scales of query and pools times the score scale; a number, or a float32 tensor
            of one element, read on the device (not with 584-byte pools).
        bmm2_scale: Scale of the values times that of the output, likewise; 1 with 584-byte pools.
        sinks: [H] float32, or a list of one such tensor: a logit per head in the denominator.
        kv_layout: "HND" or "NHD".
        cum_seq_lens_q: [B + 1] int32, starts of the requests in a ragged query.
        max_q_len: Most query tokens of a request; given exactly with ``cum_seq_lens_q``.
        enable_pdl: A hint for launches, without effect.
        swa_topk_lens: [T] int32, columns of ``sparse_indices`` that count; for 584-byte pools.
        extra_sparse_indices: [T, m] int32 ids in the compressed pool; for 584-byte pools.
        extra_sparse_topk_lens: [T] int32, given exactly with ``extra_sparse_indices``.
        backend: "auto", or a kernel of FlashInfer, whose limits then hold; ``MLACAST_BACKEND``
            chooses what runs here.
        hca_swa_indices: None: HCA is not built.
        hca_compressed_block_tables: None.
        hca_seq_lens: None.
        hca_is_causal: True.
        hca_use_persistent: Without effect.
        hca_sparse_indices_format: None.
        out_scales: [H / 8, 8, ceil4(T)] int32 to write, contiguous: four ue8m0 bytes for the 128
            dimensions each of a (head, token). Columns past T become 0.
        cos_sin_cache: [max_pos, 64] float32, contiguous, 32 cosines then 32 sines; with
            ``out_scales``.

    Returns:
        ``out``, or a new tensor. A row with nothing to attend is zero.

    Raises:
        TypeError: An argument is of another Python type, or a scale tensor is not float32.
        ValueError: A shape, dtype, stride, device or number breaks the contract; nothing has been
            written.
        UnsupportedError: An argument asks for what is not built, or no backend covers the call.
    """
    check_backend_name(OP, backend, BACKENDS)
    _check_hca(
        backend,
        hca_swa_indices=hca_swa_indices,
        hca_compressed_block_tables=hca_compressed_block_tables,
        hca_seq_lens=hca_seq_lens,
        hca_is_causal=None if hca_is_causal is True else hca_is_causal,
        hca_sparse_indices_format=hca_sparse_indices_format,
    )
    sizes: dict[str, Any] = {}
    _check_query(query, cum_seq_lens_q is not None, sizes)
    check_type(OP, "swa_kv_cache", swa_kv_cache, torch.Tensor, "a torch.Tensor")
    is_packed = choose_kernel(backend, query, swa_kv_cache) == "sparse"
    device, lead = query.device, query.shape[:-2]
    tokens, heads = math.prod(lead), sizes["H"]
    sizes["T"] = tokens
    pool = check_pool("swa_kv_cache", swa_kv_cache, kv_layout, query, is_packed)
    compressed = None
    if compressed_kv_cache is not None:
        name = "compressed_kv_cache"
        _, compressed = check_pool(name, compressed_kv_cache, kv_layout, query, is_packed)
    host_only = "584-byte pools take numbers only" if is_packed else ""
    check_scales(OP, host_only, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale)
    if is_packed and bmm2_scale != 1.0:
        fail(OP, "bmm2_scale", "be 1 with 584-byte pools", bmm2_scale)
    sink = check_sinks(OP, sinks, heads, device)
    if is_packed:
        pools = separate_lists(
            pool,
            compressed,
            sparse_indices,
            swa_topk_lens,
            extra_sparse_indices,
            extra_sparse_topk_lens,
            sizes,
            device,
            sparse_topk_lens=sparse_topk_lens,
        )
    else:
        pools = joint_list(
            pool,
            compressed,
            sparse_indices,
            sparse_topk_lens,
            sizes,
            device,
            swa_topk_lens=swa_topk_lens,
            extra_sparse_indices=extra_sparse_indices,
            extra_sparse_topk_lens=extra_sparse_topk_lens,
        )
    if seq_lens is not None:
        check_tensor(OP, "seq_lens", seq_lens, "B", sizes, dtype=torch.int32, device=device)
    elif out_scales is not None or not is_packed:
        fail(OP, "seq_lens", "be given", None)
    _check_ragged(cum_seq_lens_q, max_q_len, tokens, sizes, device)
    if seq_lens is not None and cum_seq_lens_q is None:
        _check_seq_lens_values(seq_lens, sizes["Q"])
    rope = None
    if out_scales is None:
        if cos_sin_cache is not None:
            fail(OP, "cos_sin_cache", "be None without out_scales", "a value")
        if out is not None:
            check_buffer(OP, "out", out, [*lead, heads, D], torch.bfloat16, device)
        else:
            out = torch.empty((*lead, heads, D), dtype=torch.bfloat16, device=device)
        target: torch.Tensor | QuantizedTensor = out.view(tokens, heads, D)
    else:
        assert seq_lens is not None, "checked above"
        _check_table(cos_sin_cache, device)
        out, target = _quantised_target(out, out_scales, tokens, heads, device)
        positions = _positions(seq_lens, cum_seq_lens_q, lead, tokens)
        assert cos_sin_cache is not None, "checked above"
        rope = Rope(cos_sin_cache, positions, "interleaved", rotate_query=False)
    sparse_mla_decode(
        query.reshape(tokens, heads, D),
        pools.cache,
        pools.indices,
        kv_format=pools.kv_format,
        sm_scale=bmm1_scale,
        v_scale=bmm2_scale,
        topk_length=pools.length,
        extra_k_cache=pools.extra_cache,
        extra_indices=pools.extra_indices,
        extra_topk_length=pools.extra_length,
        extra_kv_format=None if pools.extra_cache is None else pools.kv_format,
        attn_sink=sink,
        rope=rope,
        out=target,
    )
    return out


def _check_hca(backend: str, **arguments: object) -> None:
    """Refuse the arguments of HCA, and the kernel that it belongs to."""
    for argument, value in arguments.items():
        if value is not None and backend in ("trtllm-gen", "sparse"):
            fail(OP, argument, f"be left out for {backend!r}", "a value")
        if value is not None:
            raise UnsupportedError(
                f"{OP}: {argument} must be left out: HCA is not built, got a value",
                op=OP,
                missing=("hca",),
            )
    if backend == "cute-dsl":
        raise UnsupportedError(
            f"{OP}: backend must be 'auto', 'trtllm-gen' or 'sparse': HCA is not built, got "
            "'cute-dsl'",
            op=OP,
            missing=("hca",),
        )


def _check_query(query: torch.Tensor, is_ragged: bool, sizes: dict[str, Any]) -> None:
    """Check [B, Q, H, 512], or [T, H, 512] of a ragged call."""
    remedy = "three dimensions go with cum_seq_lens_q, four without"
    dims = f"T H {D}" if is_ragged else f"B Q H {D}"
    check_tensor(OP, "query", query, dims, sizes, remedy=remedy)
    dtypes = (torch.bfloat16, torch.float8_e4m3fn)
    check_tensor(OP, "query", query, dims, sizes, dtype=dtypes, last_dim_contiguous=True)
    if sizes["H"] not in HEADS:
        requirement = "have " + ", ".join(str(count) for count in HEADS) + " heads"
        fail(OP, "query", requirement, sizes["H"], "mlacast.sparse_mla_decode takes any number")


def _check_ragged(
    cum_seq_lens_q: torch.Tensor | None,
    max_q_len: int | None,
    tokens: int,
    sizes: dict[str, Any],
    device: torch.device,
) -> None:
    """Check that the starts of requests come with the longest of them, and fit."""
    if cum_seq_lens_q is None:
        if max_q_len is not None:
            fail(OP, "max_q_len", "be None without cum_seq_lens_q", max_q_len)
        return
    if max_q_len is None:
        fail(OP, "max_q_len", "be given with cum_seq_lens_q", None)
    check_cum_seq_lens(OP, cum_seq_lens_q, max_q_len, tokens, sizes.get("B"), device)


def _check_seq_lens_values(seq_lens: torch.Tensor, q_len: int) -> None:
    """Check, if values are to be checked, that the cache holds the query tokens."""
    if value_checks.validation_requested(OP, seq_lens.device) and seq_lens.numel():
        low = int(seq_lens.min())
        if low < q_len:
            fail(OP, "seq_lens", f"have values of at least {q_len}, the query tokens", low)


def _check_table(cos_sin_cache: torch.Tensor | None, device: torch.device) -> None:
    """Check the table of the inverse rotation."""
    if cos_sin_cache is None:
        fail(OP, "cos_sin_cache", "be given with out_scales", None)
    check_tensor(
        OP,
        "cos_sin_cache",
        cos_sin_cache,
        "max_pos 64",
        {},
        dtype=torch.float32,
        device=device,
        contiguous=True,
    )


def _quantised_target(
    out: torch.Tensor | None,
    out_scales: torch.Tensor,
    tokens: int,
    heads: int,
    device: torch.device,
) -> tuple[torch.Tensor, QuantizedTensor]:
    """Check or allocate the group-major output, and describe it to the core op."""
    groups = heads // HEADS_PER_GROUP
    columns = (tokens + 3) // 4 * 4
    shape = [groups, HEADS_PER_GROUP, columns]
    check_buffer(OP, "out_scales", out_scales, shape, torch.int32, device)
    shape = [groups, tokens, HEADS_PER_GROUP, D]
    if out is None:
        out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    check_buffer(OP, "out", out, shape, torch.float8_e4m3fn, device)
    target = QuantizedTensor(
        out.view(groups, tokens, HEADS_PER_GROUP * D).permute(1, 0, 2),
        out_scales.permute(2, 0, 1)[:tokens],
        Fp8Group(128, "ue8m0_packed", "mn_major"),
        total_tokens=tokens,
    )
    return out, target


def _positions(
    seq_lens: torch.Tensor,
    cum_seq_lens_q: torch.Tensor | None,
    lead: torch.Size,
    tokens: int,
) -> torch.Tensor:
    """Position of each query token [T]: the cache holds it and those after it already."""
    if cum_seq_lens_q is not None:
        return ragged_tokens(cum_seq_lens_q, tokens).causal_lengths(seq_lens) - 1
    q_len = lead[1]
    offset = torch.arange(-q_len, 0, dtype=torch.int32, device=seq_lens.device)
    return (seq_lens[:, None] + offset).reshape(tokens)

"""The two pools of DeepSeek-V4's sparse decode, checked and taken apart for the core op.

FlashInfer has two contracts for one function. With pools of the query's dtype ("trtllm-gen") one
list names both: its first 128 columns the window pool, the rest the compressed pool, and a length
counts both, the window in full. With 584-byte pools ("sparse") each pool has a list and lengths of
its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.errors import check_choice, check_tensor, check_type, dtype_name, fail
from mlacast.ops import value_checks

OP = "trtllm_batch_decode_sparse_mla_dsv4"
D = 512
PACKED_BYTES = 584
WINDOW = 128


@dataclass(frozen=True)
class Pools:
    """Pools and lists as the core op takes them.

    Attributes:
        kv_format: Format of both pools.
        cache: Window pool [pages, page_size, bytes].
        indices: [T, n] ids in it.
        length: [T] int32 or None.
        extra_cache: Compressed pool, or None if nothing is taken from it.
        extra_indices: [T, m] ids in it, or None.
        extra_length: [T] int32 or None.
    """

    kv_format: KvFormat
    cache: torch.Tensor
    indices: torch.Tensor
    length: torch.Tensor | None
    extra_cache: torch.Tensor | None
    extra_indices: torch.Tensor | None
    extra_length: torch.Tensor | None


def choose_kernel(backend: str, query: torch.Tensor, swa_kv_cache: torch.Tensor) -> str:
    """Name the contract that the call follows: that of the pool's dtype."""
    kernel = "sparse" if swa_kv_cache.dtype == torch.uint8 else "trtllm-gen"
    pools = f"a {dtype_name(query.dtype)} query and {dtype_name(swa_kv_cache.dtype)} pools"
    if backend not in ("auto", kernel):
        wanted = "uint8 pools" if backend == "sparse" else "pools of the query's dtype"
        fail(OP, "backend", f"take these inputs; {backend!r} needs {wanted}", pools)
    if kernel == "sparse" and query.dtype != torch.bfloat16:
        fail(OP, "query", "have dtype bfloat16 for uint8 pools", dtype_name(query.dtype))
    if kernel == "trtllm-gen" and swa_kv_cache.dtype != query.dtype:
        fail(OP, "swa_kv_cache", "have the query's dtype, or be uint8", pools)
    return kernel


def check_pool(
    argument: str, pool: torch.Tensor, kv_layout: str, query: torch.Tensor, is_packed: bool
) -> tuple[KvFormat, torch.Tensor]:
    """Check a pool [pages, 1, page_size, n] (HND, or without the 1) or [pages, page_size, 1, n].

    Returns:
        Its format and the pool as [pages, page_size, n].
    """
    check_type(OP, argument, pool, torch.Tensor, "a torch.Tensor")
    check_choice(OP, "kv_layout", kv_layout, ("HND", "NHD"))
    width = PACKED_BYTES if is_packed else D
    hnd = (f"pages 1 page_size {width}", f"pages page_size {width}")
    dims = hnd if kv_layout == "HND" else (f"pages page_size 1 {width}",)
    dtype = torch.uint8 if is_packed else query.dtype
    check_tensor(OP, argument, pool, dims, {}, dtype=dtype, device=query.device)
    if pool.dim() == 4:
        pool = pool.squeeze(1 if kv_layout == "HND" else 2)
    kv_format = KvFormat.FP8 if dtype == torch.float8_e4m3fn else KvFormat.BF16
    if is_packed:
        kv_format = KvFormat.V4
    kv_format.check_cache(OP, argument, pool)
    return kv_format, pool


def _check_list(
    argument: str, ids: torch.Tensor | None, dims: str, sizes: dict[str, Any], device: torch.device
) -> torch.Tensor:
    """Check a list of ids or lengths that has to be there."""
    if ids is None:
        fail(OP, argument, "be given", None)
    check_tensor(
        OP, argument, ids, dims, sizes, dtype=torch.int32, device=device, last_dim_contiguous=True
    )
    return ids


def _check_absent(kernel: str, **arguments: object) -> None:
    """Raise ValueError for arguments of the other contract."""
    for argument, value in arguments.items():
        if value is not None:
            fail(OP, argument, f"be None for {kernel!r}", "a value")


def joint_list(
    pool: tuple[KvFormat, torch.Tensor],
    compressed: torch.Tensor | None,
    sparse_indices: torch.Tensor | None,
    sparse_topk_lens: torch.Tensor | None,
    sizes: dict[str, Any],
    device: torch.device,
    **other_contract: torch.Tensor | None,
) -> Pools:
    """One list for both pools, the window first ("trtllm-gen")."""
    _check_absent("trtllm-gen", **other_contract)
    ids = _check_list("sparse_indices", sparse_indices, "T W", sizes, device)
    width = ids.shape[1]
    if width < WINDOW or width % 4:
        fail(OP, "sparse_indices", f"have at least {WINDOW} columns, a multiple of 4", width)
    lengths = _check_list("sparse_topk_lens", sparse_topk_lens, "T", sizes, device)
    if compressed is None:
        fail(OP, "compressed_kv_cache", "be given", None, "a layer without one takes any pool")
    if value_checks.validation_requested(OP, device) and lengths.numel():
        low, high = int(lengths.min()), int(lengths.max())
        if low < WINDOW or high > width:
            actual = f"values from {low} to {high}"
            fail(OP, "sparse_topk_lens", f"have values in [{WINDOW}, {width}]", actual)
    kv_format, cache = pool
    if width == WINDOW:
        return Pools(kv_format, cache, ids, None, None, None, None)
    return Pools(
        kv_format, cache, ids[:, :WINDOW], None, compressed, ids[:, WINDOW:], lengths - WINDOW
    )


def separate_lists(
    pool: tuple[KvFormat, torch.Tensor],
    compressed: torch.Tensor | None,
    sparse_indices: torch.Tensor | None,
    swa_topk_lens: torch.Tensor | None,
    extra_sparse_indices: torch.Tensor | None,
    extra_sparse_topk_lens: torch.Tensor | None,
    sizes: dict[str, Any],
    device: torch.device,
    **other_contract: torch.Tensor | None,
) -> Pools:
    """A list for each pool ("sparse")."""
    _check_absent("sparse", **other_contract)
    ids = _check_list("sparse_indices", sparse_indices, "T W", sizes, device)
    lengths = _check_list("swa_topk_lens", swa_topk_lens, "T", sizes, device)
    kv_format, cache = pool
    if (extra_sparse_indices is None) != (extra_sparse_topk_lens is None):
        missing = "extra_sparse_indices"
        if extra_sparse_indices is not None:
            missing = "extra_sparse_topk_lens"
        fail(OP, missing, "be given, or neither of the two extra arguments", None)
    if extra_sparse_indices is None:
        return Pools(kv_format, cache, ids, lengths, None, None, None)
    if compressed is None:
        fail(OP, "compressed_kv_cache", "be given with extra_sparse_indices", None)
    name = "extra_sparse_indices"
    extra_ids = _check_list(name, extra_sparse_indices, "T extra_W", sizes, device)
    name = "extra_sparse_topk_lens"
    extra_lengths = _check_list(name, extra_sparse_topk_lens, "T", sizes, device)
    return Pools(kv_format, cache, ids, lengths, compressed, extra_ids, extra_lengths)

"""Checks of the arguments of ``sparse_mla_decode``: pools, query, schedule, workspace, values."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.rope import Rope
from mlacast.dispatch.select import load
from mlacast.errors import check_tensor, check_type, fail
from mlacast.ops import value_checks
from mlacast.ops.query import (
    DECODE_QUERY_DTYPES,
    check_backend,
    check_decode_scale,
    check_fp8_query,
    check_lengths,
    check_prologue,
    check_query,
    check_sink,
)
from mlacast.ops.schedule import (
    SparseDecodeSchedule,
    check_num_splits,
    split_bytes,
    workspace_size,
)

OP = "sparse_mla_decode"


def check_sparse_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    kv_format: KvFormat,
    sm_scale: float | torch.Tensor,
    topk_length: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    extra_kv_format: KvFormat | None,
    attn_sink: torch.Tensor | None,
    q_norm_eps: float | None,
    rope: Rope | None,
    q_order: str,
    schedule: SparseDecodeSchedule | None,
    num_splits: int | None,
    batch_invariant: bool,
    workspace: torch.Tensor | None,
    v_scale: float | torch.Tensor,
    backend: str | None,
) -> None:
    """Check the arguments of ``sparse_mla_decode``, those about its output apart.

    Raises:
        TypeError: An argument is not of its Python type.
        ValueError: A shape, dtype, stride, device or value breaks the contract.
        UnsupportedError: A norm, rotation or order that no backend has for d_qk = 576.
    """
    sizes: dict[str, Any] = {}
    check_query(OP, q, "s_q h_q d_qk", sizes, DECODE_QUERY_DTYPES)
    device = q.device
    _check_pool("", k_cache, indices, topk_length, kv_format, sizes, device)
    extra = {
        "extra_k_cache": extra_k_cache,
        "extra_indices": extra_indices,
        "extra_kv_format": extra_kv_format,
    }
    if any(value is not None for value in extra.values()):
        for name, value in extra.items():
            if value is None:
                fail(
                    OP,
                    name,
                    "be given with " + " and ".join(key for key in extra if key != name),
                    "None",
                )
        _check_pool(
            "extra_",
            extra_k_cache,
            extra_indices,
            extra_topk_length,
            extra_kv_format,
            sizes,
            device,
        )
    elif extra_topk_length is not None:
        fail(OP, "extra_topk_length", "be None without extra_k_cache", "a value")
    check_fp8_query(OP, q, kv_format=kv_format, extra_kv_format=extra_kv_format)
    check_decode_scale(OP, "sm_scale", sm_scale, device)
    check_decode_scale(OP, "v_scale", v_scale, device)
    check_sink(OP, attn_sink, sizes, device)
    check_prologue(OP, q, sizes, q_norm_eps, rope, q_order)
    check_backend(OP, backend)
    check_type(OP, "batch_invariant", batch_invariant, bool, "a bool")
    if num_splits is not None:
        check_num_splits(OP, num_splits)
    if schedule is not None:
        check_type(OP, "schedule", schedule, SparseDecodeSchedule, "a SparseDecodeSchedule or None")
        schedule.check_matches(
            OP,
            s_q=sizes["s_q"],
            h_q=sizes["h_q"],
            topk=sizes["topk"],
            kv_format=kv_format,
            extra_topk=sizes.get("extra_topk", 0),
            extra_kv_format=extra_kv_format,
        )
        if num_splits is not None and num_splits != schedule.num_splits:
            fail(OP, "num_splits", f"be None or the schedule's {schedule.num_splits}", num_splits)
    if workspace is not None:
        check_tensor(
            OP, "workspace", workspace, "n", {}, dtype=torch.uint8, device=device, contiguous=True
        )
        needed = 0 if schedule is None else workspace_size(schedule)
        if workspace.shape[0] < needed:
            fail(
                OP,
                "workspace",
                f"hold {needed} bytes (workspace_size(schedule))",
                workspace.shape[0],
            )


def check_workspace(
    workspace: torch.Tensor,
    planner: str | None,
    q: torch.Tensor,
    width: int,
    num_splits: int | None,
    batch_invariant: bool,
) -> None:
    """Check that a workspace holds what the splits of a call leave, where kernels can store it.

    Args:
        workspace: uint8 [n].
        planner: Of the backend that runs the call; one without has no use for a workspace.
        q: The query.
        width: Index columns of both lists.
        num_splits: As in the call.
        batch_invariant: As in the call.

    Raises:
        ValueError: It is too small, or starts at no multiple of 16 bytes.
    """
    if planner is None:
        return
    s_q, h_q, _ = q.shape
    splits = num_splits or load(planner)(s_q, h_q, width, q.device, batch_invariant)
    needed = split_bytes(splits, s_q, h_q)
    past = workspace.data_ptr() % 16
    if needed and (workspace.numel() < needed or past):
        fail(
            OP,
            "workspace",
            f"hold {needed} bytes from a multiple of 16 on",
            f"{workspace.numel()} bytes at {past} past one",
            "plan_sparse_decode and workspace_size give the size",
        )


def _check_pool(
    prefix: str,
    cache: torch.Tensor | None,
    indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    kv_format: KvFormat | None,
    sizes: dict[str, Any],
    device: torch.device,
) -> None:
    """Check one pool: format, cache, indices, lengths, and that its rows fit the query."""
    check_type(
        OP, f"{prefix}kv_format", kv_format, KvFormat, "a mlacast.KvFormat such as KvFormat.V4"
    )
    if not isinstance(cache, torch.Tensor):
        raise TypeError(f"{OP}: {prefix}k_cache must be a torch.Tensor, got {type(cache).__name__}")
    if cache.device != device:
        fail(OP, f"{prefix}k_cache", f"be on {device} like the other arguments", cache.device)
    assert kv_format is not None, "check_type has refused None"
    _, _, d_qk = kv_format.check_cache(OP, f"{prefix}k_cache", cache)
    if d_qk != sizes["d_qk"]:
        fail(
            OP,
            f"{prefix}k_cache",
            f"hold rows of d_qk={sizes['d_qk']} like q",
            f"{d_qk} ({kv_format!r})",
        )
    check_tensor(
        OP,
        f"{prefix}indices",
        indices,
        f"s_q {prefix}topk",
        sizes,
        dtype=torch.int32,
        device=device,
        last_dim_contiguous=True,
    )
    check_lengths(OP, f"{prefix}topk_length", topk_length, sizes, device)


def check_sparse_decode_values(
    pool: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    extra_pool: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
) -> None:
    """Check slots, lengths and positions of a call; synchronises.

    Args:
        pool: Cache, indices and lengths.
        extra_pool: The same of the second pool, None for none.
        positions: Of the rotation, or None.
        cos_sin_cache: Its table.

    Raises:
        ValueError: A value is out of its range.
    """
    indices = pool[1]
    live = torch.zeros(indices.shape[0], dtype=torch.bool, device=indices.device)
    for prefix, (cache, listed, topk_length) in (("", pool), ("extra_", extra_pool)):
        if cache is None or listed is None:
            continue
        value_checks.check_lengths(OP, f"{prefix}topk_length", topk_length, listed.shape[-1])
        slots = cache.shape[0] * cache.shape[1]
        value_checks.check_indices(OP, f"{prefix}indices", listed, topk_length, slots)
        live = live | value_checks.live_rows(listed, topk_length)
    value_checks.check_positions(OP, positions, cos_sin_cache, live)

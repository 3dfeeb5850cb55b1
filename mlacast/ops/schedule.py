"""Split-KV schedules of ``sparse_mla_decode``, static in shapes."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.errors import check_count, check_type, fail
from mlacast.ops.layout import pool_features
from mlacast.ops.output import D_V
from mlacast.ops.query import MAX_HEADS
from mlacast.ops.signature import described_by_attributes

OP = "plan_sparse_decode"


@described_by_attributes
@dataclass(frozen=True)
class SparseDecodeSchedule:
    """How one shape of sparse decode is split.

    Lengths and indices are not part of it: they are read on the device.

    Attributes:
        s_q: Query tokens of a call.
        h_q: Query heads.
        topk: Width of ``indices``.
        kv_format: Format of ``k_cache``.
        extra_topk: Width of ``extra_indices``, 0 without a second pool.
        extra_kv_format: Format of the second pool, or None.
        num_splits: Ranges of index columns per row.
        batch_invariant: Chunk boundaries depend on the row and this configuration only.
    """

    s_q: int
    h_q: int
    topk: int
    kv_format: KvFormat
    extra_topk: int
    extra_kv_format: KvFormat | None
    num_splits: int
    batch_invariant: bool

    def check_matches(
        self,
        op: str,
        *,
        s_q: int,
        h_q: int,
        topk: int,
        kv_format: KvFormat,
        extra_topk: int,
        extra_kv_format: KvFormat | None,
    ) -> None:
        """Raise ValueError unless the schedule was made for a call of this shape."""
        call = {
            "s_q": s_q,
            "h_q": h_q,
            "topk": topk,
            "kv_format": kv_format,
            "extra_topk": extra_topk,
            "extra_kv_format": extra_kv_format,
        }
        for field in fields(self):
            if field.name in call and getattr(self, field.name) != call[field.name]:
                planned = getattr(self, field.name)
                fail(
                    op,
                    "schedule",
                    f"be planned for {field.name}={call[field.name]}",
                    planned,
                    "call plan_sparse_decode again",
                )


def split_bytes(num_splits: int, s_q: int, h_q: int) -> int:
    """Bytes of the states that splits leave: float32 outputs, maxima and sums, none for one."""
    return 0 if num_splits == 1 else num_splits * s_q * h_q * (D_V + 2) * 4


def check_num_splits(op: str, num_splits: int) -> None:
    """Check a number of splits."""
    check_type(op, "num_splits", num_splits, int, "an int or None")
    check_count(op, "num_splits", num_splits, least=1)


def _device(device: torch.device | str | None) -> torch.device:
    """Device of a plan."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _splits_of(
    device: torch.device,
    pools: frozenset[str],
    s_q: int,
    h_q: int,
    width: int,
    batch_invariant: bool,
) -> int:
    """Splits that the first backend for ``pools`` picks on ``device``."""
    impl = select("sparse_mla_decode", pools, arch_of(device), requested_backend(OP, None))
    if impl.planner is None:
        return 1
    splits: int = load(impl.planner)(s_q, h_q, width, device, batch_invariant)
    return splits


def plan_sparse_decode(
    s_q: int,
    h_q: int,
    topk: int,
    *,
    kv_format: KvFormat,
    extra_topk: int = 0,
    extra_kv_format: KvFormat | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    device: torch.device | str | None = None,
) -> SparseDecodeSchedule:
    """Make a schedule for calls of ``sparse_mla_decode`` with these shapes.

    Args:
        s_q: Query tokens, 0 or more.
        h_q: Query heads, 1..128.
        topk: Width of ``indices``, 0 or more.
        kv_format: Format of ``k_cache``.
        extra_topk: Width of ``extra_indices``; 0 without a second pool.
        extra_kv_format: Format of the second pool; given if and only if ``extra_topk`` belongs to
            one.
        num_splits: Ranges of index columns per row; None picks those that the backend of ``device``
            would pick for a call without a schedule.
        batch_invariant: Choose chunk boundaries that do not depend on ``s_q``.
        device: Where the calls will run; None means the current GPU if there is one, else the CPU.

    Returns:
        A schedule. It holds no lengths: the same object stays valid when those change.

    Raises:
        TypeError: An argument is not of the type above.
        ValueError: A size is out of range, or ``extra_topk`` comes without ``extra_kv_format``.
    """
    for name, value in (("s_q", s_q), ("h_q", h_q), ("topk", topk), ("extra_topk", extra_topk)):
        check_type(OP, name, value, int, "an int")
        check_count(OP, name, value)
    if not 1 <= h_q <= MAX_HEADS:
        fail(OP, "h_q", f"be 1 to {MAX_HEADS}", h_q)
    check_type(OP, "kv_format", kv_format, KvFormat, "a mlacast.KvFormat such as KvFormat.V4")
    if extra_kv_format is None and extra_topk:
        fail(OP, "extra_kv_format", "be given with extra_topk", "None")
    if extra_kv_format is not None:
        check_type(OP, "extra_kv_format", extra_kv_format, KvFormat, "a mlacast.KvFormat or None")
    if num_splits is not None:
        check_num_splits(OP, num_splits)
    check_type(OP, "batch_invariant", batch_invariant, bool, "a bool")
    check_type(OP, "device", device, (torch.device, str, type(None)), "a torch.device, str or None")
    splits = num_splits
    if splits is None:
        extra_name = None if extra_kv_format is None else extra_kv_format.name
        pools = pool_features(kv_format.name, extra_name)
        splits = _splits_of(_device(device), pools, s_q, h_q, topk + extra_topk, batch_invariant)
    return SparseDecodeSchedule(
        s_q, h_q, topk, kv_format, extra_topk, extra_kv_format, splits, batch_invariant
    )


def workspace_size(schedule: SparseDecodeSchedule) -> int:
    """Bytes of scratch memory that a call with this schedule can use.

    Args:
        schedule: From ``plan_sparse_decode``.

    Returns:
        float32 outputs, maxima and sums of every split,
        ``num_splits * s_q * h_q * (512 + 2) * 4``; 0 for one split.

    Raises:
        TypeError: ``schedule`` is no SparseDecodeSchedule.
    """
    check_type(
        "workspace_size", "schedule", schedule, SparseDecodeSchedule, "a SparseDecodeSchedule"
    )
    return split_bytes(schedule.num_splits, schedule.s_q, schedule.h_q)

"""Inputs of a case: pools that cases share, and sets of inputs that a graph rotates over."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import mlacast
from mlacast.bench.cases import PREFILL, Case
from mlacast.bench.costs import D_V, moved_bytes
from mlacast.descriptors.kv_format import KvFormat

PAGE_SIZE = 64
TABLE_ROWS = 1 << 16
HEADS_PER_GROUP = 8
NORM_EPS = 1e-6
# Rows encoded at once: the encoder's temporaries are several times the rows.
_APPEND_ROWS = 1 << 16
# A replay touches at least twice the L2 cache, so that nothing of the last one is left.
_CACHES_PER_REPLAY = 2
_FEWEST_SETS, _MOST_SETS = 4, 512


@dataclass(frozen=True)
class InputSet:
    """Inputs and output of one call; every set of a workload has its own.

    Attributes:
        q: [tokens, heads, d_qk] bfloat16.
        indices: [tokens, topk] int32.
        extra_indices: [tokens, extra_topk] int32, or None.
        kv: [rows, d_qk] bfloat16 for prefill, else None.
        positions: [tokens] int64.
        out: What the call fills.
    """

    q: Tensor
    indices: Tensor
    extra_indices: Tensor | None
    kv: Tensor | None
    positions: Tensor
    out: mlacast.QuantizedTensor | Tensor


@dataclass
class Pools:
    """Memory that cases share: decode pools by format, rows of prefill by shape."""

    device: torch.device
    _caches: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def cache(self, kv_format: KvFormat, slots: int, d_qk: int) -> Tensor:
        """Return a cache of random tokens, [slots / 64, 64, 1, bytes]; d_qk only for FP8."""
        key = (kv_format.name, slots)
        if key not in self._caches:
            width = None if kv_format.d_qk else d_qk
            pages = -(-slots // PAGE_SIZE)
            cache = kv_format.allocate(pages, PAGE_SIZE, d_qk=width, device=self.device)
            for start in range(0, slots, _APPEND_ROWS):
                names = torch.arange(start, min(start + _APPEND_ROWS, slots), device=self.device)
                latent = self.normal(names.shape[0], d_qk)
                mlacast.kv_cache_append(latent, names, cache, kv_format)
            self._caches[key] = cache
        return self._caches[key]

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normally distributed bfloat16."""
        return (torch.randn(shape, device=self.device) * scale).bfloat16()

    def integers(self, bound: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Uniform integers below ``bound``."""
        return torch.randint(0, bound, shape, device=self.device, dtype=dtype)


@dataclass(frozen=True)
class Workload:
    """A case with everything its calls read and write."""

    case: Case
    caches: dict[str, Tensor]
    attn_sink: Tensor | None
    table: Tensor | None
    sets: tuple[InputSet, ...]

    def arguments(self, item: InputSet, rows: Tensor | None = None) -> dict[str, Any]:
        """Arguments of the public operation and of its reference, without the output.

        Args:
            item: Input set.
            rows: Tokens to keep, None for all.
        """

        def pick(x: Tensor) -> Tensor:
            return x if rows is None else x[rows]

        case = self.case
        rope = None
        if self.table is not None:
            rope = mlacast.Rope(self.table, pick(item.positions))
        arguments: dict[str, Any] = {
            "q": pick(item.q),
            "indices": pick(item.indices),
            # Queries are normed to length sqrt(d_qk), so logits have a deviation of one.
            "sm_scale": case.d_qk**-0.5,
            "attn_sink": self.attn_sink,
            "q_norm_eps": NORM_EPS if case.fused else None,
            "rope": rope,
        }
        if item.kv is not None:
            arguments["kv"] = item.kv
        else:
            arguments |= {"kv_format": case.kv_format, **self.caches}
        if item.extra_indices is not None:
            arguments["extra_indices"] = pick(item.extra_indices)
            arguments["extra_kv_format"] = case.extra_kv_format
        return arguments

    def call(self, item: InputSet) -> Callable[[], object]:
        """Return the call that is timed: the public operation into the set's output."""
        op = getattr(mlacast, self.case.op)
        # A choice of the operation that the reference of the gate does not have.
        options = {"batch_invariant": True} if self.case.batch_invariant else {}
        return functools.partial(op, **self.arguments(item), **options, out=item.out)


def number_of_sets(case: Case, l2_bytes: int) -> int:
    """Input sets that a graph of the case rotates over; one for a burst."""
    if case.protocol == "burst":
        return 1
    wanted = math.ceil(_CACHES_PER_REPLAY * l2_bytes / moved_bytes(case))
    return min(max(wanted, _FEWEST_SETS), _MOST_SETS)


def prepare(case: Case, pools: Pools, num_sets: int, l2_bytes: int) -> Workload:
    """Draw ``num_sets`` sets of inputs for a case."""
    device = pools.device
    kvs: list[Tensor] = []
    caches = {}
    if case.kv_format is None:
        # Rows that fit the cache stay there: small calls rotate over several copies.
        copies = 1
        if case.protocol == "graph":
            copies += _CACHES_PER_REPLAY * l2_bytes // (case.rows * case.d_qk * 2)
        kvs = [pools.normal(case.rows, case.d_qk) for _ in range(min(copies, num_sets))]
    else:
        caches["k_cache"] = pools.cache(case.kv_format, case.rows, case.d_qk)
    if case.extra_kv_format is not None:
        caches["extra_k_cache"] = pools.cache(case.extra_kv_format, case.rows, case.d_qk)
    sets = tuple(
        InputSet(
            q=_query(case, pools),
            indices=pools.integers(case.rows, case.tokens, case.topk),
            extra_indices=pools.integers(case.rows, case.tokens, case.extra_topk)
            if case.extra_kv_format is not None
            else None,
            kv=kvs[at % len(kvs)] if case.op == PREFILL else None,
            positions=pools.integers(TABLE_ROWS, case.tokens, dtype=torch.int64),
            out=_output(case, device),
        )
        for at in range(num_sets)
    )
    if not case.fused:
        return Workload(case, caches, None, None, sets)
    angles = torch.rand((TABLE_ROWS, 32), device=device) * (2 * math.pi)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    return Workload(case, caches, torch.randn(case.heads, device=device), table, sets)


def _query(case: Case, pools: Pools) -> Tensor:
    """Return a query in bfloat16, over per-tensor FP8 caches in e4m3."""
    q = pools.normal(case.tokens, case.heads, case.d_qk, scale=3.0 if case.fused else 1.0)
    return q.to(torch.float8_e4m3fn) if case.kv_format is KvFormat.FP8 else q


def _output(case: Case, device: torch.device) -> mlacast.QuantizedTensor | Tensor:
    """Return the buffer a call fills: Mxfp8 in groups of 8 heads, or bfloat16."""
    if not case.fused:
        return plain_output(case, device)
    groups = max(case.heads // HEADS_PER_GROUP, 1)
    features = case.heads * D_V // groups
    return mlacast.QuantizedTensor.empty(case.tokens, groups, features, mlacast.Mxfp8(), device)


def plain_output(case: Case, device: torch.device) -> Tensor:
    """Return an empty bfloat16 output [tokens, heads, 512]."""
    return torch.empty((case.tokens, case.heads, D_V), dtype=torch.bfloat16, device=device)
